"""What can happen to an optimizer step, and what is done then: one table, by which `Step.handle` acts.

`python -m harmony_ds.step.transitions` prints it. Nothing else moves a step from one state to another.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass


class StepState(enum.Enum):
    """How far an optimizer step has come."""

    QUEUED = "its micro-batches wait, or there is none yet; nothing of it has run"
    FORWARDED = "forward passes of some micro-batches have run by themselves"
    GATHERED = "gradients of some micro-batches are there, and wait for the others"
    UPDATING = "all updates are issued; it may not be known yet whether the gradients were finite"
    DONE = "it is known what became of the step"
    FAILED = "it was dropped"
    DESTROYED = "its engine was destroyed before the boundary"


class StepEvent(enum.Enum):
    """Something that happens to an optimizer step."""

    CALL = "the engine is called with a micro-batch"
    READ_OUTPUT = "a loss or output that is not computed yet is read"
    FORWARD_DUE = "a forward pass has to run by itself: it changes buffers, or weights are about to change"
    BACKWARD = "the program propagates back from a loss or output"
    READ_GRADIENT = "a gradient is read or replaced before the boundary, or leads out of the model"
    WRITE_PARAMETER = "a parameter is about to be changed by hand"
    ZERO_GRAD = "zero_grad()"
    BOUNDARY = "engine.step() at a boundary, train_batch(), or optimizer.step()"
    NORM_KNOWN = "somebody asks what became of the step, or the next step is taken"
    USER_ERROR = "the model, a loss, a check or the planner raised an error"
    OFF_PLAN = "a layer call came that was not measured"
    OUT_OF_MEMORY = "the device ran out of memory"
    PEER_DIVERGED = "another process runs the step again"
    PEER_FAILED = "another process failed, or ended"
    UPDATE_FAILED = "an error came after updates were issued, or in the update thread"
    LOAD_CHECKPOINT = "a checkpoint is loaded"
    DESTROY = "engine.destroy()"


@dataclass(frozen=True, slots=True)
class Transition:
    """What is done when an event comes to a step in some state.

    Attributes:
        action: the method of `Step` that is called with the event's arguments.
        to: the state after it (FAILED: from its begin on); None: the state stays as it is.
        sentence: what that means, for people.
        when: a property of `Step` that must be true for it; the first transition of a cell that fits is taken.
    """

    action: str
    to: StepState | None
    sentence: str
    when: str | None = None


@dataclass(frozen=True, slots=True)
class Impossible:
    """An event that cannot come to a step in some state, and the reason."""

    reason: str


Cell = tuple[Transition, ...] | Impossible
Q, F, G, U = StepState.QUEUED, StepState.FORWARDED, StepState.GATHERED, StepState.UPDATING
DONE, FAILED, DESTROYED = StepState.DONE, StepState.FAILED, StepState.DESTROYED
E = StepEvent

_CALL = Transition(
    "queue", None, "Copy its arguments and queue it; measure the model first if no micro-batch as large was measured."
)
_READ_OUTPUT = "Run its forward pass now, alone; warn once that this micro-batch is not grouped."
_FORWARD_DUE = "Run that forward pass now, alone."
_BACKWARD = Transition(
    "note_backward", None, "Note that its backward pass runs with the group; at once if its inputs require gradients."
)
_GATHER = "Run forward and backward of all micro-batches that were propagated back from, and keep their gradients."
_PASS_ON = Transition(
    "pass_gradients_on",
    DONE,
    "Run forward and backward: gradients go through a frozen model, and no step follows.",
    "trains_nothing",
)
_NOTHING_TO_GATHER = Transition("nothing_to_gather", None, "Run nothing: no micro-batch waits for its backward pass.")
_WRITE = Transition(
    "gather_before_write",
    None,
    "Gather first, as READ_GRADIENT does; refuse if a micro-batch that uses the old values still waits for backward().",
)
_ZERO_GRAD = Transition("drop_gradients", None, "Gather first, as READ_GRADIENT does, and drop all gradients.")
_TAKE = Transition(
    "take",
    U,
    "Run forward, backward and updates of what was propagated back from, and return when the updates are issued: one plan, "
    "unless gradients have gathered before or the optimizer steps as a whole. Forget the other micro-batches.",
)
_ALONE = Transition(
    "undo_alone", None, "Undo that forward pass only; its caller gets the error, and the rest goes on.", "runs_alone"
)
_ALONE_AND_LAST = Transition(
    "undo_alone",
    None,
    "Undo that forward pass only; its caller gets the error. The engine cannot go on, which the next run says.",
    "runs_alone",
)
_DROP = Transition("drop", FAILED, "Drop the step: no weight has changed, and the caller gets the error.")
_AGAIN = Transition(
    "measure_again",
    None,
    "Undo the run, measure and plan anew, and run again: no weight has changed.",
    "can_run_again",
)
_ALONE_AGAIN_REFUSED = Transition(
    "refuse_another_forward",
    None,
    "Undo that forward pass only; its caller gets the error: processes would have to run it again together.",
    "runs_alone",
)
_OFF_PLAN = Transition(
    "refuse_another_way", FAILED, "Drop the step: what has been read cannot be run again. The error says what to do."
)
_LESS = Transition(
    "plan_for_less",
    None,
    "Undo the run, lower the device memory budget, plan anew, and run again: no weight has changed.",
    "can_plan_for_less",
)
_GIVE_UP = Transition("give_up", FAILED, "Drop the step; the engine cannot go on, since some layers were updated.")
_FORGET = Transition("forget", FAILED, "Drop the step: its micro-batches have to be handed over again.")
_NOT_TAKEN = Impossible("no update has been issued before the boundary")
_NEXT = Impossible("the boundary began the next step, which takes this event")
_NOTHING_RUNS = Impossible("nothing of the step runs any more")
_SETTLED = Impossible("it is known already")
_OUTPUTS_GONE = Transition("refuse_read", None, "Refuse: what was not read before the boundary is gone.")
_TOO_LATE = Transition("refuse_backward", None, "Refuse: the step of that loss is over.")

TRANSITIONS: dict[tuple[StepState, StepEvent], Cell] = {
    **{(state, E.CALL): (_CALL,) for state in (Q, F, G)},
    (Q, E.READ_OUTPUT): (Transition("read_output", F, _READ_OUTPUT),),
    (F, E.READ_OUTPUT): (Transition("read_output", None, _READ_OUTPUT),),
    (G, E.READ_OUTPUT): (Transition("read_output", None, _READ_OUTPUT),),
    (Q, E.FORWARD_DUE): (Transition("forward_alone", F, _FORWARD_DUE),),
    (F, E.FORWARD_DUE): (Transition("forward_alone", None, _FORWARD_DUE),),
    (G, E.FORWARD_DUE): (Transition("forward_alone", None, _FORWARD_DUE),),
    **{(state, E.BACKWARD): (_BACKWARD,) for state in (Q, F, G)},
    (Q, E.READ_GRADIENT): (_PASS_ON, Transition("gather", G, _GATHER, "waits_for_backward"), _NOTHING_TO_GATHER),
    (F, E.READ_GRADIENT): (_PASS_ON, Transition("gather", G, _GATHER, "waits_for_backward"), _NOTHING_TO_GATHER),
    (G, E.READ_GRADIENT): (_PASS_ON, Transition("gather", None, _GATHER, "waits_for_backward"), _NOTHING_TO_GATHER),
    **{(state, E.WRITE_PARAMETER): (_WRITE,) for state in (Q, F, G)},
    **{(state, E.ZERO_GRAD): (_ZERO_GRAD,) for state in (Q, F, G)},
    **{(state, E.BOUNDARY): (_TAKE,) for state in (Q, F, G)},
    **{(state, E.NORM_KNOWN): _NOT_TAKEN for state in (Q, F, G)},
    **{(state, E.USER_ERROR): (_ALONE, _DROP) for state in (Q, F, G)},
    **{(state, E.OFF_PLAN): (_AGAIN, _ALONE_AGAIN_REFUSED, _OFF_PLAN) for state in (Q, F, G)},
    **{(state, E.OUT_OF_MEMORY): (_LESS, _ALONE_AGAIN_REFUSED, _DROP) for state in (Q, F, G)},
    **{(state, E.PEER_DIVERGED): (_AGAIN, _ALONE_AGAIN_REFUSED, _DROP) for state in (Q, F, G)},
    **{(state, E.PEER_FAILED): (_ALONE, _DROP) for state in (Q, F, G)},
    **{(state, E.UPDATE_FAILED): (_ALONE_AND_LAST, _GIVE_UP) for state in (Q, F, G)},
    **{
        (state, E.DESTROY): (Transition("discard", DESTROYED, "Drop the step; warn if gradients are lost by that."),)
        for state in (Q, F, G)
    },
    **{(state, E.LOAD_CHECKPOINT): (_FORGET,) for state in (Q, F, G)},
    # ---- after the boundary
    (U, E.NORM_KNOWN): (
        Transition(
            "settle",
            DONE,
            "Wait for the norm. If it is inf or NaN and such steps are skipped, no weight has changed: count the step as "
            "skipped, and undo the scheduler's step. Else warn.",
        ),
    ),
    (U, E.PEER_FAILED): (
        Transition("give_up_norm", FAILED, "Another process has not said its part of the norm: the caller is told."),
    ),
    (U, E.UPDATE_FAILED): (
        Transition("give_up_norm", FAILED, "The update thread ended before the norm was known: the caller is told."),
    ),
    **{
        (U, event): _NOTHING_RUNS
        for event in (E.FORWARD_DUE, E.USER_ERROR, E.OFF_PLAN, E.OUT_OF_MEMORY, E.PEER_DIVERGED)
    },
    (U, E.DESTROY): Impossible("the engine asks for NORM_KNOWN before it is destroyed"),
    **{
        (state, event): _NEXT
        for state in (U, DONE, FAILED, DESTROYED)
        for event in (E.CALL, E.READ_GRADIENT, E.WRITE_PARAMETER, E.ZERO_GRAD, E.BOUNDARY, E.LOAD_CHECKPOINT)
    },
    **{(state, E.READ_OUTPUT): (_OUTPUTS_GONE,) for state in (U, DONE, FAILED, DESTROYED)},
    **{(state, E.BACKWARD): (_TOO_LATE,) for state in (U, DONE, FAILED, DESTROYED)},
    **{(state, E.NORM_KNOWN): _SETTLED for state in (DONE, FAILED, DESTROYED)},
    **{
        (state, event): _NOTHING_RUNS
        for state in (DONE, FAILED, DESTROYED)
        for event in (
            *(E.FORWARD_DUE, E.USER_ERROR, E.OFF_PLAN, E.OUT_OF_MEMORY, E.PEER_DIVERGED),
            *(E.PEER_FAILED, E.UPDATE_FAILED, E.DESTROY),
        )
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
    lines = ["| event | state | when | next state | what is done |", "|---|---|---|---|---|"]
    for event in StepEvent:
        rows: dict[tuple[str, str, str], list[str]] = {}
        for state in StepState:
            for row in _rows(TRANSITIONS[state, event]):
                rows.setdefault(row, []).append(state.name)
        name = event.name
        for (when, to, sentence), states in rows.items():
            lines.append(f"| {name} | {', '.join(states)} | {when} | {to} | {sentence} |")
            name = ""
    return "\n".join(lines)


def _rows(cell: Cell) -> list[tuple[str, str, str]]:
    """Return condition, next state and sentence of each transition of a cell."""
    if isinstance(cell, Impossible):
        return [("", "", f"cannot happen: {cell.reason}")]
    return [
        (
            "" if one.when is None else one.when.replace("_", " "),
            "the same" if one.to is None else one.to.name,
            f"{one.sentence} `{one.action}`",
        )
        for one in cell
    ]


if __name__ == "__main__":
    print(table())  # noqa: T201 - that is what the module prints
