"""The familiar loop, `loss = engine(...).loss; engine.backward(loss); engine.step()`, and losses looked at early."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harmony_ds import BatchError, UnsupportedError
from harmony_ds.step.pending import PendingTensor
from tests.engine.drive import (
    adamw,
    config_of,
    engine_for,
    family,
    groups_of,
    loop,
    loop_plainly,
    loop_with,
    means_of,
    plainly,
    sgd,
)
from tests.engine.sizes import layer_bytes
from tests.oracle import assert_same, loss_in

pytestmark = pytest.mark.fixed_times

LLAMA = family("llama")
STEPS, ACCUMULATION = 3, 4
GROUPS = groups_of(LLAMA, STEPS, ACCUMULATION)
ONE_PACK_EACH = {"pack_layers": 1}
LOOKED = "looked at before its step"


class Switched(nn.Sequential):
    """A loss while it trains; scores in evaluation, or as a number says."""

    def forward(self, x: Tensor, scores: int = 0) -> Tensor:
        y: Tensor = super().forward(x)
        return y.square().mean() if self.training and scores < 2 else y


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning")
def test_scores_are_not_taken_for_a_loss() -> None:
    x, model = torch.ones(2, 5), Switched(nn.Linear(5, 5), nn.Linear(5, 5))
    with engine_for(model, sgd, config_of(1, None, ONE_PACK_EACH)) as engine:
        for evaluates in (False, True, False):
            engine.train(not evaluates)
            outputs = engine(x)
            assert outputs.shape == ((2, 5) if evaluates else ())
            engine.backward(outputs.sum())
            engine.step()
        assert engine.swap_report().ratio == 1.0
        engine.backward(engine(x, scores=1))
        told = engine(x, scores=2)  # as if it were the number of a step
        assert told.shape == ()
        with pytest.raises(BatchError, match=r"told the shape \(\) .* now it is \(2, 5\)"):
            told.argmax().item()
        assert torch.equal(engine(x, scores=2).argmax(), model(x, 2).argmax())


class Classifier(nn.Module):
    """Returns scores and what its blocks gave."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = []
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        return {"scores": self.head(x), "hidden": tuple(hidden)}


@pytest.mark.parametrize("devices", [1, 2])
def test_a_loss_of_the_programs_own_is_grouped_and_exact(devices: int) -> None:
    """And what the program has of each micro-batch is there after the last step."""
    source = torch.Generator().manual_seed(7)
    batches = [(torch.randn(3, 6, generator=source), torch.randint(5, (3,), generator=source)) for _ in range(8)]
    buffer, seen = torch.empty_like(batches[0][1]), []

    def loss_of(call: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        outputs, targets = call(batch[0]), buffer.copy_(batch[1])  # which is used again
        scores = outputs["scores"]
        seen.append(scores.detach())
        loss = F.nll_loss(scores.log_softmax(-1).view(-1, scores.size(-1)), targets.view(scores.shape[0]))
        return loss + 0.1 * outputs["hidden"][1].pow(2).mean()

    plain, model = Classifier(), Classifier()
    expected = loop_plainly(plain, batches, 4, loss_of, seeded=True)
    scores, seen = seen, []
    with engine_for(model, sgd, config_of(4, None, {"pack_layers": 1, "devices": devices})) as engine:
        losses, ratios = loop_with(engine, batches, loss_of)
    assert ratios[-1] == 1.0
    assert losses == expected
    assert all(torch.equal(torch.tensor(mine.tolist()), theirs) for mine, theirs in zip(seen, scores, strict=True))
    assert_same(model, plain, bitwise=True)


def test_a_hook_of_a_library_takes_nothing_for_a_loss() -> None:
    model = LLAMA.build(0.0)
    model.enable_input_require_grads()
    with engine_for(model, sgd, config_of(2, None, ONE_PACK_EACH)) as engine:
        for _ in range(2):
            engine.backward(engine(**GROUPS[0][0]).logits.square().mean())
            engine.step()
        assert engine.swap_report().ratio == 1.0


def test_outputs_of_a_shape_that_no_call_has_shown_are_computed_at_once() -> None:
    model = Classifier()
    with engine_for(model, sgd, config_of(2, None, ONE_PACK_EACH)) as engine:
        for rows, looks in ((4, False), (2, True), (2, False), (4, False)):
            with warnings.catch_warnings(record=True) as warned:
                first, second = (engine(torch.ones(rows, 6))["scores"] for _ in range(2))
                assert (type(first), type(second)) == (Tensor if looks else PendingTensor, PendingTensor)
                for scores in (first, second):
                    engine.backward(F.mse_loss(scores, torch.ones(rows, 5)))
                    engine.step()
            assert not warned


def test_the_warning_points_at_the_line_that_reads_the_loss() -> None:
    with (
        engine_for(LLAMA.build(0.0), sgd, config_of(2)) as engine,
        pytest.warns(RuntimeWarning, match=LOOKED) as warned,
    ):
        engine(**GROUPS[0][0]).loss.item()
    assert warned[0].filename == __file__


def in_place(total: Tensor, loss: Tensor) -> Tensor:
    total += loss.detach()
    return total


@pytest.mark.parametrize(
    ("add", "looks"),
    [
        (in_place, True),
        (lambda total, loss: total + loss.detach().float() / 1.0, False),
        (lambda total, loss: loss.detach() + total, False),
    ],
    ids=["in place", "out of place", "from the right"],
)
def test_sums_of_losses(add: Callable[[Tensor, Tensor], Tensor], looks: bool) -> None:
    plain, losses = plainly(LLAMA, 0.0, GROUPS, adamw)
    model, total = LLAMA.build(0.0), torch.zeros(())
    with (
        warnings.catch_warnings(record=True) as warned,
        engine_for(model, adamw, config_of(ACCUMULATION, None, ONE_PACK_EACH)) as engine,
    ):
        warnings.simplefilter("always")
        for batch in (batch for group in GROUPS for batch in group):
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            total = add(total, loss)
        found = total.item()
    assert len(warned) == looks, [str(w.message) for w in warned]
    expected = torch.zeros(())
    for value in (value for row in losses for value in row):
        expected = expected + torch.tensor(value)
    assert found == expected.item()
    assert_same(model, plain, bitwise=True)
    assert (engine.swap_report().ratio == 1.0) is not looks


def test_a_loss_used_after_the_step_keeps_its_value() -> None:
    _, losses = plainly(LLAMA, 0.0, GROUPS[:1], sgd)
    with engine_for(LLAMA.build(0.0), sgd, config_of(ACCUMULATION)) as engine:
        row = []
        for batch in GROUPS[0]:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            row.append(loss)
        again = groups_of(LLAMA, 1, ACCUMULATION)[0]
        engine.train_batch(iter(again))
        assert [loss.item() for loss in row] == losses[0]
        assert torch.stack([loss.detach() for loss in row]).mean().item() == means_of(losses)[0]
        assert f"{row[0]:.4f}" == f"{losses[0][0]:.4f}"
        assert row[0] < row[0] + 1
        assert (row[0] + row[1]).item() == pytest.approx(losses[0][0] + losses[0][1])
        assert float(sum(row)) == pytest.approx(sum(losses[0]))


def test_gradients_that_are_dropped_within_a_step_are_told_of() -> None:
    with engine_for(LLAMA.build(0.0), sgd, config_of(2)) as engine:
        engine.backward(engine(**GROUPS[0][0]).loss)
        engine.step()
        with pytest.warns(RuntimeWarning, match="drops the gradients of its micro-batches so far"):
            engine.zero_grad()


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning")
def test_losses_that_are_read_and_not_propagated_from_take_no_part_in_the_next_step() -> None:
    config = config_of(ACCUMULATION, None, {"pack_layers": 1, "stash": "device"})
    with engine_for(LLAMA.build(0.0), sgd, config) as engine:
        loop(engine, GROUPS[:1])
        planned = engine.memory_report().planned_peak_bytes
        validation = [engine(**batch).loss for batch in [*GROUPS[1], *GROUPS[2]]]
        known = [loss.item() for loss in validation]
        loop(engine, GROUPS[:1])
        assert engine.memory_report().planned_peak_bytes > planned  # while they were held
        loop(engine, GROUPS[:1])
        assert engine.memory_report().planned_peak_bytes == planned
        assert [loss.item() for loss in validation] == known


def test_what_the_program_has_of_a_micro_batch_that_it_never_propagates_from_is_computed_by_the_step() -> None:
    model = LLAMA.build(0.0)
    with torch.no_grad():
        expected = model(**GROUPS[0][0])
    with engine_for(model, sgd, config_of(2)) as engine:
        outputs = engine(**GROUPS[0][0])
        loss, tokens = outputs.loss, outputs.logits.argmax(-1)
        assert isinstance(tokens, PendingTensor)
        dropped = engine(**GROUPS[0][2])
        del outputs, dropped
        engine.step()
        wanted = engine(**GROUPS[0][1]).loss
        engine.backward(wanted)
        engine.step()
        assert wanted.item() > 0.0
        assert loss.item() == expected.loss.item()
        assert torch.equal(tokens, expected.logits.argmax(-1))


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning")
def test_another_way_through_the_model_beside_a_look_is_refused_by_name_and_training_goes_on() -> None:
    one = family("whisper")
    groups = groups_of(one, 1, 3)
    plain, _ = plainly(one, 0.1, groups, sgd, 0.5)
    model = one.build(0.1)
    with engine_for(model, sgd, config_of(3, 0.5, {"pack_layers": 1})) as engine:
        *before, last = [loss_in(engine(**batch)) for batch in groups[0]]
        before[0].item()
        for loss in before:
            engine.backward(loss)
            engine.step()
        engine.backward(last)
        with pytest.raises(UnsupportedError, match="another way through the model"):
            engine.step()
        engine.train_batch(iter(groups[0]))
    assert_same(model, plain, bitwise=False)


MICRO_BATCHES = 20
LONG = groups_of(LLAMA, 2, MICRO_BATCHES)


@pytest.fixture(scope="module")
def expected() -> tuple[nn.Module, list[list[float]]]:
    return plainly(LLAMA, 0.0, LONG, adamw, 0.5)


@pytest.mark.parametrize("every", [1, 10, 0], ids=["every", "every tenth", "never"])
def test_values_the_warning_and_the_ledger(every: int, expected: tuple[nn.Module, list[list[float]]]) -> None:
    plain, losses = expected
    model = LLAMA.build(0.0)
    seen: dict[tuple[int, int], float] = {}
    with (
        warnings.catch_warnings(record=True) as caught,
        engine_for(model, adamw, config_of(MICRO_BATCHES, 0.5, {"pack_layers": 1})) as engine,
    ):
        warnings.simplefilter("always")
        for step, group in enumerate(LONG):
            pending = []
            for i, batch in enumerate(group):
                loss = engine(**batch).loss
                if every and i % every == 0:
                    seen[step, i] = loss.item()
                engine.backward(loss)
                engine.step()
                pending.append(loss)
            assert [loss.item() for loss in pending] == losses[step]
        report = engine.swap_report()

    looks = len(range(0, MICRO_BATCHES, every)) if every else 0
    assert len(seen) == len(LONG) * looks
    assert all(value == losses[step][i] for (step, i), value in seen.items())
    assert len([w for w in caught if LOOKED in str(w.message)]) == (1 if looks else 0)
    assert_same(model, plain, bitwise=True)

    # A look swaps every layer in once more. If all were looked at, the step's own forward pass has nothing left to do.
    layers = layer_bytes(model, 4)
    forward = 0 if looks == MICRO_BATCHES else sum(layers[:-1])
    assert report.host_to_device["weights"] == looks * sum(layers) + forward + sum(layers)
    assert report.device_to_host["gradients"] == sum(layers)
    assert report.micro_batches == MICRO_BATCHES
    assert (report.ratio == 1.0) is (looks == 0)
