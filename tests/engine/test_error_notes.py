"""An error says which micro-batch and layer it is of, and where the program called that micro-batch."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import HarmonyEngine
from tests.engine.drive import config_of, engine_for, sgd

pytestmark = pytest.mark.fixed_times

ACCUMULATION = 4
Run = Callable[[HarmonyEngine, list[Tensor]], None]


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, refuses: bool) -> Tensor:
        ctx.refuses = refuses
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.refuses:
            raise ArithmeticError("refused in backward")
        return gradient, None


class Layers(nn.Module):
    """Embeds numbers; one of 7 is refused in the backward pass of the layer `middle`, one of 8 between layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.e, self.middle, self.last = nn.Embedding(10, 6), Middle(6, 6), nn.Linear(6, 6)

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.e(numbers)
        if (numbers == 8).any():
            raise ArithmeticError("refused between layers")
        y: Tensor = self.last(self.middle(x, bool((numbers == 7).any())))
        return y.square().mean()


class Middle(nn.Linear):
    def forward(self, x: Tensor, refuses: bool) -> Tensor:  # type: ignore[override]
        y: Tensor = Refusing.apply(super().forward(x), refuses)
        return y


def familiar(engine: HarmonyEngine, data: list[Tensor]) -> int:
    """Return the line that calls the engine."""
    for numbers in data:
        line, loss = sys._getframe().f_lineno, engine(numbers)
        engine.backward(loss)
        engine.step()
    return line


def fails_with(engine: HarmonyEngine, run: Callable[[], Any], error: type[Exception]) -> str:
    with pytest.raises(error) as failed:
        run()
    assert engine.usable
    notes = getattr(failed.value, "__notes__", [])
    assert len(notes) == 1
    assert notes[0] in "".join(traceback.format_exception(failed.value))
    return str(notes[0])


def numbers(*bad: int) -> list[Tensor]:
    """Four micro-batches, of which the third holds `bad` numbers."""
    return [torch.tensor([1, 2]), torch.tensor([3, 4]), torch.tensor([5, *bad, 6][:2]), torch.tensor([0, 1])]


@pytest.mark.parametrize(
    ("bad", "error", "layer"),
    [(99, IndexError, ", layer e"), (7, ArithmeticError, ", layer middle"), (8, ArithmeticError, "")],
)
def test_a_step_names_the_micro_batch_the_layer_and_the_line(bad: int, error: type[Exception], layer: str) -> None:
    clipping = 1.0  # so that no layer is updated before the last backward pass
    with engine_for(Layers(), sgd, config_of(ACCUMULATION, clipping, {"pack_layers": 1})) as engine:
        line = familiar(engine, numbers())
        note = fails_with(engine, lambda: familiar(engine, numbers(bad)), error)
        assert note == f"harmony_ds: micro-batch 3 of 4{layer}, called in {__file__}, line {line}"
        familiar(engine, numbers())  # training goes on


def test_train_batch_names_the_micro_batch(caplog: pytest.LogCaptureFixture) -> None:
    with engine_for(Layers(), sgd, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine:
        engine.train_batch(numbers())
        note = fails_with(engine, lambda: engine.train_batch(numbers(99)), IndexError)
        assert note.startswith(f"harmony_ds: micro-batch 3 of 4, layer e, called in {__file__}, line ")


def test_the_first_step_names_the_micro_batch_that_was_measured() -> None:
    with engine_for(Layers(), sgd, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine:
        larger = [*numbers()[:2], torch.tensor([5, 99, 6, 6, 6, 6, 6, 6])]
        note = fails_with(engine, lambda: engine.train_batch(larger), IndexError)
        assert note.startswith(f"harmony_ds: micro-batch 3, while it was measured, called in {__file__}, line ")


def test_the_first_step_names_the_micro_batch_whose_loss_is_compared() -> None:
    with engine_for(Layers(), sgd, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine:
        group = [torch.tensor([1, 2]), torch.tensor([3, 99]), *numbers()[2:]]
        note = fails_with(engine, lambda: engine.train_batch(group), IndexError)
        assert note.startswith(f"harmony_ds: micro-batch 2, while it ran alone, called in {__file__}, line ")


def test_a_loss_that_fails_names_its_micro_batch() -> None:
    seen: list[int] = []

    def loss_of(loss: Tensor) -> Tensor:
        seen.append(1)
        if fails and len(seen) == 3:
            raise ArithmeticError("a loss")
        return loss * 1

    with engine_for(Layers(), sgd, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine:
        fails = False
        engine.train_batch(numbers(), loss_of)
        seen.clear()
        fails = True
        note = fails_with(engine, lambda: engine.train_batch(numbers(), loss_of), ArithmeticError)
        assert note.startswith("harmony_ds: micro-batch 3 of 4, called in ")


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning")
def test_a_loss_that_is_read_early_names_its_micro_batch() -> None:
    with engine_for(Layers(), sgd, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine:
        familiar(engine, numbers())
        good, bad = engine(torch.tensor([1, 2])), engine(torch.tensor([5, 99]))
        note = fails_with(engine, bad.item, IndexError)
        assert note.startswith("harmony_ds: micro-batch 2 of 2, layer e, called in ")
        engine.backward(good)


def test_an_error_that_the_model_catches_is_not_taken_for_a_later_one() -> None:
    class Catching(Layers):
        def forward(self, numbers: Tensor) -> Tensor:
            try:
                return super().forward(numbers)
            except IndexError:
                raise ArithmeticError("instead") from None

    with engine_for(Catching(), sgd, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine:
        familiar(engine, numbers())
        note = fails_with(engine, lambda: familiar(engine, numbers(99)), ArithmeticError)
        assert note.startswith("harmony_ds: micro-batch 3 of 4, called in ")


@pytest.mark.parametrize(("dtype", "speaks"), [("bf16", False), ("fp16", True)])
def test_a_skipped_step_speaks_of_a_loss_scale_only_where_there_is_one(
    dtype: str, speaks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(ACCUMULATION, 1.0, {"pack_layers": 1}, **{dtype: {"enabled": True}})
    with engine_for(Layers(), sgd, config) as engine:
        engine.train_batch(numbers(), lambda loss: loss * float("inf"))
        assert engine.skipped_steps == 1
    (told,) = [record.getMessage() for record in caplog.records if "was skipped" in record.getMessage()]
    assert ("loss scale" in told) is speaks
    assert "its gradients hold inf or NaN" in told
