"""What can happen to an optimizer step, and what is done then: one table, by which `Step.handle` acts.

Events come from outside: from the program, or from autograd. The methods that the table names call each other by name. An
event comes within another one in these cases alone: BOUNDARY asks the step before for READ_OUTCOME; READ_OUTPUT of a
micro-batch that was propagated back from reads the outputs of those that share its loss, and propagates (READ_OUTPUT,
BACKWARD); hooks that a run calls may read gradients, which is refused (READ_GRADIENT).

`python -m harmony_ds.step.transitions` prints the table. What is done about an error in a run is in `recovery`; an error
that a run raises drops the step where the table says so.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass


class StepState(enum.Enum):
    """How far an optimizer step has come."""

    OPEN = "it takes micro-batches; forward passes of some may have run alone"
    ACCUMULATED = "the same, and gradients of some micro-batches have accumulated, which wait for the boundary"
    UPDATING = "all updates are issued; it may not be known yet whether the gradients were finite"
    DONE = "it is known what became of the step"
    FAILED = "it was dropped"
    DESTROYED = "its engine was destroyed before the boundary"


class StepEvent(enum.Enum):
    """Something that happens to an optimizer step."""

    CALL = "the engine is called with a micro-batch"
    READ_OUTPUT = "a loss or output that is not computed yet is read"
    BACKWARD = "the program propagates back from a loss or output"
    READ_GRADIENT = "a gradient is read or replaced before the boundary, or leads out of the model"
    WRITE_PARAMETER = "a parameter is about to be changed by hand; READ_GRADIENT came before"
    ZERO_GRAD = "zero_grad(); READ_GRADIENT came before"
    EVALUATE = "the model is about to be called without gradients"
    BOUNDARY = "engine.step() at a boundary, train_batch(), or optimizer.step()"
    READ_OUTCOME = "somebody asks what became of the step, or the next step is taken"
    CALLER_FAILED = "train_batch() or train_group() failed before the boundary"
    LOAD_CHECKPOINT = "a checkpoint is loaded"
    DESTROY = "engine.destroy()"


@dataclass(frozen=True, slots=True)
class Transition:
    """What is done when an event comes to a step in some state.

    Attributes:
        action: the method of `Step` that is called with the event's arguments.
        to: the state after it; None: the state stays as it is.
        sentence: what that means, for people.
        when: a property of `Step` that must be true for it; the first transition of a cell that fits is taken.
        error_drops: an error that one of its runs raises drops the step, whose state is FAILED then.
    """

    action: str
    to: StepState | None
    sentence: str
    when: str | None = None
    error_drops: bool = False


@dataclass(frozen=True, slots=True)
class Impossible:
    """An event that cannot come to a step in some state, and the reason."""

    reason: str


Cell = tuple[Transition, ...] | Impossible
OPEN, ACCUMULATED, UPDATING, DONE, FAILED, DESTROYED = StepState
E = StepEvent

_NEXT = Impossible("the next step has begun, which takes this event")
_BEFORE_BOUNDARY: dict[StepEvent, tuple[Transition, ...]] = {
    E.CALL: (
        Transition(
            "queue",
            None,
            "Copy its arguments and queue it; measure the model first if no micro-batch as large was measured.",
        ),
    ),
    E.READ_OUTPUT: (
        Transition(
            "refuse_read_within_run",
            None,
            "Refuse: code that the engine runs reads it, and a forward pass cannot run inside another run.",
            "runs_the_model",
        ),
        Transition(
            "read_output", None, "Run its forward pass now, alone; warn once that this micro-batch is not grouped."
        ),
    ),
    E.BACKWARD: (
        Transition(
            "note_backward",
            None,
            "Note that its backward pass runs with the group. If its inputs require gradients, READ_GRADIENT follows.",
        ),
    ),
    E.READ_GRADIENT: (
        Transition(
            "refuse_within_run",
            None,
            "Refuse: code that the engine runs reads it, and backward passes cannot run inside another run.",
            "waits_for_backward_within_run",
        ),
        Transition(
            "pass_gradients_on",
            DONE,
            "Run forward and backward: gradients go through a frozen model, and no step follows.",
            "trains_nothing",
            error_drops=True,
        ),
        Transition(
            "run_early",
            ACCUMULATED,
            "Run forward and backward of all micro-batches that were propagated back from, and keep their gradients.",
            "waits_for_backward",
            error_drops=True,
        ),
        Transition("may_read_gradients", None, "Run nothing: no micro-batch waits for its backward pass."),
    ),
    E.WRITE_PARAMETER: (
        Transition("check_write", None, "Refuse if a micro-batch that uses the old values still waits for backward()."),
    ),
    E.EVALUATE: (
        Transition(
            "run_due_forwards", None, "Run the forward passes that wait, in their order, if forward changes buffers."
        ),
    ),
    E.CALLER_FAILED: (Transition("drop", FAILED, "Drop the step: its micro-batches have to be handed over again."),),
    E.LOAD_CHECKPOINT: (Transition("drop", FAILED, "Drop the step: its micro-batches have to be handed over again."),),
    E.DESTROY: (Transition("drop_with_engine", DESTROYED, "Drop the step; warn if gradients are lost by that."),),
}
TRANSITIONS: dict[tuple[StepState, StepEvent], Cell] = {
    **{(state, event): _NEXT for state in StepState for event in StepEvent},
    **{(state, event): cell for state in (OPEN, ACCUMULATED) for event, cell in _BEFORE_BOUNDARY.items()},
    **{
        (state, E.READ_OUTCOME): Impossible("no update has been issued before the boundary")
        for state in (OPEN, ACCUMULATED)
    },
    (OPEN, E.ZERO_GRAD): (
        Transition("discard_gradients", None, "Discard the gradients that the program has put on parameters itself."),
    ),
    (ACCUMULATED, E.ZERO_GRAD): (
        Transition("discard_gradients", None, "Discard all gradients; warn once that those of micro-batches are lost."),
    ),
    (OPEN, E.BOUNDARY): (
        Transition(
            "take",
            UPDATING,
            "Run forward, backward and updates of what was propagated back from, and return when the updates are issued: "
            "one plan, unless the optimizer steps as a whole. Forget the other micro-batches.",
            error_drops=True,
        ),
    ),
    (ACCUMULATED, E.BOUNDARY): (
        Transition(
            "take",
            UPDATING,
            "Run forward and backward of what was propagated back from since, each loss by itself, then the updates from "
            "all gradients, and return when these are issued. Forget the other micro-batches.",
            error_drops=True,
        ),
    ),
    # ---- after the boundary
    (UPDATING, E.READ_OUTCOME): (
        Transition(
            "settle",
            DONE,
            "Wait for the norm. If it is inf or NaN and such steps are skipped, no weight has changed: count the step as "
            "skipped, and undo the scheduler's step. Else warn.",
            error_drops=True,
        ),
    ),
    (UPDATING, E.DESTROY): Impossible("DESTROY goes to the step that is open; this one is settled afterwards"),
    **{(state, E.READ_OUTCOME): Impossible("it is known already") for state in (DONE, FAILED, DESTROYED)},
    **{
        (state, E.READ_OUTPUT): (
            Transition("refuse_read", None, "Refuse: what was not read before the boundary is gone."),
        )
        for state in (UPDATING, DONE, FAILED, DESTROYED)
    },
    **{
        (state, E.BACKWARD): (Transition("refuse_backward", None, "Refuse: the step of that loss is over."),)
        for state in (UPDATING, DONE, FAILED, DESTROYED)
    },
}
"""What each event does to a step in each state."""


def possible() -> Iterator[tuple[StepState, StepEvent, Transition]]:
    """Yield every transition that can happen, by state and event."""
    for state in StepState:
        for event in StepEvent:
            cell = TRANSITIONS[state, event]
            if not isinstance(cell, Impossible):
                for transition in cell:
                    yield state, event, transition


def table() -> str:
    """Return the table as Markdown: for each event, what it does in which states."""
    lines = ["| event | state | when | next state | after an error | what is done |", "|---|---|---|---|---|---|"]
    for event in StepEvent:
        rows: dict[tuple[str, ...], list[str]] = {}
        for state in StepState:
            for row in _rows(TRANSITIONS[state, event]):
                rows.setdefault(row, []).append(state.name)
        name = event.name
        for (when, to, after_error, sentence), states in rows.items():
            lines.append(f"| {name} | {', '.join(states)} | {when} | {to} | {after_error} | {sentence} |")
            name = ""
    return "\n".join(lines)


def _rows(cell: Cell) -> list[tuple[str, str, str, str]]:
    """Return condition, next state, the state after an error, and sentence of each transition of a cell."""
    if isinstance(cell, Impossible):
        return [("", "", "", f"cannot happen: {cell.reason}")]
    return [
        (
            "" if one.when is None else one.when.replace("_", " "),
            "the same" if one.to is None else one.to.name,
            "FAILED" if one.error_drops else "the same",
            f"{one.sentence} `{one.action}`",
        )
        for one in cell
    ]


if __name__ == "__main__":
    print(table())  # noqa: T201 - that is what the module prints
