"""Losses that are made of the outputs of several forward passes, which are one micro-batch; and train_batch with a
function that calls the engine itself.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harmony_ds import DoesNotFitError, HarmonyEngine, ModelError, UsageError
from tests.engine.drive import config_of, engine_for, loop_plainly, loop_with, means_of, seed_of, sgd
from tests.oracle import assert_same

pytestmark = pytest.mark.fixed_times

ACCUMULATION, STEPS, ROWS, WIDTH = 3, 3, 4, 6
Call = Callable[..., Tensor]
Loss = Callable[[Call, list[Tensor]], Tensor]


class Encoder(nn.Module):
    """Five layers, with dropout, and code between them and after the last."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)

        def block() -> nn.Module:
            more = [nn.BatchNorm1d(WIDTH)] if norm else []
            return nn.Sequential(nn.Linear(WIDTH, WIDTH), *more, nn.Tanh(), nn.Dropout(dropout))

        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.normalize(self.head(x), dim=-1)


def siamese(call: Call, x: list[Tensor]) -> Tensor:
    alike = torch.tensor([1.0, -1.0, 1.0, -1.0])
    return F.cosine_embedding_loss(call(x[0]), call(x[1]), alike, margin=0.2)


def triplet(call: Call, x: list[Tensor]) -> Tensor:
    return F.triplet_margin_loss(call(x[0]), call(x[1]), call(x[2]))


def info_nce(call: Call, x: list[Tensor]) -> Tensor:
    scores = call(x[0]) @ call(x[1]).T / 0.5
    return F.cross_entropy(scores, torch.arange(ROWS)) + F.cross_entropy(scores.T, torch.arange(ROWS))


def with_a_teacher(call: Call, x: list[Tensor]) -> Tensor:
    return F.mse_loss(call(x[0]), call(x[1]).detach())


def one_and_two(call: Call, x: list[Tensor]) -> Tensor:
    """A product of two passes, in every other micro-batch of one and a sum beside it."""
    if x[0][0, 0] > 0:
        return call(x[0]).square().mean()
    one, other = call(x[0]), call(x[1])
    return (one * other).mean() + one.sum() + call(x[2]).square().mean()


LOSSES: dict[str, Loss] = {one.__name__: one for one in (siamese, triplet, info_nce, with_a_teacher, one_and_two)}


def data() -> list[list[Tensor]]:
    source = torch.Generator().manual_seed(7)
    return [[torch.randn(ROWS, WIDTH, generator=source) for _ in range(3)] for _ in range(STEPS * ACCUMULATION)]


def plainly(
    model: nn.Module, loss_of: Loss, batches: list[list[Tensor]], accumulation: int, clip: float
) -> list[float]:
    """Plain PyTorch, in which each forward pass of a step draws from its own seed; the losses."""
    micro_batches, seeds = itertools.count(), iter(())

    def seeded(model: nn.Module, batch: list[Tensor]) -> Tensor:
        nonlocal seeds
        step, within = divmod(next(micro_batches), accumulation)
        if within == 0:
            seeds = (seed_of(step, number) for number in itertools.count())

        def call(x: Tensor) -> Tensor:
            torch.manual_seed(next(seeds))
            made: Tensor = model(x)
            return made

        return loss_of(call, batch)

    return loop_plainly(model, batches, accumulation, seeded, clip=clip)


def by_engine(
    engine: HarmonyEngine,
    loss_of: Loss,
    batches: list[list[Tensor]],
    ratio: float | None = 1.0,
    by_hand: bool = False,
) -> list[float]:
    """The same loop by the engine, whose steps take the swaps of `ratio`; the losses. `by_hand`: `loss.backward()`."""
    losses, ratios = loop_with(engine, batches, loss_of, by_hand)
    assert ratio is None or set(ratios) == {ratio}
    memory = engine.memory_report()
    assert memory.device_peak_bytes <= memory.planned_peak_bytes
    return losses


def assert_close(found: nn.Module, expected: nn.Module, relative: float = 1e-6) -> None:
    for own, other in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=relative, atol=1e-7)


LOOKING = pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning")


@pytest.fixture(autouse=True)
def _nothing_is_looked_at(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that looks at an output early, unless it is marked as LOOKING."""
    with warnings.catch_warnings():
        if request.node.get_closest_marker("filterwarnings") is None:
            warnings.filterwarnings("error", "a loss or an output was looked at")
        yield


SETTINGS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "a micro-batch each": {"accumulation": 1},
    "the program's own backward": {"by_hand": True, "accumulation": 4},  # 3 would round elsewhere
    "clipped": {"clip": 0.3},
    "two devices": {"harmony": {"devices": 2}},
    "two devices, clipped": {"harmony": {"devices": 2}, "clip": 0.3},
    "stash on the host": {"harmony": {"stash": "host"}},
    "resident": {"harmony": {"residency": 3}},
    "without grouping": {"harmony": {"grouping": False}, "ratio": None},
    "packs by the search": {"harmony": {"pack_layers": None}},
    "with batch normalization": {"norm": True},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_losses_of_one_pass_and_of_several_are_grouped_and_exact(setting: str) -> None:
    """Each kind by itself is in tests/exactness."""
    settings = SETTINGS[setting]
    accumulation, clip = settings.get("accumulation", ACCUMULATION), settings.get("clip", 0.0)
    norm = settings.get("norm", False)
    plain, model, batches = Encoder(0.2, norm), Encoder(0.2, norm), data()
    batches = batches[: len(batches) // accumulation * accumulation]
    expected = plainly(plain, one_and_two, batches, accumulation, clip)
    config = config_of(accumulation, clip, {"pack_layers": 1, **settings.get("harmony", {})})
    with engine_for(model, sgd, config) as engine:
        ratio, by_hand = settings.get("ratio", 1.0), settings.get("by_hand", False)
        assert by_engine(engine, one_and_two, batches, ratio, by_hand) == expected
    assert_same(model, plain, bitwise=True)


LOOKS: dict[str, Loss] = {}


def look(loss_of: Loss) -> Loss:
    LOOKS[loss_of.__name__] = loss_of
    return loss_of


@look
def at_a_pass_before(call: Call, x: list[Tensor]) -> Tensor:
    one, other = call(x[0]), call(x[1])
    one.tolist()
    return (one * other).mean()


@look
def at_a_pass_between(call: Call, x: list[Tensor]) -> Tensor:
    one = call(x[0])
    one.tolist()
    return (one * call(x[1])).mean()


@look
def at_the_loss(call: Call, x: list[Tensor]) -> Tensor:
    loss = (call(x[0]) * call(x[1])).mean()
    loss.item()
    return loss


@look
def for_the_input_of_another(call: Call, x: list[Tensor]) -> Tensor:
    return call(call(x[0])).square().mean()


@LOOKING
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("name", LOOKS)
def test_looking_early_changes_no_gradient(name: str, by_hand: bool) -> None:
    """Sums of gradients are regrouped: each pass runs back by itself."""
    plain, model = Encoder(0.2), Encoder(0.2)
    expected = plainly(plain, LOOKS[name], data()[:8], 4, 0.0)
    with engine_for(model, sgd, config_of(4, None, {"pack_layers": 1})) as engine:
        found = by_engine(engine, LOOKS[name], data()[:8], None, by_hand)
    assert found == pytest.approx(expected, rel=1e-6)
    assert_close(model, plain)


@LOOKING
@pytest.mark.parametrize("by_hand", [False, True])
def test_looking_after_backward_propagates_all_passes_of_the_loss(by_hand: bool) -> None:
    plain, model = Encoder(0.2), Encoder(0.2)
    plainly(plain, triplet, data()[:8], 4, 0.0)
    with engine_for(model, sgd, config_of(4, None, {"pack_layers": 1})) as engine:
        for number, batch in enumerate(data()[:8]):
            loss = triplet(engine, batch)
            if by_hand:
                loss.backward()
            else:
                engine.backward(loss)
            if number % 3 == 1:
                assert loss.item() > 0.0
            engine.step()
    assert_close(model, plain)


def test_losses_that_share_passes_in_turn_are_exact() -> None:
    """Passes 0 and 2 meet, and 1 and 3."""

    def crossed(call: Call, x: list[Tensor]) -> Tensor:
        first, second, third, fourth = call(x[0]), call(x[1]), call(x[2]), call(x[0] + x[1])
        return (first * third).mean() + (second * fourth).mean()

    plain, model = Encoder(0.2, norm=True), Encoder(0.2, norm=True)
    expected = plainly(plain, crossed, data(), 1, 0.0)
    with engine_for(model, sgd, config_of(1, None, {"pack_layers": 1})) as engine:
        found = []
        for x in data():
            first, second, third, fourth = engine(x[0]), engine(x[1]), engine(x[2]), engine(x[0] + x[1])
            losses = (first * third).mean(), (second * fourth).mean()
            engine.backward(losses[1])
            engine.backward(losses[0])
            engine.step()
            assert engine.swap_report().ratio == 1.0
            found.append((losses[0] + losses[1]).item())
        assert found == pytest.approx(expected, rel=1e-5)
    assert_close(model, plain, 1e-5)


class Remembering(Encoder):
    """A model whose layers read what another forward pass may have written last."""

    def forward(self, x: Tensor) -> Tensor:
        self.shift = x.mean(0, keepdim=True)
        for block in self.blocks:
            x = x + block(x + self.shift)
        return self.head(x)


def test_passes_that_read_what_others_wrote_are_refused_in_the_first_step() -> None:
    model = Remembering()
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    with engine_for(model, sgd, config_of(1, None, {"pack_layers": 1})) as engine:
        engine.backward(siamese(engine, data()[0]))
        with pytest.raises(ModelError, match="where it runs alone"):
            engine.step()
        assert all(torch.equal(one, before[name]) for name, one in model.named_parameters())


class Wide(nn.Sequential):
    """Layers, and outputs, that take more memory than what is between them."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)), nn.Linear(64, 1024))


def steps_of(loss_of: Loss, budget: int | None) -> tuple[int, int, nn.Module]:
    """Train a model; return the most that steps took and planned, and the model."""
    model = Wide()
    source = torch.Generator().manual_seed(7)
    batches = [[torch.randn(32, 64, generator=source) for _ in range(2)] for _ in range(4)]
    harmony = {} if budget is None else {"device_memory_gib": budget / 2**30}
    with engine_for(model, sgd, config_of(2, None, harmony)) as engine:
        by_engine(engine, loss_of, batches, None)
        memory = engine.memory_report()
        return memory.device_peak_bytes, memory.planned_peak_bytes, model


def test_the_memory_of_a_shared_loss_is_planned() -> None:
    def of_one(call: Call, x: list[Tensor]) -> Tensor:
        return call(x[0]).square().mean()

    def of_two(call: Call, x: list[Tensor]) -> Tensor:
        return (call(x[0]) - call(x[1])).square().mean()

    single, _, _ = steps_of(of_one, None)
    shared, planned, expected = steps_of(of_two, None)
    assert shared - single >= 4 * 32 * 1024  # the outputs of the other pass
    assert shared <= planned
    for budget in (planned - 30_000, planned - 100_000):  # in which less may stay on the device from step to step
        peak, below, model = steps_of(of_two, budget)
        assert peak <= below <= budget
        assert_same(model, expected, bitwise=True)
    with pytest.raises(DoesNotFitError, match="device memory"):
        steps_of(of_two, 600_000)


@pytest.mark.parametrize("rows", [(8, 8), (16, 16), (2, 2)], ids=["pairs joined", "sets joined", "in slices"])
@pytest.mark.parametrize("name", ["siamese", "triplet", "one_and_two"])
def test_passes_may_be_joined_or_cut(name: str, rows: tuple[int, int]) -> None:
    """To rounding: joined calls add up rows of several passes at once. A loss never meets only a part of its passes."""
    plain, model = Encoder(), Encoder()
    expected = plainly(plain, LOSSES[name], data(), ACCUMULATION, 0.3)
    harmony = {"pack_layers": 1, "micro_batch": {"forward": rows[0], "backward": rows[1]}}
    with engine_for(model, sgd, config_of(ACCUMULATION, 0.3, harmony)) as engine:
        found = by_engine(engine, LOSSES[name], data())
    assert found == pytest.approx(expected, rel=1e-5)
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_scales_such_a_loss_once(precision: str) -> None:
    plain, model = Encoder(), Encoder()
    for batch in data()[:ACCUMULATION]:
        (info_nce(plain, batch) / ACCUMULATION).backward()
    expected = torch.cat([one.grad.flatten() for one in plain.parameters() if one.grad is not None]).norm().item()
    block = {"enabled": True, **({"initial_scale_power": 8} if precision == "fp16" else {})}
    with engine_for(model, sgd, config_of(ACCUMULATION, 0.3, {"pack_layers": 1}, **{precision: block})) as engine:

        def call(x: Tensor) -> Tensor:
            made: Tensor = engine(x.to(getattr(torch, "float16" if precision == "fp16" else "bfloat16"))).float()
            return made

        for batch in data()[:ACCUMULATION]:
            engine.backward(info_nce(call, batch))
            engine.step()
        assert engine.swap_report().ratio == 1.0
        assert engine.get_global_grad_norm() == pytest.approx(expected, rel=0.05)


def test_outputs_and_what_was_made_of_them_are_there_after_the_step() -> None:
    model, x = Encoder(), data()[0]
    one, other = model(x[0]).detach(), model(x[1]).detach()
    with engine_for(model, sgd, config_of(1, None, {"pack_layers": 1})) as engine:
        first, second = engine(x[0]), engine(x[1])
        distances = (first - second).square().mean(-1)
        engine.backward(distances.mean())
        engine.step()
        assert engine.swap_report().ratio == 1.0
        assert torch.equal(torch.tensor(distances.tolist()), (one - other).square().mean(-1))
        assert torch.equal(torch.tensor(first.tolist()), one)
        assert torch.equal(torch.tensor(second.tolist()), other)


# ---- functions that call the engine themselves


@pytest.mark.parametrize("name", ["siamese", "triplet", "with_a_teacher"])
def test_a_function_of_engine_and_batch_is_grouped_and_exact(name: str) -> None:
    """To rounding: the calls of a function share a random stream, and a weight's gradients add up call by call."""
    plain, model, batches = Encoder(0.2), Encoder(0.2), data()
    losses = loop_plainly(plain, batches, ACCUMULATION, LOSSES[name], seeded=True)
    expected = means_of([losses[first : first + ACCUMULATION] for first in range(0, len(losses), ACCUMULATION)])
    with engine_for(model, sgd, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine:
        loader = iter(batches)
        found = []
        for _ in expected:
            found.append(engine.train_batch(loader, compute_loss=LOSSES[name]).item())
            assert engine.swap_report().ratio <= 1.0  # less where a teacher's pass needs no backward pass
    assert found == pytest.approx(expected, rel=1e-6)
    assert_close(model, plain)


@LOOKING
def test_a_function_may_look_and_may_run_a_reference_without_gradients() -> None:
    """The passes of the reference are grouped, too."""
    seen = []

    def compute_loss(engine: HarmonyEngine, batch: dict[str, Tensor]) -> Tensor:
        assert isinstance(engine, (HarmonyEngine, nn.Module))
        with torch.no_grad():
            reference = engine(batch["x"])
        outputs = engine(batch["x"] + 1.0)
        loss = (outputs - reference).square().mean()
        seen.append(loss.item())
        return loss

    plain, model = Encoder(), Encoder()
    batches = [{"x": batch[0]} for batch in data()[:4]]
    loop_plainly(plain, batches, 2, compute_loss)
    with engine_for(model, sgd, config_of(2, None, {"pack_layers": 1})) as engine:
        for step in range(2):
            engine.train_batch(batches[2 * step : 2 * step + 2], compute_loss=compute_loss)
            assert engine.swap_report().ratio == 1.0
    assert_same(model, plain, bitwise=True)
    assert seen[0] == seen[4]


def test_both_kinds_of_functions_are_refused() -> None:
    with (
        engine_for(Encoder(), sgd, config_of(1)) as engine,
        pytest.raises(UsageError, match="not both"),
    ):
        engine.train_batch(data()[:1], lambda outputs: outputs.mean(), compute_loss=LOSSES["siamese"])


def test_a_function_that_calls_backward_is_refused() -> None:
    def compute_loss(engine: HarmonyEngine, batch: list[Tensor]) -> Tensor:
        return engine.backward(engine(batch[0]).square().mean())

    model = Encoder()
    with engine_for(model, sgd, config_of(1)) as engine:
        with pytest.raises(UsageError, match="return the loss instead"):
            engine.train_batch(data()[:1], compute_loss=compute_loss)
        engine.train_batch(data()[:1], compute_loss=LOSSES["siamese"])


def test_passes_without_gradients_within_a_step_are_reported_apart() -> None:
    model = Encoder()
    with engine_for(model, sgd, config_of(2, None, {"pack_layers": 1})) as engine:
        for step, references in enumerate((0, 2, 1, 0)):
            for place, batch in enumerate(data()[:2]):
                reference = torch.zeros(())
                if place < references:
                    with torch.no_grad():
                        reference = engine(batch[1])
                engine.backward((engine(batch[0]) - reference).square().mean())
                engine.step()
            report = engine.swap_report()
            nbytes = 5 * 256  # layers, in memory that is aligned
            assert report.ratio == 1.0
            assert (report.beside_calls, report.beside_bytes) == (references, references * nbytes)
            assert report.beside_ratio == pytest.approx(references * nbytes / report.lower_bound_bytes)
            assert ("without gradients" in str(report)) is bool(references), step
        assert "beside" not in str(report)


def test_calls_in_a_streaming_context_are_the_engines_own() -> None:
    """They enter the ds_config's autocast, and copy their arguments."""
    model, x = Encoder(), data()[0][0]
    config = config_of(1, None, {"pack_layers": 1}, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    with engine_for(model, sgd, config) as engine:
        with torch.no_grad():
            expected = engine(x)
        with engine.streaming():
            found = engine(x)
        assert torch.equal(found, expected)
        assert not torch.equal(found.float(), model(x))
