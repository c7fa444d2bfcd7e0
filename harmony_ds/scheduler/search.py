"""Searches for the fastest plan that fits.

What is varied: where the passes are cut into packs, each in its own way; how much of the stash waits on the host; which
packs stay on the device from forward to backward, and which from step to step; whether swaps are issued ahead.

The set of candidates does not depend on the budget, so a larger budget never gives a slower plan. Candidates are taken
in the order of a lower bound of their time, and only those whose bound is below the best time found are simulated.
Times are compared in steps of one hundredth, below which no prediction means anything; of equally fast plans the one
that moves fewer bytes is taken, then the one with fewer packs. Nothing depends on chance.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from harmony_ds.decomposer.graph import LayerGraph
from harmony_ds.errors import DoesNotFitError
from harmony_ds.profiler.costs import CostTable
from harmony_ds.profiler.profile import Machine
from harmony_ds.scheduler.candidates import Candidate, candidates
from harmony_ds.scheduler.choose import PlanRequest, draft_plan, explain, make_plan
from harmony_ds.scheduler.packing import ElementBytes
from harmony_ds.scheduler.peaks import Peaks
from harmony_ds.scheduler.plan import Plan
from harmony_ds.scheduler.simulate import Prediction, simulate
from harmony_ds.scheduler.time_bounds import TimeBounds

_QUANTUM = math.log1p(1e-2)
_SMALLEST = 50
_PATIENCE = 24
_PATIENT_TASKS = 15_000
"""After so many simulated plans, or plans of so many tasks together, none of which was better, those with the least
bounds have been seen. Long plans take long to simulate, and are more alike."""
_MARGIN = 1.1
"""How much slower than the best a plan may be and still be looked at, while the list is not full."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan that fits, what it will take, and how it came about."""

    plan: Plan
    prediction: Prediction
    reason: str


def search(
    graph: LayerGraph, costs: CostTable, machine: Machine, element: ElementBytes, request: PlanRequest, top: int = 1
) -> tuple[Choice, ...]:
    """The `top` fastest plans that fit, best first.

    Raises:
        DoesNotFitError: nothing fits; says what the smallest plan needs and what would help.
    """
    found = _Found(top)
    peaks = Peaks(costs, request)
    bounds = TimeBounds(costs, machine, request)
    every = list(candidates(graph, costs, element, request, bounds))

    def may_fit(candidate: Candidate) -> bool:
        least = peaks.at_least(candidate.packing, candidate.policy)
        return request.budget_bytes is None or least <= request.budget_bytes

    for candidate in _by_bound(every, bounds, may_fit):
        if not found.wants(candidate) or found.has_tried_enough:
            break
        peak = peaks.of(candidate.packing, candidate.policy)
        if request.budget_bytes is not None and peak > request.budget_bytes:
            continue
        plan = draft_plan(candidate.packing, costs, request, candidate.policy, peak)
        found.add(Choice(plan, simulate(plan, costs, machine), candidate.reason))
    if not found.choices:
        raise DoesNotFitError(explain(_smallest(every, costs, peaks, request), request))
    return tuple(_checked(choice, costs, request) for choice in found.choices)


def _checked(choice: Choice, costs: CostTable, request: PlanRequest) -> Choice:
    """The same choice with its plan validated and its memory walked in full."""
    plan = make_plan(choice.plan.packing, costs, request, choice.plan.policy)
    assert plan.peak_bytes == choice.plan.peak_bytes, (plan.peak_bytes, choice.plan.peak_bytes)
    return replace(choice, plan=plan)


def _smallest(every: Iterable[Candidate], costs: CostTable, peaks: Peaks, request: PlanRequest) -> Plan:
    """The plan that needs least, among those that need least at least."""
    few = heapq.nsmallest(_SMALLEST, every, key=lambda c: peaks.at_least(c.packing, c.policy))
    smallest = min(few, key=lambda c: peaks.of(c.packing, c.policy))
    return make_plan(smallest.packing, costs, request, smallest.policy)


def _by_bound(
    every: Iterable[Candidate], bounds: TimeBounds, may_fit: Callable[[Candidate], bool]
) -> Iterator[Candidate]:
    """Candidates that may fit, in the order of their bounds; the tighter bound is computed when the looser one has
    come up.
    """
    heap = [(steps(c.bound_ms), c.swap_bytes, place, False, c) for place, c in enumerate(every)]
    heapq.heapify(heap)
    while heap:
        bound, nbytes, place, tight, candidate = heapq.heappop(heap)
        if not tight:
            if not may_fit(candidate):
                continue
            bound_ms = max(candidate.bound_ms, bounds.tighter(candidate.packing, candidate.policy))
            candidate = replace(candidate, bound_ms=bound_ms)
            if steps(bound_ms) > bound:
                heapq.heappush(heap, (steps(bound_ms), nbytes, place, True, candidate))
                continue
        yield candidate


def steps(ms: float) -> int:
    """A time in steps of one hundredth."""
    return math.ceil(math.log(max(ms, 1e-9)) / _QUANTUM)


class _Found:
    """The best choices so far, best first."""

    def __init__(self, top: int) -> None:
        self._top = top
        self.choices: list[Choice] = []
        self._in_vain = 0
        self._tasks_in_vain = 0

    @property
    def has_tried_enough(self) -> bool:
        """Whether many plans have been added since the best one."""
        return self._in_vain >= _PATIENCE or self._tasks_in_vain >= _PATIENT_TASKS

    def wants(self, candidate: Candidate) -> bool:
        """Whether `candidate` could be the best, or fill the list with a plan that is not much slower."""
        if not self.choices:
            return True
        best = self.choices[0].prediction
        bound, known = steps(candidate.bound_ms), steps(best.step_ms)
        if bound < known or (bound == known and candidate.swap_bytes < best.swaps.total):
            return True
        return len(self.choices) < self._top and candidate.bound_ms <= best.step_ms * _MARGIN

    def add(self, choice: Choice) -> None:
        if any(choice.plan.tasks == c.plan.tasks and choice.plan.packing == c.plan.packing for c in self.choices):
            return
        better = not self.choices or _rank(choice) < _rank(self.choices[0])
        self._in_vain = 0 if better else self._in_vain + 1
        self._tasks_in_vain = 0 if better else self._tasks_in_vain + len(choice.plan.tasks)
        self.choices.append(choice)
        self.choices.sort(key=_rank)
        del self.choices[self._top :]


def _rank(choice: Choice) -> tuple[int, int, int, int]:
    prediction, plan = choice.prediction, choice.plan
    return steps(prediction.step_ms), prediction.swaps.total, len(plan.packs), plan.peak_bytes
