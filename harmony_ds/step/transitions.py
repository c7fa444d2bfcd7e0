"""States of an optimizer step, events that come to it, and how a table of what they do is written and printed.

The table is `step.TRANSITIONS`, after the class whose methods it names; `Step.handle` acts by it, and `python -m
harmony_ds.step` prints it. What is done about an error in a run is in `recovery`; an error that a run raises drops the step
where the table says so.

Events come from outside: from the program, or from autograd. The methods that the table names call each other by name. An
event comes within another one in these cases alone: BOUNDARY asks the step before for READ_OUTCOME; READ_OUTPUT of a
micro-batch that was propagated back from reads the outputs of those that share its loss, and propagates (READ_OUTPUT,
BACKWARD); hooks that a run calls may read gradients, which is refused (READ_GRADIENT).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


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
        action: the method of the step that is called with the event's arguments.
        to: the state after it; None: the state stays as it is.
        sentence: what that means, for people.
        when: a method of the step that must return True for it; the first transition of a cell that fits is taken.
        error_drops: an error that one of its runs raises drops the step, whose state is FAILED then.
    """

    action: Callable[..., Any]
    to: StepState | None
    sentence: str
    when: Callable[..., bool] | None = None
    error_drops: bool = False


@dataclass(frozen=True, slots=True)
class Impossible:
    """An event that cannot come to a step in some state, and the reason."""

    reason: str


Cell = tuple[Transition, ...] | Impossible
Transitions = Mapping[tuple[StepState, StepEvent], Cell]


def as_markdown(transitions: Transitions) -> str:
    """Return the table in Markdown: for each event, what it does in which states."""
    lines = ["| event | state | when | next state | after an error | what is done |", "|---|---|---|---|---|---|"]
    for event in StepEvent:
        rows: dict[tuple[str, ...], list[str]] = {}
        for state in StepState:
            for row in _rows(transitions[state, event]):
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
            "" if one.when is None else one.when.__name__.replace("_", " "),
            "the same" if one.to is None else one.to.name,
            "FAILED" if one.error_drops else "the same",
            f"{one.sentence} `{one.action.__name__}`",
        )
        for one in cell
    ]
