"""Every transition of an optimizer step that can happen does happen, driven through the engine with a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from runpy import run_module

import pytest
import torch

from harmony_ds.errors import PeerFailedError, UsageError
from harmony_ds.step import recovery
from harmony_ds.step.step import TRANSITIONS, Step
from harmony_ds.step.transitions import Impossible, StepEvent, StepState, Transition, as_markdown
from tests.engine.drive import config_of, engine_for, sgd
from tests.step.drive import Before, Drive, Tiny

E = StepEvent
OVER = (StepState.FAILED, StepState.DESTROYED, StepState.DONE)
Taken = list[tuple[StepState, StepEvent, Transition]]
CELLS = [
    (state, event, transition)
    for (state, event), cell in TRANSITIONS.items()
    if not isinstance(cell, Impossible)
    for transition in cell
]
STATE_AFTER = {
    Before.NOTHING: StepState.OPEN,
    Before.FORWARD: StepState.OPEN,
    Before.BACKWARD: StepState.ACCUMULATED,
}
OF_OPEN_STEPS = [(before, *cell) for cell in CELLS for before in Before if STATE_AFTER[before] is cell[0]]
AFTER_BOUNDARY = [cell for cell in CELLS if cell[0] not in STATE_AFTER.values()]


def trigger(drive: Drive, event: StepEvent, action: str) -> None:
    """Let the transition of an open step come about."""
    if event is E.CALL:
        drive.call()
    elif action == "refuse_read_within_run":
        earlier, loss = drive.call(), drive.call()
        drive.model.second.register_forward_pre_hook(lambda *_: earlier.item())
        with pytest.raises(UsageError, match="a loss or an output of another call"):
            loss.item()
    elif event is E.READ_OUTPUT:
        drive.losses[-1].item()
    elif event is E.BACKWARD:
        drive.engine.backward(drive.losses[-1])
    elif action in ("run_early", "pass_gradients_on"):
        drive.read_gradient()
    elif action == "refuse_within_run":
        drive.engine.backward(drive.losses[-1])
        loss, weight = drive.call(), drive.model.first.weight
        drive.model.second.register_forward_pre_hook(lambda *_: weight.grad)
        with pytest.raises(UsageError, match="1 micro-batches wait for their backward passes"):
            loss.item()
    elif action == "may_read_gradients":
        _ = drive.model.first.weight.grad
    elif event is E.WRITE_PARAMETER:
        if (
            drive.step.state is StepState.ACCUMULATED
        ):  # else this would accumulate gradients before the write, and is refused
            drive.engine.backward(drive.losses[-1])
        with suppress(UsageError), torch.no_grad():
            drive.model.first.weight.add_(1)
    elif event is E.ZERO_GRAD:
        drive.engine.zero_grad()
    elif event is E.EVALUATE:
        drive.engine.eval_batch([torch.ones(2, 4)])
    elif event is E.BOUNDARY:
        drive.boundary()
    elif event is E.CALLER_FAILED:
        step = drive.step
        with pytest.raises(ValueError, match="the caller's own"), drive.engine._group_at_once(step):
            raise ValueError("the caller's own")
    elif event is E.LOAD_CHECKPOINT:
        drive.engine._steps.drop_steps()
    elif event is E.DESTROY:
        drive.engine.destroy()
    else:
        raise AssertionError(f"no test of {event}, {action}")


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Taken]:
    """Record every transition that a step takes; check that none is taken within another one of the same step."""
    taken: Taken = []
    within: list[Step] = []
    choose, handle = Step._transition, Step.handle

    def record(step: Step, event: StepEvent) -> Transition:
        transition = choose(step, event)
        taken.append((step.state, event, transition))
        return transition

    def handle_alone(step: Step, event: StepEvent, *arguments: object) -> object:
        reads = event is E.READ_GRADIENT and step.waits_for_backward_within_run()
        is_of_a_hook = reads or (event is E.READ_OUTPUT and step.runs_the_model())
        assert step not in within or is_of_a_hook, f"{event} within another event"
        within.append(step)
        try:
            return handle(step, event, *arguments)
        finally:
            within.pop()

    with monkeypatch.context() as patch:
        patch.setattr(Step, "_transition", record)
        patch.setattr(Step, "handle", handle_alone)
        yield taken


@contextmanager
def open_step(transition: Transition, before: Before, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Drive, Taken]]:
    """An open step with a history, on the model that the transition needs; with all transitions that are taken."""
    model = Tiny()
    is_frozen = transition.action.__name__ == "pass_gradients_on"
    model.requires_grad_(not is_frozen)
    with recorded(monkeypatch) as taken, engine_for(model, None if is_frozen else sgd, config_of(1)) as engine:
        drive = Drive(engine, monkeypatch)
        drive.come_to(before)
        yield drive, taken


def test_every_state_and_event_has_a_cell() -> None:
    assert set(TRANSITIONS) == set(product(StepState, StepEvent))
    for cell in TRANSITIONS.values():
        if isinstance(cell, Impossible):
            assert cell.reason
            continue
        assert [one.when is None for one in cell] == [False] * (len(cell) - 1) + [True]


@pytest.mark.parametrize(
    ("before", "state", "event", "transition"),
    OF_OPEN_STEPS,
    ids=[f"{before.name}-{event.name}-{one.action.__name__}" for before, _, event, one in OF_OPEN_STEPS],
)
@pytest.mark.filterwarnings("ignore")
def test_a_transition_of_an_open_step_happens(
    before: Before, state: StepState, event: StepEvent, transition: Transition, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_step(transition, before, monkeypatch) as (drive, taken):
        engine, step = drive.engine, drive.step
        assert step.state is state
        taken.clear()
        trigger(drive, event, transition.action.__name__)
        assert (state, event, transition) in taken
        assert step.state is (transition.to or state)
        if transition.to in OVER:
            assert not step.micro_batches
            assert engine.usable is (transition.to is not StepState.DESTROYED)


DROPPING = [
    (transition, before)
    for before, _, _, transition in OF_OPEN_STEPS
    # Forward passes of a frozen model whose loss was read do not run again.
    if transition.error_drops and (transition.action.__name__ != "pass_gradients_on" or before is Before.NOTHING)
]


@pytest.mark.parametrize(
    ("transition", "before"), DROPPING, ids=[f"{one.action.__name__}-{before.name}" for one, before in DROPPING]
)
@pytest.mark.filterwarnings("ignore")
def test_an_error_drops_the_step_where_the_table_says_so(
    transition: Transition, before: Before, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_step(transition, before, monkeypatch) as (drive, taken):
        engine, step = drive.engine, drive.step
        drive.model.troubles.append(ValueError("the model's own"))
        with pytest.raises(ValueError, match="the model's own"):
            drive.boundary() if transition.action.__name__ == "run_and_update" else drive.read_gradient()
        assert taken[-1][2] is transition
        assert step.state is StepState.FAILED and not step.micro_batches and engine.usable


@pytest.mark.parametrize(
    ("state", "event", "transition"),
    AFTER_BOUNDARY,
    ids=[f"{s.name}-{e.name}-{t.action.__name__}" for s, e, t in AFTER_BOUNDARY],
)
@pytest.mark.filterwarnings("ignore")
def test_a_transition_after_the_boundary_happens(
    state: StepState, event: StepEvent, transition: Transition, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorded(monkeypatch) as taken, engine_for(Tiny(), sgd, config_of(1)) as engine:
        drive = Drive(engine, monkeypatch)
        pending = drive.end_in(state)
        if event is E.READ_OUTPUT:
            with pytest.raises(Exception, match=r"not known any more|has been destroyed"):
                pending.outputs()
        elif event is E.BACKWARD:
            with pytest.raises(
                Exception, match=r"cannot be propagated back|propagated back from already|been destroyed"
            ):
                drive.losses[-1].backward()
        else:
            assert event is E.READ_OUTCOME and engine.get_global_grad_norm() is not None
        assert (state, event, transition) in taken
        assert pending.step.state is (transition.to or state)  # type: ignore[attr-defined]


@pytest.mark.parametrize("failure", [PeerFailedError(1, "has ended"), RuntimeError("the thread ended")])
def test_a_step_fails_whose_norm_never_comes(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_for(Tiny(), sgd, config_of(1)) as engine:
        step = Drive(engine, monkeypatch).end_in(StepState.UPDATING).step
        assert isinstance(step, Step)
        step.outcome.norm = Future()
        step.outcome.norm.set_exception(failure)
        with pytest.raises(type(failure)):
            engine.get_global_grad_norm()
        assert step.state is StepState.FAILED


@pytest.mark.filterwarnings("ignore")
def test_events_within_others_are_those_that_the_module_names(monkeypatch: pytest.MonkeyPatch) -> None:
    within: list[StepEvent] = []
    nested: set[tuple[StepEvent, StepEvent]] = set()
    handle = Step.handle

    def record(step: Step, event: StepEvent, *arguments: object) -> object:
        if within:
            nested.add((within[-1], event))
        within.append(event)
        try:
            return handle(step, event, *arguments)
        finally:
            within.pop()

    monkeypatch.setattr(Step, "handle", record)
    with engine_for(Tiny(), sgd, config_of(1)) as engine:
        drive = Drive(engine, monkeypatch)
        for _ in range(2):
            product = drive.call() * drive.call()
            engine.backward(product)
            product.item()
            engine.step()
    assert nested == {(E.READ_OUTPUT, E.READ_OUTPUT), (E.READ_OUTPUT, E.BACKWARD)}


def test_the_table_of_the_docs_is_that_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert as_markdown(TRANSITIONS) in page, "run python -m harmony_ds.step, and put what it prints there"


def test_both_tables_are_printed_by_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    run_module("harmony_ds.step", run_name="__main__")
    assert capsys.readouterr().out == f"{as_markdown(TRANSITIONS)}\n\n{recovery.as_markdown()}\n"
