"""An engine over a tiny model, brought to where a step may be when something happens to it."""

from __future__ import annotations

import enum
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import HarmonyEngine
from harmony_ds.scheduler.plan import Task, TaskKind
from harmony_ds.step.pending_micro_batch import PendingMicroBatch
from harmony_ds.step.step import Step
from harmony_ds.step.transitions import StepState

GIB = 1 << 30


class Before(enum.Enum):
    """What of an open step has run before something happens to it."""

    NOTHING = "micro-batches are queued"
    FORWARD = "a loss was read"
    BACKWARD = "a gradient was read"


class Tiny(nn.Module):
    """Two layers, and a loss among the outputs. `troubles` are raised, each once, by forward passes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.troubles: list[BaseException] = []

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.troubles:
            raise self.troubles.pop()
        return self.second(x).square().mean()


class Drive:
    """An engine over `Tiny`, and what has been done with it."""

    def __init__(self, engine: HarmonyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.model: Any = engine.module
        self.patch = monkeypatch
        self.losses: list[Tensor] = []
        self.trains = engine.optimizer is not None

    @property
    def step(self) -> Step:
        return self.engine._steps.open

    def call(self) -> Tensor:
        loss: Tensor = self.engine(torch.ones(2, 4, requires_grad=not self.trains))
        self.losses.append(loss)
        return loss

    def come_to(self, before: Before) -> None:
        """Begin a step of which `before` has happened; its last micro-batch is one whose forward pass has not run."""
        if before is Before.BACKWARD:
            if not self.trains:
                self.call()
            self.engine.backward(self.call())
            if self.trains:
                assert self.model.first.weight.grad is not None
        elif before is Before.FORWARD:
            self.call().item()
        if self.trains or before is Before.NOTHING:  # a frozen model hands gradients on when all are propagated from
            self.call()
        assert self.step.state is (StepState.ACCUMULATED if before is Before.BACKWARD else StepState.OPEN)

    def end_in(self, state: StepState) -> PendingMicroBatch:
        """Bring a step to its end in `state`; return one of its micro-batches."""
        loss = self.call()
        pending = self.step.micro_batches[0]
        if state is StepState.DESTROYED:
            self.engine.destroy()
        elif state is StepState.FAILED:
            self.engine._steps.drop_steps()
        else:
            self.engine.backward(loss)
            self.engine.step()
            if state is StepState.DONE:
                self.engine.get_global_grad_norm()
        assert pending.step.state is state  # type: ignore[attr-defined]
        return pending

    def boundary(self) -> None:
        self.engine.backward(self.losses[-1])
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.step()

    def read_gradient(self) -> None:
        """Propagate back from the last loss, and have the gradients before the boundary."""
        self.engine.backward(self.losses[-1] if self.trains else self.losses[0])
        assert self.model.first.weight.grad is not None or not self.trains

    def fail_alone(self, error: BaseException | None) -> None:
        """Read the last loss, whose forward pass raises `error`; None: an earlier update has ended the engine."""
        if error is None:
            self.engine._state.health.fail("an update failed before")
        else:
            self.model.troubles.append(error)
        with suppress(Exception):
            self.losses[-1].item()

    def fail_at_boundary(self, error: BaseException | None) -> None:
        """Take the step, whose last forward pass raises `error`; None: the step fails after its first update."""
        if error is None:
            self.engine.on_progress(_raise_after_update)
        else:
            self.model.troubles.append(error)
        with suppress(Exception):
            self.boundary()

    def several_processes(self) -> None:
        self.patch.setattr(self.engine._state.world, "size", 2, raising=False)

    def another_has_read(self) -> None:
        """Let another process have read a loss, so that the step is not run again."""
        world = self.engine._state.world
        asked = world.any
        self.patch.setattr(world, "any", lambda kind, flag: kind == "begin a step" or asked(kind, flag), raising=False)


def _raise_after_update(done: int, total: int, task: Task) -> None:
    if task.kind is TaskKind.UPDATE:
        raise ValueError("in the middle of updates")
