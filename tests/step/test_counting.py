"""A step whose updates are issued counts, whatever fails after that: nobody trains on its micro-batches again."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import HarmonyEngine
from harmony_ds.errors import PeerFailedError
from tests.engine.drive import config_of, engine_for, sgd

BATCHES = [torch.ones(2, 4), torch.full((2, 4), 2.0)]


class FailingSchedule:
    """Halves the learning rate at each step, and raises an error at the second one."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps == 2:
            raise ValueError("the schedule's own")
        for group in self.optimizer.param_groups:
            group["lr"] /= 2

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]


class UndoableSchedule(FailingSchedule):
    """One that the engine steps at once, and could undo."""

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def loss_of(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


def by_loop(engine: HarmonyEngine) -> None:
    for batch in BATCHES:
        engine.backward(loss_of(engine(batch)))
        engine.step()


def at_once(engine: HarmonyEngine) -> None:
    engine.train_batch(list(BATCHES), loss_fn=loss_of)


def by_group(engine: HarmonyEngine) -> None:
    engine.train_group(BATCHES, lambda batch: loss_of(engine.module(batch)) / len(BATCHES))


def weight_after_plain_steps(rates: list[float]) -> Tensor:
    model = nn.Linear(4, 4)
    model.load_state_dict(first_model().state_dict())
    optimizer = torch.optim.SGD(model.parameters())
    for rate in rates:
        optimizer.zero_grad()
        for batch in BATCHES:
            (loss_of(model(batch)) / len(BATCHES)).backward()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    return model.weight.detach()


def first_model() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(4, 4)


@pytest.mark.parametrize("take", [by_loop, at_once, by_group])
@pytest.mark.parametrize("schedule", [FailingSchedule, UndoableSchedule])
def test_a_step_counts_whose_scheduler_raises_an_error(
    take: Callable[[HarmonyEngine], None], schedule: type[FailingSchedule]
) -> None:
    with engine_for(first_model(), sgd, config_of(2), lr_scheduler=schedule) as engine:
        take(engine)
        with pytest.raises(ValueError, match="the schedule's own"):
            take(engine)
        counted = engine.global_steps, engine.global_samples, engine.micro_steps
        assert counted == (2, 2 * 2 * 2, 2 * 2)
        assert engine.was_step_applied() and engine.is_gradient_accumulation_boundary() is False
        take(engine)  # which begins a step of its own
        assert (engine.global_steps, engine.micro_steps) == (3, 3 * 2)
        assert torch.equal(engine.module.weight, weight_after_plain_steps([0.01, 0.005, 0.005]))


def test_a_step_counts_though_the_norm_of_the_one_before_is_not_known() -> None:
    with engine_for(first_model(), sgd, config_of(2)) as engine:
        by_loop(engine)
        outcome = engine._steps._current.outcome
        outcome.norm = Future()
        outcome.norm.set_exception(PeerFailedError(1, "has ended"))
        with pytest.raises(PeerFailedError):
            by_loop(engine)
        assert (engine.global_steps, engine.micro_steps) == (2, 2 * 2)
        assert torch.equal(engine.module.weight, weight_after_plain_steps([0.01, 0.01]))
