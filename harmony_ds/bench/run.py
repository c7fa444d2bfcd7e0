"""Time engines in turns, round by round, each in a process of its own and after its warm-up.

On the CPU all processes live at once and take their steps by turns, so that a slow phase of the machine slows neighbours
alike. On CUDA, where each needs the host memory and the device for itself, a process lives for one turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harmony_ds.bench.child import ChildFailedError
from harmony_ds.bench.processes import Child
from harmony_ds.bench.results import Results, Row

Tell = Callable[[str], None]
_CLEARLY_SLOWER = 1.1


def run(results: Results, path: Path, tell: Tell, limit_s: float | None = None) -> None:
    """Measure what `results` do not hold yet, saving them after every turn; begin none after `limit_s` seconds."""
    timing, labels = results.timing, [*results.rows]
    turns = [
        (number, label)
        for number in range(timing.rounds)
        # Each round starts with another engine, so that none always follows the same neighbour.
        for label in (*labels[number % len(labels) :], *labels[: number % len(labels)])
        if str(number) not in results.rows[label].rounds
    ]
    began = time.monotonic()
    with _Race(results, tell) as race:
        for taken, (number, label) in enumerate(turns):
            left, now = len(turns) - taken, time.monotonic()
            if limit_s is not None and now - began > limit_s:
                tell(f"stopped after {limit_s:.0f} s, {left} turns left: --resume goes on")
                break
            minutes = f", about {(now - began) / taken * left / 60:.1f} min" if taken else ""
            tell(f"{label}: round {number + 1} of {timing.rounds}, {left} turns left{minutes}")
            race.take_turn(number, label)
            if results.rows[label].task.device == "cuda":
                race.end()
            results.save(path)
        else:
            results.finished = True
        race.end()
    results.save(path)


def choose_micro_batch(label: str, row: Row, tell: Tell) -> None:
    """Cut the row's task into its engine's fastest micro-batch, and keep all times measured.

    Multiples by two of its own are tried, from the largest down where a cap on CUDA stops what is too large, else upward;
    until the step takes a tenth longer than the best.
    """
    best_ms, task = float("inf"), row.task
    whole = task.samples // task.devices // task.micro_batch
    sizes = [task.micro_batch * 2**power for power in range(whole.bit_length()) if whole % 2**power == 0]
    downward = task.device == "cuda"
    for rows in sorted(sizes, reverse=downward):
        cut = task.cut(rows)
        tell(f"{label}: looking for its best micro-batch, {rows} rows")
        try:
            with Child(row.engine, cut) as child:
                _, *times = [child.ask("run", 1)["drained_ms"] for _ in range(3)]
        except ChildFailedError as error:
            row.sweep[str(rows)] = {"error": "out of memory" if error.out_of_memory else str(error)}
            if downward:
                continue
            break  # a larger one needs more still
        step_ms = min(times)
        row.sweep[str(rows)] = {"step_ms": step_ms}
        if step_ms > _CLEARLY_SLOWER * best_ms:
            break
        if step_ms < best_ms:
            row.task, best_ms = cut, step_ms


class _Race(ExitStack):
    """The engines whose processes are alive, and the results that they add to; the processes end with this context."""

    def __init__(self, results: Results, tell: Tell) -> None:
        super().__init__()
        self._results, self._tell = results, tell
        self._alive: dict[str, Child] = {}

    def take_turn(self, number: int, label: str) -> None:
        """Take one engine's turn of one round; before its first one, build it and take its warm-up steps."""
        row, timing = self._results.rows[label], self._results.timing
        if label not in self._alive and row.error is None:
            self._tell(f"{label}: warming up")
            self._alive[label] = self.enter_context(Child(row.engine, row.task))
            self._ask(label, "run", timing.warmup_steps)
        if answer := self._ask(label, "run", timing.steps):
            row.rounds[str(number)] = {"drained_ms": answer["drained_ms"] / timing.steps}

    def end(self) -> None:
        """Collect the reports of all that are alive, of the steps that were timed, and end them."""
        for label in [*self._alive]:
            if answer := self._ask(label, "report"):
                self._results.rows[label].report = answer
        self._alive.clear()
        self.close()

    def _ask(self, label: str, *request: Any) -> dict[str, Any]:
        """Ask an engine's process; {} if it has ended. An error becomes its row's, and ends its part in the comparison."""
        row = self._results.rows[label]
        if label not in self._alive:
            return {}
        try:
            answer = self._alive[label].ask(*request)
        except ChildFailedError as error:
            row.error, row.out_of_memory = str(error), error.out_of_memory
            del self._alive[label]
            self._tell(f"{label}: {'out of memory' if error.out_of_memory else 'failed'}: {error}")
            return {}
        if losses := answer.get("losses"):
            # A process that was started anew takes its first steps again: they replace themselves.
            row.losses[answer["first"] : answer["first"] + len(losses)] = losses
        return answer
