"""The search for (U_F, P_F, U_B, P_B): micro-batch sizes and packs of the forward and the backward pass.

    every backward packing      the most promising of each micro-batch size go on
    each with forward packings  bounded by the streams' busy times; those with the lowest bounds are simulated
    the best of them            their bounds move by one layer as long as that helps

The space is that of Harmony's scheduler (VLDB'22) with every feasible number of packs in place of the smallest: sizes
that divide a device's share, U_F >= U_B, packs by the original's methods and by dynamic programming. Nothing is
random, and what is left out is left out by count and not by the clock: the same question has the same answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.vldb22.planner.candidates import DEEP
from benchmarks.vldb22.planner.cuts import Fits, fits_all, within
from benchmarks.vldb22.planner.graph import Mode, Schedule, Setup
from benchmarks.vldb22.planner.loads import Loads
from benchmarks.vldb22.planner.machine import Server
from benchmarks.vldb22.planner.pairs import Pair, Pairs, Space
from benchmarks.vldb22.planner.profile import PackCosts
from benchmarks.vldb22.planner.simulate import simulate
from harmony_ds.scheduler.partition import Bounds


@dataclass(frozen=True, slots=True)
class Question:
    """What a schedule is wanted for.

    Attributes:
        setup: mode, devices and samples.
        overlap: as in `simulate`.
        cap_bytes: device memory that a pack may take by the original's formula (`PackCosts.memory`).
        largest_forward, largest_backward: micro-batch sizes.
    """

    setup: Setup
    overlap: bool
    cap_bytes: int
    largest_forward: int
    largest_backward: int


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is looked at.

    Attributes:
        backward: packings of the backward pass that go on, of each micro-batch size.
        forward: packings of the forward pass that may be simulated with each, of each micro-batch size.
        jobs: to be run in these simulations, about.
        polished: schedules whose bounds are moved, each the best of its micro-batch sizes.
        polish_jobs: to be run for all of those, about.
    """

    backward: int = 16
    forward: int = 8
    jobs: int = 200_000
    polished: int = 3
    polish_jobs: int = 180_000


@dataclass(frozen=True, slots=True)
class Answer:
    """The best schedule found, its milliseconds, and how many were simulated."""

    schedule: Schedule
    time_ms: float
    simulated: int


def search(question: Question, costs: PackCosts, machine: Server, effort: Effort | None = None) -> Answer | None:
    """The fastest schedule found, None if some layer alone does not fit."""
    return _Search(question, costs, machine, effort or Effort()).run()


class _Search:
    def __init__(self, question: Question, costs: PackCosts, machine: Server, effort: Effort) -> None:
        self._question = question
        self._costs = costs
        self._machine = machine
        self._effort = effort
        self._times_ms: dict[Schedule, float] = {}
        self._best_ms = float("inf")
        self._jobs = 0

    def run(self) -> Answer | None:
        for space, at_work in self._spaces():
            loads = Loads(self._question.setup, self._costs, self._machine, self._question.overlap, at_work)
            self._look_through(space, Pairs(space, self._costs, loads))
        if not self._times_ms:
            return None
        stop = self._jobs + self._effort.polish_jobs * max(1, self._costs.count // DEEP)
        for schedule in self._best_of_each_size()[: self._effort.polished]:
            self._polish(schedule, stop)
        best = min(self._times_ms, key=self._times_ms.__getitem__)
        return Answer(best, self._times_ms[best], len(self._times_ms))

    def _spaces(self) -> Iterator[tuple[Space, int]]:
        """With the number of devices at work: all, or in a pipeline as many as there are tasks."""
        setup, question = self._question.setup, self._question
        sizes = [size for size in range(1, setup.share(0) + 1) if setup.share(0) % size == 0]
        backward = [size for size in sizes if size <= question.largest_backward and self._fit(True, size, 0)]
        if not backward:
            return
        least = self._least_forward(backward[0])
        everything = Space(
            tuple(s for s in sizes if s <= question.largest_forward and self._fit(False, s, self._costs.count - least)),
            tuple(backward),
            question.cap_bytes,
            fewest_packs=setup.devices if setup.mode is Mode.PIPELINE else 1,
            most_packs=2 * self._costs.count,
        )
        yield everything, setup.devices
        if setup.mode is Mode.PIPELINE:
            for tasks in range(setup.devices - 1, 0, -1):
                yield replace(everything, fewest_packs=tasks, most_packs=tasks), tasks

    def _fits(self, backward: bool, size: int) -> Fits:
        return within(self._costs.memory(backward, size), self._question.cap_bytes)

    def _fit(self, backward: bool, size: int, without_last: int) -> bool:
        """Whether each layer fits alone, but for some last ones."""
        each = tuple(range(self._costs.count + 1 - without_last))
        return fits_all(each, self._fits(backward, size))

    def _least_forward(self, size: int) -> int:
        """How many layers no fused pack can take: a forward pass has them at least."""
        fits, count = self._fits(True, size), self._costs.count
        return next(first for first in range(count) if fits(first, count))

    def _look_through(self, space: Space, pairs: Pairs) -> None:
        """First the best forward packing of each size with every backward packing, then the second best, and so on."""
        halves = [half for size in space.backward_sizes for half in pairs.backward(size)[: self._effort.backward]]
        found: list[Pair] = []
        for half in sorted(halves, key=lambda half: half.promise_ms):
            if half.promise_ms < self._best_ms:
                more = pairs.with_backward(half, self._best_ms, self._effort.forward)
                found += more
                if more:
                    first = min(more, key=lambda pair: pair.bound_ms)
                    self._time_ms(first.schedule)
        for pair in sorted(pairs.published(self._best_ms), key=lambda pair: pair.bound_ms):
            if pair.bound_ms < self._best_ms:
                self._time_ms(pair.schedule)
        stop = self._jobs + self._effort.jobs
        for pair in sorted(found, key=lambda pair: (pair.rank, pair.bound_ms)):
            if self._jobs < stop and pair.bound_ms < self._best_ms:
                self._time_ms(pair.schedule)

    def _best_of_each_size(self) -> list[Schedule]:
        """One for each pair of micro-batch sizes, the fastest first."""
        best: dict[tuple[int, int], Schedule] = {}
        for schedule in sorted(self._times_ms, key=self._times_ms.__getitem__):
            best.setdefault((schedule.forward_micro_batch, schedule.backward_micro_batch), schedule)
        return list(best.values())

    def _polish(self, schedule: Schedule, stop: int) -> None:
        """Moves to the first neighbour that is faster, until there is none or `stop` jobs have been run; in a deep model
        by several layers first.
        """
        step = 2 << (self._costs.count // DEEP).bit_length()
        while step := step // 2:
            improved = True
            while improved:
                improved = False
                for neighbour in self._neighbours(schedule, step):
                    if self._jobs >= stop:
                        return
                    if self._time_ms(neighbour) < self._times_ms[schedule]:
                        schedule, improved = neighbour, True
                        break

    def _neighbours(self, schedule: Schedule, step: int) -> Iterator[Schedule]:
        """One bound moved by `step` layers; where the fused pack begins, the forward pass ends."""
        forward, backward = schedule.forward, schedule.backward
        for moved in _moved(backward, step):
            ends = (*forward[:-1], moved[-2]) if len(forward) > 1 else forward
            if len(ends) == 1 or ends[-2] < ends[-1]:
                yield from self._that_fit(replace(schedule, forward=ends, backward=moved))
        for moved in _moved(forward, step):
            yield from self._that_fit(replace(schedule, forward=moved))

    def _that_fit(self, schedule: Schedule) -> Iterator[Schedule]:
        for backward, size, bounds in (
            (False, schedule.forward_micro_batch, schedule.forward),
            (True, schedule.backward_micro_batch, schedule.backward),
        ):
            if not fits_all(bounds, self._fits(backward, size)):
                return
        yield schedule

    def _time_ms(self, schedule: Schedule) -> float:
        if schedule not in self._times_ms:
            question = self._question
            simulated = simulate(question.setup, schedule, self._costs, self._machine, question.overlap)
            self._times_ms[schedule] = simulated.time_ms
            self._jobs += simulated.jobs
            self._best_ms = min(self._best_ms, simulated.time_ms)
        return self._times_ms[schedule]


def _moved(bounds: Bounds, step: int) -> Iterator[Bounds]:
    """Every bound between the ends `step` layers up or down, alone, and all of them together."""
    for way in (-step, step):
        slid = (bounds[0], *(bound + way for bound in bounds[1:-1]), bounds[-1])
        if len(bounds) > 2 and slid[0] < slid[1] and slid[-2] < slid[-1]:
            yield slid
    for place in range(len(bounds) - 2, 0, -1):
        for bound in (bounds[place] - step, bounds[place] + step):
            if bounds[place - 1] < bound < bounds[place + 1]:
                yield (*bounds[:place], bound, *bounds[place + 1 :])
