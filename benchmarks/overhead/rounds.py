"""Interleaved timing: round by round, every engine runs its steps in turn, while the others wait."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

from processes import Child, ChildFailedError
from workload import Workload


@dataclass(frozen=True, slots=True)
class Entry:
    """One engine that takes part: its label, the adapter's module, and whether it may use gradient checkpointing."""

    label: str
    engine: str
    checkpointing: bool = True


@dataclass(slots=True)
class Row:
    """What one engine did.

    Attributes:
        step_ms: per timed round, milliseconds per step until the last loss is known.
        drained_ms: the same until no update is under way any longer.
        cpu_ms: CPU time per step of all threads of the process, to the same end.
        losses: of every step, warm-up included.
        error: why it ended early, if it did.
    """

    label: str
    step_ms: list[float] = field(default_factory=list)
    drained_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """How long to measure. No round is begun that would probably end later than `limit_s` seconds after the first."""

    rounds: int = 7
    warmup_rounds: int = 2
    steps_per_round: int = 2
    core: int | None = None
    limit_s: float = math.inf


def start(entries: list[Entry], workload: Workload, core: int | None) -> dict[str, Child]:
    """A process per entry, built one after another. Those that fail are there too, with their error."""
    children: dict[str, Child] = {}
    for entry in entries:
        own = replace(workload, checkpointing=entry.checkpointing)
        child = children[entry.label] = Child(entry.label, entry.engine, own, core)
        _or_note(child, child.start)
    return children


def measure(children: dict[str, Child], timing: Timing) -> dict[str, Row]:
    """Runs all rounds. Each round starts with another engine, so that no one always follows the same neighbour."""
    rows = {label: Row(label) for label in children}
    labels = list(children)
    began = time.monotonic()
    for number in range(timing.warmup_rounds + timing.rounds):
        elapsed = time.monotonic() - began
        if number and elapsed * (number + 1) / number > timing.limit_s:
            break
        turn = number % len(labels)
        for label in labels[turn:] + labels[:turn]:
            child, row = children[label], rows[label]
            if child.error is None:
                _or_note(child, lambda: _one_round(child, row, number, timing))  # noqa: B023 - called at once
    for label, child in children.items():
        if child.error is None:
            _or_note(child, lambda: rows[label].settings.update(child.ask({"settings": True})))  # noqa: B023
        rows[label].error = child.error
    return rows


def _one_round(child: Child, row: Row, number: int, timing: Timing) -> None:
    steps = timing.steps_per_round
    answer = child.ask({"run": steps, "first": number * steps})
    row.losses += answer["losses"]
    if number >= timing.warmup_rounds:
        row.step_ms.append(answer["ms"] / steps)
        row.drained_ms.append(answer["drained_ms"] / steps)
        row.cpu_ms.append(answer["cpu_ms"] / steps)
        print(
            f"  round {number - timing.warmup_rounds + 1}: {child.label:<24}{row.step_ms[-1]:>10.1f} ms per step",
            flush=True,
        )


def _or_note(child: Child, action: Any) -> None:
    try:
        action()
    except ChildFailedError as error:
        print(f"  {child.label} failed: {error}")
