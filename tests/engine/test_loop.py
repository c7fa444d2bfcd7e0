"""The familiar loop, `loss = engine(...).loss; engine.backward(loss); engine.step()`, in the ways people write it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from harmony_ds import BatchError
from tests.engine.drive import (
    adamw,
    config_of,
    engine_for,
    family,
    groups_of,
    loop,
    means_of,
    optimizer_for,
    plainly,
    same_losses,
    sgd,
)
from tests.oracle import assert_same

LLAMA = family("llama")
STEPS, ACCUMULATION = 3, 4
GROUPS = groups_of(LLAMA, STEPS, ACCUMULATION)
ONE_PACK_EACH = {"pack_layers": 1}
LOOKED = "looked at before its accumulation boundary"


CASES = [
    ("llama", 0.0, None),
    ("llama", 0.1, 0.5),
    *((name, 0.0, None) for name in ("gpt2", "t5", "SharedDepthNet", "BareParameterNet", "SkipNet", "BatchNormNet")),
]


@pytest.mark.parametrize(("name", "dropout", "clip"), CASES)
def test_the_loop_is_grouped_and_exact(name: str, dropout: float, clip: float | None) -> None:
    one = family(name)
    groups, make = groups_of(one, 3, 3), optimizer_for(one)
    plain, losses = plainly(one, dropout, groups, make, clip)
    model = one.build(dropout)
    with engine_for(model, make, config_of(3, clip, ONE_PACK_EACH)) as engine:
        actual = loop(engine, groups)
        assert engine.swap_report().ratio == 1.0
    assert_same(model, plain, one.bitwise)
    assert all(same_losses(*rows, one.bitwise) for rows in zip(actual, losses, strict=True))


def test_the_warning_points_at_the_line_that_looked() -> None:
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
