"""`loss.backward()` in the place of `engine.backward(loss)`: divided by the accumulation steps, once, where it enters."""

# ruff: noqa: PLC3002

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds.errors import UsageError
from tests.engine.drive import assert_same, config_of, engine_for, sgd

pytestmark = pytest.mark.fixed_times

EARLY = "ignore:a loss or an output was looked at"


class Pair(nn.Module):
    """Two layers; gives what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, x: Tensor, gives: str = "loss") -> Any:
        hidden = torch.relu(self.first(x))
        logits = self.second(hidden)
        if gives == "logits":
            return logits
        loss = logits.pow(2).mean()
        both = {"dict": {"loss": loss, "logits": logits}, "twice": (loss, loss), "tuple": (loss, logits, hidden)}
        return both.get(gives, loss)


def looked(loss: Tensor) -> Tensor:
    loss.item()
    return loss


WAYS: dict[str, Callable[[Any, Tensor], Any]] = {
    "pending": lambda call, x: call(x).backward(),
    "pending and scaled": lambda call, x: (3 * call(x) + 1).backward(),
    "looked at": lambda call, x: looked(call(x)).backward(),
    "beside logits": lambda call, x: (lambda o: (looked(o["loss"]) + o["logits"].sum()).backward())(call(x, "dict")),
    "several outputs": lambda call, x: (lambda o: (o[0] + o[1].sum() * o[2].mean()).backward())(call(x, "tuple")),
    "the same twice": lambda call, x: call(x, "twice")[1].backward(),
    "a gradient": lambda call, x: call(x, "logits").backward(torch.full((2, 4), 0.25)),
    "a loss outside": lambda call, x: call(x, "logits").tanh().mean().backward(),
}


def inputs(number: int) -> Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(number))


@pytest.mark.filterwarnings(EARLY)
@pytest.mark.parametrize("managed", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_divided_once(way: str, managed: bool) -> None:
    model, plain = Pair(), Pair()
    for i in range(4):
        WAYS[way](plain, inputs(i))
    for parameter in plain.parameters():
        parameter.grad /= 4
    sgd(plain.parameters()).step()
    with engine_for(model, sgd, config_of(4, managed_gradient_accumulation=managed)) as engine:
        for i in range(4):
            WAYS[way](engine, inputs(i))
            if managed:
                engine.step()
        if not managed:
            engine.step()
        assert engine.global_steps == 1
        assert way != "pending" or engine.swap_report().ratio == 1.0
    assert_same(model, plain, bitwise=True)


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
