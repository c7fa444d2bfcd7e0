"""Runs a comparison: every engine in a process of its own, repeats interleaved, warm-up apart.

On the CPU all processes live at once and take their steps by turns, so that what slows the machine for a while slows
neighbours alike. On CUDA, where each needs the host memory and the device for itself, a process lives for one turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harmony_ds.bench.peak import peak_tflops
from harmony_ds.bench.processes import Child, ChildFailedError
from harmony_ds.bench.results import Contestant, Results, Row, environment
from harmony_ds.bench.workload import Workload, model_flops

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Rounds:
    """How much is measured.

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
    """Measures what `path` does not hold yet, saving after every turn.

    Raises:
        ConfigError: `resume` with results of another comparison.
    """
    results = begin(contestants, timing, path, resume)
    turns = _Turns(results, timing, path, tell)
    rounds = [
        (number, contestant)
        for number in range(timing.rounds)
        for contestant in _turned(contestants, number)
        if str(number) not in results.rows[contestant.label].rounds
    ]
    turns.left = len(rounds)
    with ExitStack() as alive:
        if timing.together:
            for contestant in contestants:
                if any(other is contestant for _, other in rounds):
                    turns.start(contestant, alive)
        for number, contestant in rounds:
            if turns.late():
                tell(f"stopped after {timing.limit_s:.0f} s, {turns.left} turns left: --resume goes on")
                break
            turns.take(number, contestant)
        turns.close_reports()
    results.finished = turns.left <= 0
    results.save(path)
    return results


def begin(contestants: list[Contestant], timing: Rounds, path: Path, resume: bool) -> Results:
    """The results so far, or empty ones."""
    first = contestants[0].task
    wanted: dict[str, Any] = {
        "contestants": {c.label: {"engine": c.engine, "task": c.task.as_json()} for c in contestants},
        "warmup_steps": timing.warmup_steps,
        "steps": timing.steps,
    }
    if resume and path.is_file():
        results = Results.load(path)
        results.resumable(wanted)
        for row in results.rows.values():
            if row.error is not None and not row.out_of_memory:
                row.error = None  # whatever it was, it is tried once more
        return results
    results = Results(wanted, environment(first.device), peak_tflops=peak_tflops(first))
    results.unit = first.subject.unit
    results.parameters = sum(parameter.numel() for parameter in first.subject.model.parameters())
    flops: dict[int, int] = {}
    for contestant in contestants:
        samples = contestant.task.samples
        if samples not in flops:
            flops[samples] = model_flops(contestant.task)
        results.rows[contestant.label] = Row(contestant.engine, contestant.task.as_json())
        results.items_per_step[contestant.label] = first.items * samples // first.samples
        results.flops_per_step[contestant.label] = flops[samples]
    return results


def best_micro_batch(contestant: Contestant, timing: Rounds, tell: Tell) -> tuple[Contestant | None, dict[str, Any]]:
    """The contestant at the micro-batch, doubled from its own, that makes its step shortest; and every time measured.

    None if it is its own micro-batch, or runs with none.
    """
    found: dict[str, Any] = {}
    best: tuple[float, Workload] | None = None
    task = contestant.task
    for micro_batch in _doubled(task):
        cut = task.cut(micro_batch)
        tell(f"{contestant.engine}: looking for its best micro-batch, {micro_batch} rows")
        try:
            with Child(contestant.engine, cut, timing.core) as child:
                child.start()
                child.ask("run", 0, 1)
                step_ms = child.ask("run", 1, 1)["drained_ms"]
        except ChildFailedError as error:
            found[str(micro_batch)] = {"error": str(error), "out_of_memory": error.out_of_memory}
            break  # a larger one needs more still
        found[str(micro_batch)] = {"step_ms": step_ms}
        if best is None or step_ms < best[0]:
            best = (step_ms, cut)
    if best is None or best[1].micro_batch == task.micro_batch:
        return None, found
    name, bar, size = contestant.label.partition(" | ")
    label = f"{name}, its best micro-batch{bar}{size}"
    return replace(contestant, label=label, task=best[1]), found


def _doubled(task: Workload) -> Iterator[int]:
    rows = task.micro_batch
    while task.samples // task.devices % rows == 0:
        yield rows
        rows *= 2


def _turned(contestants: list[Contestant], number: int) -> list[Contestant]:
    """Each round starts with another one, so that nobody always follows the same neighbour."""
    turn = number % len(contestants)
    return contestants[turn:] + contestants[:turn]


class _Turns:
    def __init__(self, results: Results, timing: Rounds, path: Path, tell: Tell) -> None:
        self._results, self._timing, self._path, self._tell = results, timing, path, tell
        self._running: dict[str, tuple[Contestant, Child]] = {}
        self._began = self._first_turn = time.monotonic()
        self._next_step: dict[str, int] = {}
        self._taken = 0
        self.left = 0

    def late(self) -> bool:
        limit = self._timing.limit_s
        return limit is not None and time.monotonic() - self._began > limit

    def start(self, contestant: Contestant, alive: ExitStack) -> None:
        """Builds the engine and takes its warm-up steps; an error becomes part of its row."""
        row = self._results.rows[contestant.label]
        if row.error is not None:
            return
        self._tell(f"{contestant.label}: warming up{self._outlook()}")
        child = alive.enter_context(Child(contestant.engine, contestant.task, self._timing.core))
        with self._told(contestant):
            child.start()
            _note_losses(row, 0, child.ask("run", 0, self._timing.warmup_steps)["losses"])
            self._running[contestant.label] = contestant, child
            self._next_step[contestant.label] = self._timing.warmup_steps

    def take(self, number: int, contestant: Contestant) -> None:
        """One engine's turn of one round."""
        if not self._taken:
            self._first_turn = time.monotonic()
        if self._timing.together:
            self._run(number, contestant)
        else:
            with ExitStack() as alive:
                self.start(contestant, alive)
                self._run(number, contestant)
                self.close_reports()
        self._taken += 1
        self.left -= 1
        self._results.save(self._path)

    def _run(self, number: int, contestant: Contestant) -> None:
        """Steps, if it is still running."""
        label, steps = contestant.label, self._timing.steps
        if label not in self._running:
            return
        _, child = self._running[label]
        row, first = self._results.rows[label], self._next_step[label]
        self._tell(f"{label}: round {number + 1} of {self._timing.rounds}{self._outlook()}")
        with self._told(contestant):
            answer = child.ask("run", first, steps)
            self._next_step[label] = first + steps
            _note_losses(row, first, answer["losses"])
            row.rounds[str(number)] = {kind: answer[kind] / steps for kind in ("ms", "drained_ms", "cpu_ms")}

    def close_reports(self) -> None:
        """The reports of all that are running, and their copies counted in a step of their own."""
        for contestant, child in list(self._running.values()):
            with self._told(contestant):
                report = child.ask("report")  # peaks of the steps that were timed
                counted = child.ask("count", self._next_step[contestant.label])
                self._results.rows[contestant.label].report = {**report, **counted}
        self._running.clear()

    @contextmanager
    def _told(self, contestant: Contestant) -> Iterator[None]:
        """An error of its process is its row's, and ends its part in the comparison."""
        try:
            yield
        except ChildFailedError as error:
            row = self._results.rows[contestant.label]
            row.error, row.out_of_memory = str(error), error.out_of_memory
            self._running.pop(contestant.label, None)
            self._tell(f"{contestant.label}: {'out of memory' if error.out_of_memory else 'failed'}: {error}")
            self._results.save(self._path)

    def _outlook(self) -> str:
        if not self._taken:
            return ""
        left_s = (time.monotonic() - self._first_turn) / self._taken * self.left
        return f", {self.left} turns left, about {left_s / 60:.0f} min" if left_s > 90 else f", {self.left} turns left"


def _note_losses(row: Row, first: int, losses: list[float]) -> None:
    """A process that was started anew takes its first steps again: they replace themselves."""
    row.losses[first : first + len(losses)] = losses
