"""Every transition of an optimizer step that can happen does happen, driven through the engine with a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import HarmonyEngine
from harmony_ds.distributed import PeerDiverged
from harmony_ds.errors import EngineFailedError, PeerFailedError
from harmony_ds.runtime.micro_batch import OffPlanError
from harmony_ds.scheduler.plan import Task, TaskKind
from harmony_ds.step.pending_micro_batch import PendingMicroBatch
from harmony_ds.step.step import Step
from harmony_ds.step.transitions import TRANSITIONS, Impossible, StepEvent, StepState, Transition, possible, table
from tests.engine.drive import config_of, engine_for, sgd

E = StepEvent
OPEN = (StepState.QUEUED, StepState.FORWARDED, StepState.GATHERED)
GIB = 1 << 30
ERRORS: dict[StepEvent, Callable[[], BaseException]] = {
    E.USER_ERROR: lambda: ValueError("the model's own"),
    E.OFF_PLAN: OffPlanError,
    E.OUT_OF_MEMORY: lambda: torch.OutOfMemoryError("out of memory"),
    E.PEER_DIVERGED: lambda: PeerDiverged("another process"),
    E.PEER_FAILED: lambda: PeerFailedError(1, "has ended"),
}
"""What a forward pass raises, by the event that it is to the step."""


class Tiny(nn.Module):
    """Two layers, and a loss among the outputs. `trouble` is raised, once, by the next forward pass."""

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

    def come_to(self, state: StepState) -> None:
        """Bring a step to `state`; its last micro-batch is one whose forward pass has not run."""
        if state is StepState.GATHERED:
            if not self.trains:
                self.call()
            self.engine.backward(self.call())
            if self.trains:
                assert self.model.first.weight.grad is not None
        elif state is StepState.FORWARDED:
            self.call().item()
        if self.trains or state is StepState.QUEUED:  # a frozen model hands gradients on when all are propagated from
            self.call()
        assert self.step.state is state

    def end_in(self, state: StepState) -> PendingMicroBatch:
        """Bring a step to `state`, and to its end; return one of its micro-batches."""
        loss = self.call()
        pending = self.step.micro_batches[0]
        if state is StepState.DESTROYED:
            self.engine.destroy()
        elif state is StepState.FAILED:
            self.engine._steps.forget()
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

    def fail_alone(self, event: StepEvent) -> None:
        """Read the last loss, whose forward pass meets `event`."""
        if event is E.UPDATE_FAILED:
            self.engine._state.health.fail("an update failed before")
        else:
            self.model.troubles.append(ERRORS[event]())
        with suppress(Exception):
            self.losses[-1].item()

    def fail_at_boundary(self, event: StepEvent) -> None:
        """Take the step, whose last forward pass meets `event`."""
        if event is E.UPDATE_FAILED:
            self.engine.on_progress(_raise_after_update)
        else:
            self.model.troubles.append(ERRORS[event]())
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


def trigger(drive: Drive, state: StepState, event: StepEvent, action: str) -> None:
    """Let the transition come about, in a step that is in `state`."""
    name = (event, action)
    if event is E.CALL:
        drive.call()
    elif event in (E.READ_OUTPUT, E.FORWARD_DUE) and state in OPEN:
        drive.losses[-1].item()
    elif event is E.BACKWARD and state in OPEN:
        drive.engine.backward(drive.losses[-1])
    elif action in ("gather", "pass_gradients_on"):
        drive.engine.backward(drive.losses[-1] if drive.trains else drive.losses[0])
        assert drive.model.first.weight.grad is not None or not drive.trains
    elif action == "nothing_to_gather":
        _ = drive.model.first.weight.grad
    elif event is E.WRITE_PARAMETER:
        drive.engine.backward(drive.losses[-1])
        with suppress(Exception), torch.no_grad():
            drive.model.first.weight.add_(1)
    elif event is E.ZERO_GRAD:
        drive.engine.zero_grad()
    elif event is E.BOUNDARY:
        drive.boundary()
    elif event is E.LOAD_CHECKPOINT:
        drive.engine._steps.forget()
    elif event is E.DESTROY:
        drive.engine.destroy()
    elif action in ("refuse_another_forward", "undo_alone"):
        if action == "refuse_another_forward":
            drive.several_processes()
        drive.fail_alone(event)
    elif name == (E.OUT_OF_MEMORY, "plan_for_less"):
        drive.engine._state.device.budget_bytes = GIB
        drive.fail_at_boundary(event) if state is StepState.QUEUED else drive.fail_alone(event)
    elif action == "measure_again":
        drive.fail_at_boundary(event) if state is StepState.QUEUED else drive.fail_alone(event)
    elif action in ("drop", "refuse_another_way", "give_up"):
        if event in (E.OFF_PLAN, E.PEER_DIVERGED):
            drive.another_has_read()
        drive.fail_at_boundary(event)
    else:
        raise AssertionError(f"no test of {name}")


def trigger_after_end(drive: Drive, state: StepState, event: StepEvent) -> None:
    """Let the transition come about in a step that is over."""
    pending = drive.end_in(state)
    step = pending.step
    assert isinstance(step, Step)
    if event is E.READ_OUTPUT:
        with pytest.raises(Exception, match=r"not known any more|has been destroyed"):
            pending.outputs()
    elif event is E.BACKWARD:
        with pytest.raises(Exception, match=r"cannot be propagated back|propagated back from already|been destroyed"):
            drive.losses[-1].backward()
    elif event is E.NORM_KNOWN:
        assert drive.engine.get_global_grad_norm() is not None
    else:
        failure = PeerFailedError(1, "has ended") if event is E.PEER_FAILED else RuntimeError("the thread ended")
        step.outcome.norm = Future()
        step.outcome.norm.set_exception(failure)
        with pytest.raises(type(failure)):
            drive.engine.get_global_grad_norm()


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[StepState, StepEvent, Transition]]]:
    """Record every transition that a step takes."""
    taken: list[tuple[StepState, StepEvent, Transition]] = []
    choose = Step._transition

    def record(step: Step, event: StepEvent) -> Transition:
        transition = choose(step, event)
        taken.append((step.state, event, transition))
        return transition

    with monkeypatch.context() as patch:
        patch.setattr(Step, "_transition", record)
        yield taken


def test_every_state_and_event_has_a_cell() -> None:
    assert set(TRANSITIONS) == set(product(StepState, StepEvent))
    for cell in TRANSITIONS.values():
        if isinstance(cell, Impossible):
            assert cell.reason
            continue
        assert [one.when is None for one in cell] == [False] * (len(cell) - 1) + [True]
        for one in cell:
            assert callable(getattr(Step, one.action)) and (one.when is None or hasattr(Step, one.when))


CELLS = list(possible())


@pytest.mark.parametrize(
    ("state", "event", "transition"), CELLS, ids=[f"{s.name}-{e.name}-{t.action}" for s, e, t in CELLS]
)
@pytest.mark.filterwarnings("ignore")
def test_a_transition_happens(
    state: StepState, event: StepEvent, transition: Transition, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Tiny()
    is_frozen = transition.action == "pass_gradients_on"
    model.requires_grad_(not is_frozen)
    with recorded(monkeypatch) as taken, engine_for(model, None if is_frozen else sgd, config_of(1)) as engine:
        with monkeypatch.context() as patch, suppress(EngineFailedError):
            drive = Drive(engine, patch)
            if state in OPEN:
                drive.come_to(state)
                step = drive.step
                taken.clear()
                trigger(drive, state, event, transition.action)
            else:
                trigger_after_end(drive, state, event)
                step = None
        assert (state, event, transition) in taken
        if step is not None and transition.to in (StepState.FAILED, StepState.DESTROYED, StepState.DONE):
            assert step.state is transition.to and not step.micro_batches
            assert engine.usable is (transition.to is not StepState.DESTROYED and transition.action != "give_up")


def test_the_table_of_the_docs_is_that_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert table() in page, "run python -m harmony_ds.step.transitions, and put what it prints there"
