"""`loss.backward()` in the place of `engine.backward(loss)`: what is wrong is told of. (What is equal to plain PyTorch is
in tests/exactness.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds.errors import UsageError
from tests.engine.drive import config_of, engine_for, random_rows, sgd

pytestmark = pytest.mark.fixed_times

EARLY = "ignore:a loss or an output was looked at"


class Pair(nn.Sequential):
    """Two layers and a loss."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).pow(2).mean()


def looked(loss: Tensor) -> Tensor:
    loss.item()
    return loss


def inputs(number: int) -> Tensor:
    return random_rows(number, 2, 8)


@pytest.mark.parametrize("divide", [lambda loss: loss / 4, lambda loss: torch.div(loss, 4) + 0.0])
def test_a_loss_that_was_divided_by_hand_is_warned_of_once(divide: Callable[[Any], Any]) -> None:
    with engine_for(Pair(), sgd, config_of(4)) as engine:
        with pytest.warns(RuntimeWarning, match="divided by gradient_accumulation_steps by hand"):
            divide(engine(inputs(0))).backward()
        divide(engine(inputs(1))).backward()
        (engine(inputs(2)) / 2).backward()
        engine.backward(engine(inputs(3)) / 4)


def test_a_loss_that_is_propagated_from_after_its_step_says_so() -> None:
    with engine_for(Pair(), sgd, config_of(2)) as engine:
        late = engine(inputs(0))
        engine.backward(engine(inputs(1)))
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        with pytest.raises(UsageError, match="its step is over"):
            late.backward()


@pytest.mark.filterwarnings(EARLY)
@pytest.mark.parametrize("late", [lambda loss: loss.backward(), lambda loss: loss.item()])
def test_a_loss_after_destroy_says_so(late: Callable[[Any], Any]) -> None:
    with engine_for(Pair(), sgd, config_of(2)) as engine:
        loss, known = engine(inputs(0)), looked(engine(inputs(1)))
    for act in (lambda: late(loss), lambda: engine.backward(loss), known.backward):
        with pytest.raises(UsageError, match="this engine has been destroyed"):
            act()


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_gradients_that_are_not_finite_are_told_of_once(clip: float, caplog: pytest.LogCaptureFixture) -> None:
    with engine_for(Pair(), sgd, config_of(1, gradient_clipping=clip)) as engine, caplog.at_level(logging.WARNING):
        for step in range(3):
            engine.backward(engine(inputs(step) * (float("nan") if step else 1.0)))
            engine.step()
        engine.finish_updates()
    told = [record.getMessage() for record in caplog.records if "not finite" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(
        "the gradients of optimizer step 2 hold inf or NaN (norm nan). Either a loss was not finite"
    )


def test_skipped_steps_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}
    with engine_for(Pair(), sgd, config_of(1, fp16=fp16)) as engine, caplog.at_level(logging.WARNING):
        for step in range(2):
            engine.backward(engine(inputs(step).half()))
            engine.step()
        assert engine.skipped_steps == 2
    told = [record.getMessage() for record in caplog.records if "was skipped" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("optimizer step 1 was skipped")
