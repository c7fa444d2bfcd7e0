"""The familiar loop, `loss = engine(...).loss; engine.backward(loss); engine.step()`, in the ways people write it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import BatchError, HarmonyEngine
from tests.engine.drive import adamw, config_of, engine_for, family, groups_of, loop, means_of, plainly, sgd
from tests.oracle import assert_same

LLAMA = family("llama")
STEPS, ACCUMULATION = 3, 4
GROUPS = groups_of(LLAMA, STEPS, ACCUMULATION)
ONE_PACK_EACH = {"pack_layers": 1}
LOOKED = "looked at before its accumulation boundary"


@pytest.mark.parametrize(("dropout", "clip"), [(0.0, None), (0.1, 0.5)])
def test_the_loop_is_grouped_and_exact(dropout: float, clip: float | None) -> None:
    plain, losses = plainly(LLAMA, dropout, GROUPS, adamw, clip)
    model = LLAMA.build(dropout)
    with engine_for(model, adamw, config_of(ACCUMULATION, clip, ONE_PACK_EACH)) as engine:
        assert loop(engine, GROUPS) == losses
        assert engine.swap_report().ratio == 1.0
    assert_same(model, plain, bitwise=True)


@pytest.mark.parametrize("name", ["gpt2", "t5", "SharedDepthNet", "BareParameterNet", "SkipNet", "BatchNormNet"])
def test_the_loop_of_other_models(name: str) -> None:
    one = family(name)
    groups = groups_of(one, 2, 3)
    plain, losses = plainly(one, 0.0, groups, sgd)
    model = one.build(0.0)
    actual = []
    with engine_for(model, sgd, config_of(3, None, ONE_PACK_EACH)) as engine:
        for group in groups:
            row = []
            for batch in group:
                outputs = engine(**batch)
                if name == "SharedDepthNet":
                    loss = outputs
                else:
                    loss = outputs["loss"] if name == "BareParameterNet" else outputs.loss
                engine.backward(loss)
                engine.step()
                row.append(loss)
            actual.append([float(loss) for loss in row])
        assert engine.swap_report().ratio == 1.0
    assert_same(model, plain, one.bitwise)
    assert [pytest.approx(row, rel=1e-6) for row in losses] == actual


@pytest.mark.parametrize(
    ("dropout", "look"),
    [(0.1, lambda i: True), (0.0, lambda i: i % 2 == 1), (0.1, lambda i: i == 0)],
    ids=["all", "second", "first"],
)
def test_looking_early_is_right_and_warned_of_once(dropout: float, look: Callable[[int], bool]) -> None:
    plain, losses = plainly(LLAMA, dropout, GROUPS, adamw, 0.5)
    model = LLAMA.build(dropout)
    with engine_for(model, adamw, config_of(ACCUMULATION, 0.5, ONE_PACK_EACH)) as engine:
        with pytest.warns(RuntimeWarning, match=LOOKED) as warned:
            actual = loop(engine, GROUPS, look)
        assert len(warned) == 1
        assert engine.swap_report().ratio > 1.0
    assert actual == losses
    assert_same(model, plain, bitwise=True)


def test_the_warning_points_at_the_line_that_looked() -> None:
    with (
        engine_for(LLAMA.build(0.0), sgd, config_of(2)) as engine,
        pytest.warns(RuntimeWarning, match=LOOKED) as warned,
    ):
        engine(**GROUPS[0][0]).loss.item()
    assert warned[0].filename == __file__


def run_with_total(add: Callable[[Tensor, Tensor], Tensor]) -> tuple[nn.Module, float, HarmonyEngine]:
    model = LLAMA.build(0.0)
    with engine_for(model, adamw, config_of(ACCUMULATION, None, ONE_PACK_EACH)) as engine:
        total = torch.zeros(())
        for group in GROUPS:
            for batch in group:
                loss = engine(**batch).loss
                engine.backward(loss)
                engine.step()
                total = add(total, loss)
        value = total.item()
    return model, value, engine


def in_place(total: Tensor, loss: Tensor) -> Tensor:
    total += loss.detach()
    return total


@pytest.mark.parametrize(
    ("add", "looks"),
    [
        (in_place, True),
        (lambda total, loss: total + loss.detach(), False),
        (lambda total, loss: loss.detach() + total, False),
        (lambda total, loss: total + loss.detach().float() / 1.0, False),
    ],
    ids=["in place", "out of place", "from the right", "float"],
)
def test_sums_of_losses(add: Callable[[Tensor, Tensor], Tensor], looks: bool) -> None:
    plain, losses = plainly(LLAMA, 0.0, GROUPS, adamw)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model, total, engine = run_with_total(add)
    assert len(warned) == looks, [str(w.message) for w in warned]
    expected = torch.zeros(())
    for loss in (loss for row in losses for loss in row):
        expected = expected + torch.tensor(loss)
    assert total == expected.item()
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


def test_a_loss_that_was_never_propagated_is_unknown_after_the_step() -> None:
    with engine_for(LLAMA.build(0.0), sgd, config_of(2)) as engine:
        forgotten = engine(**GROUPS[0][0]).loss
        engine.step()
        wanted = engine(**GROUPS[0][1]).loss
        engine.backward(wanted)
        engine.step()
        assert wanted.item() > 0.0
        with pytest.raises(BatchError, match="never propagated"):
            forgotten.item()
