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


def by_own_backward(engine: HarmonyEngine) -> None:
    for batch in BATCHES:
        loss_of(engine(batch)).backward()
    engine.step()


def in_two_groups(engine: HarmonyEngine) -> None:
    for batch in BATCHES:
        engine.train_group([batch], lambda batch: loss_of(engine.module(batch)), boundary=False)
    engine.end_group()


def by_engine_backward(engine: HarmonyEngine) -> None:
    for batch in BATCHES:
        engine.backward(loss_of(engine(batch)))
    engine.step()


@pytest.mark.parametrize("train", [by_own_backward, in_two_groups, by_engine_backward])
def test_samples_are_those_of_all_backward_passes_where_the_program_manages_accumulation(
    train: Callable[[HarmonyEngine], None],
) -> None:
    config = config_of(1, managed_gradient_accumulation=False)
    with engine_for(first_model(), sgd, config) as engine:
        for step in (1, 2):
            train(engine)
            assert engine.global_samples == step * 2 * len(BATCHES)


def test_gradients_for_another_optimizer_stay_when_a_step_by_hand_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(first_model(), first_model())
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with engine_for(model, lambda _: optimizer, config_of(1)) as engine:
        loss_of(engine(BATCHES[0])).backward()
        model[0].weight.grad = torch.ones(4, 4)
        assert engine.optimizer is not None
        monkeypatch.setattr(engine._steps.context.override, "check", _fail)
        with pytest.raises(ValueError, match="the optimizer cannot step"):
            optimizer.step()
        monkeypatch.undo()
        assert model[0].weight.grad is not None


def _fail() -> None:
    raise ValueError("the optimizer cannot step")


def test_an_interrupted_wait_for_aliases_does_not_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    model = first_model()
    with engine_for(model, sgd, config_of(1)) as engine:
        alias = model.weight.data
        loss_of(engine(BATCHES[0])).backward()

        def interrupted() -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(engine._steps, "wait_for_updates", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        assert engine.usable and engine.global_steps == 1
        loss_of(engine(BATCHES[0])).backward()
        engine.step()
        assert engine.global_steps == 2 and torch.equal(alias, model.weight)


def test_an_evaluation_that_cannot_begin_leaves_the_model_in_training_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    model = first_model()
    with engine_for(model, sgd, config_of(1)) as engine:
        monkeypatch.setattr(engine._state.runtime.updater, "wait_all", _fail)
        with pytest.raises(ValueError, match="cannot step"):
            engine.eval_batch(BATCHES[:1], loss_fn=loss_of)
        monkeypatch.undo()
        assert model.training
