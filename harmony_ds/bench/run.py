"""Comparison of engines: each in a process of its own, repeats interleaved, warm-up apart.

On the CPU all processes live at once and take their steps by turns, so that a slow phase of the machine slows neighbours
alike. On CUDA, where each needs the host memory and the device for itself, a process lives for one turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harmony_ds.bench.processes import Child, ChildFailedError
from harmony_ds.bench.results import Contestant, Results, Row, environment
from harmony_ds.errors import ConfigError

Tell = Callable[[str], None]
_CLEARLY_SLOWER = 1.1


@dataclass(frozen=True, slots=True)
class Rounds:
    """Timing of a comparison.

    Attributes:
        together: whether all processes live at once.
        core: pin every process to this core.
        limit_s: no turn is begun later than so many seconds after the first.
    """

    rounds: int = 5
    warmup_steps: int = 2
    steps: int = 2
    together: bool = True
    core: int | None = None
    limit_s: float | None = None


def run(contestants: list[Contestant], timing: Rounds, path: Path, resume: bool, tell: Tell) -> Results:
    """Measure everything that `path` does not hold yet, saving after every turn.

    Raises:
        ConfigError: `resume` with results of another comparison.
    """
    results = begin(contestants, timing, path, resume)
    turns = [
        (number, contestant)
        for number in range(timing.rounds)
        # Each round starts with another engine, so that none always follows the same neighbour.
        for contestant in (*contestants[number % len(contestants) :], *contestants[: number % len(contestants)])
        if str(number) not in results.rows[contestant.label].rounds
    ]
    race, began = _Race(results, timing, path, tell), time.monotonic()
    with ExitStack() as alive:
        if timing.together:
            for contestant in contestants:
                if any(other is contestant for _, other in turns):
                    race.start(contestant, alive)
        first_turn = time.monotonic()
        for taken, (number, contestant) in enumerate(turns):
            left, now = len(turns) - taken, time.monotonic()
            if timing.limit_s is not None and now - began > timing.limit_s:
                tell(f"stopped after {timing.limit_s:.0f} s, {left} turns left: --resume goes on")
                break
            minutes = f", about {(now - first_turn) / taken * left / 60:.1f} min" if taken else ""
            tell(f"{contestant.label}: round {number + 1} of {timing.rounds}, {left} turns left{minutes}")
            race.take(number, contestant)
        else:
            results.finished = True
        race.report()
    results.save(path)
    return results


def begin(contestants: list[Contestant], timing: Rounds, path: Path, resume: bool) -> Results:
    """Return the results so far, or empty ones.

    Raises:
        ConfigError: naming the settings of `path` that are not those of this comparison.
    """
    first = contestants[0].task
    wanted: dict[str, Any] = {
        "contestants": {c.label: {"engine": c.engine, "task": c.task.as_json()} for c in contestants},
        "warmup_steps": timing.warmup_steps,
        "steps": timing.steps,
    }
    if resume and path.is_file():
        results = Results.load(path)
        if differing := sorted(key for key in wanted if wanted[key] != results.wanted.get(key)):
            was = "; ".join(f"{key} was {results.wanted.get(key)!r} and is {wanted[key]!r}" for key in differing)
            raise ConfigError(f"these results were begun with other settings: {was}. Leave --resume away.")
        for row in results.rows.values():
            if row.error is not None and not row.out_of_memory:
                row.error = None  # any other failure is tried once more
        return results
    results = Results(wanted, environment(first.device), unit=first.subject.unit)
    results.parameters = sum(parameter.numel() for parameter in first.subject.model.parameters())
    for contestant in contestants:
        results.rows[contestant.label] = Row(contestant.engine, contestant.task.as_json())
        results.items_per_step[contestant.label] = first.items * contestant.task.samples // first.samples
    return results


def best_micro_batch(contestant: Contestant, core: int | None, tell: Tell) -> tuple[Contestant, dict[str, Any]]:
    """Return the contestant at its fastest micro-batch, and all times measured.

    Multiples by two of its own are tried, from the largest down where a cap on CUDA stops what is too large, else upward;
    until the step takes a tenth longer than the best.
    """
    found: dict[str, Any] = {}
    best, best_ms, task = contestant, float("inf"), contestant.task
    whole = task.samples // task.devices // task.micro_batch
    sizes = [task.micro_batch * 2**power for power in range(whole.bit_length()) if whole % 2**power == 0]
    downward = task.device == "cuda"
    for rows in sorted(sizes, reverse=downward):
        cut = task.cut(rows)
        tell(f"{contestant.label}: looking for its best micro-batch, {rows} rows")
        try:
            with Child(contestant.engine, cut, core) as child:
                child.start()
                child.ask("run", 0, 1)
                step_ms = min(child.ask("run", step, 1)["drained_ms"] for step in (1, 2))
        except ChildFailedError as error:
            found[str(rows)] = {"error": "out of memory" if error.out_of_memory else str(error)}
            if downward:
                continue
            break  # a larger one needs more still
        found[str(rows)] = {"step_ms": step_ms}
        if step_ms > _CLEARLY_SLOWER * best_ms:
            break
        if step_ms < best_ms:
            best, best_ms = replace(contestant, task=cut), step_ms
    return best, found


class _Race:
    """Processes that are alive, and the results they add to."""

    def __init__(self, results: Results, timing: Rounds, path: Path, tell: Tell) -> None:
        self._results, self._timing, self._path, self._tell = results, timing, path, tell
        self._alive: dict[str, Child] = {}
        self._next_step: dict[str, int] = {}

    def start(self, contestant: Contestant, alive: ExitStack) -> None:
        """Build the engine and take its warm-up steps; an error becomes part of its row."""
        label = contestant.label
        if self._results.rows[label].error is not None:
            return
        self._tell(f"{label}: warming up")
        child = alive.enter_context(Child(contestant.engine, contestant.task, self._timing.core))
        with self._noting_errors(label):
            child.start()
            self._alive[label], self._next_step[label] = child, 0
            self._steps(label, self._timing.warmup_steps)

    def take(self, number: int, contestant: Contestant) -> None:
        """Take one engine's turn of one round."""
        if self._timing.together:
            self._turn(number, contestant.label)
        else:
            with ExitStack() as alive:
                self.start(contestant, alive)
                self._turn(number, contestant.label)
                self.report()
        self._results.save(self._path)

    def report(self) -> None:
        """Collect the reports of all that are alive, with their copies counted in a step of their own."""
        for label, child in list(self._alive.items()):
            with self._noting_errors(label):
                report = child.ask("report")  # peaks of the steps that were timed
                counted = child.ask("count", self._next_step[label])
                self._results.rows[label].report = {**report, **counted}
        self._alive.clear()

    def _turn(self, number: int, label: str) -> None:
        if label in self._alive:
            with self._noting_errors(label):
                answer, steps = self._steps(label, self._timing.steps), self._timing.steps
                times = {kind: answer[kind] / steps for kind in ("ms", "drained_ms", "cpu_ms")}
                self._results.rows[label].rounds[str(number)] = times

    def _steps(self, label: str, count: int) -> dict[str, Any]:
        first, losses = self._next_step[label], self._results.rows[label].losses
        answer = self._alive[label].ask("run", first, count)
        # A process that was started anew takes its first steps again: they replace themselves.
        losses[first : first + count] = answer["losses"]
        self._next_step[label] = first + count
        return answer

    @contextmanager
    def _noting_errors(self, label: str) -> Iterator[None]:
        """Make an error of the process its row's, which ends its part in the comparison."""
        try:
            yield
        except ChildFailedError as error:
            row = self._results.rows[label]
            row.error, row.out_of_memory = str(error), error.out_of_memory
            self._alive.pop(label, None)
            self._tell(f"{label}: {'out of memory' if error.out_of_memory else 'failed'}: {error}")
