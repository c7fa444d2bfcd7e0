"""Searches for the fastest plan that fits.

What is varied: where the passes are cut into packs, each in its own way; how much of the stash waits on the host; which
packs stay on the device from forward to backward, and which from step to step; whether swaps are issued ahead.

First many ways to cut are looked at, and of few packs all that can be done with them; then, again and again, the
neighbours of the best few: a cut moved by one call, removed, or added. Candidates are taken in the order of a lower
bound of their time, and only those whose bound is below the best time found are simulated. Times are compared in steps
of two thousandths; of equally fast plans the one that moves fewer bytes is taken, then the one with fewer packs. Nothing
depends on chance.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from harmony_ds.decomposer.graph import LayerGraph
from harmony_ds.errors import DoesNotFitError
from harmony_ds.profiler.costs import CostTable
from harmony_ds.profiler.profile import Machine
from harmony_ds.scheduler.candidates import around, may_stay, packings, policies, use_of
from harmony_ds.scheduler.choose import PlanRequest, among_devices, draft_plan, explain, make_plan
from harmony_ds.scheduler.graphs import Graphs
from harmony_ds.scheduler.host_room import away_bytes, gradient_bytes, waiting_of
from harmony_ds.scheduler.neighbours import Point, neighbours
from harmony_ds.scheduler.packing import ElementBytes, Packer
from harmony_ds.scheduler.partition import Bounds
from harmony_ds.scheduler.peaks import Peaks
from harmony_ds.scheduler.plan import Packing, Plan, Policy
from harmony_ds.scheduler.policies import Policies
from harmony_ds.scheduler.simulate import Prediction, simulate
from harmony_ds.scheduler.time_bounds import TimeBounds

_QUANTUM = math.log1p(2e-3)
_BEAM = 6
"""So many of the best ways to cut have their neighbours looked at."""
_WORK, _MORE_WORK = 10_000, 3_000
"""After so many packs no more neighbours are; so many more around what was found in another way."""
_TASKS = 200_000
"""After so many simulated tasks neither are any."""
_PATIENT_LOOKS = 300
"""After so many plans, most of which did not fit, none of which was better, the others are taken not to be better."""
_SMALLEST = 50
_PATIENCE = 48
_PATIENT_TASKS = 15_000
"""After so many simulated plans, or plans of so many tasks together, none of which was better, those with the least
bounds have been seen. Long plans take long to simulate, and are more alike."""
_WAYS_TASKS = 600
"""After so many simulated tasks of one plan, whose graphs it is that are kept is not varied any further."""
_TRIALS = 4
"""So often graphs are added to the plan that was found: what is certain to fit is less than what does."""
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
    """The `top` fastest plans that fit, best first; such as the host has room for, if the fastest is not and any is.

    Raises:
        DoesNotFitError: nothing fits the device; says what the smallest plan needs and what would help.
    """
    fastest = _search(graph, costs, machine, element, replace(request, host_bytes=None), top)
    if request.host_bytes is None or waiting_of(fastest[0].plan, costs).total_bytes <= request.host_bytes:
        return fastest
    return _search(graph, costs, machine, element, request, top) or fastest


def _search(
    graph: LayerGraph, costs: CostTable, machine: Machine, element: ElementBytes, request: PlanRequest, top: int
) -> tuple[Choice, ...]:
    """None where the host's room is what is too small."""
    found: list[tuple[Choice, ...]] = []
    failures: list[DoesNotFitError] = []
    for way in among_devices(request, machine):
        try:
            choices = _search_one(graph, costs, machine, element, way, top)
            found += [choices] if choices else []
        except DoesNotFitError as failure:
            failures.append(failure)
    if not found:
        if failures:
            raise failures[-1]
        return ()
    best = min(found, key=lambda choices: choices[0].prediction.step_ms)
    others = [choice for choices in found if choices is not best for choice in choices]
    return (*best, *others)[:top]


def _search_one(
    graph: LayerGraph, costs: CostTable, machine: Machine, element: ElementBytes, request: PlanRequest, top: int
) -> tuple[Choice, ...]:
    packer = Packer(graph, costs, element, request.policy)
    cuts = list(packings(graph, costs, packer, request))
    search = _Search(costs, machine, packer, request, top)
    found = search.run(cuts)
    if not found.choices:
        if request.host_bytes is not None:
            return ()
        raise DoesNotFitError(explain(search.smallest(packing for packing, _ in cuts), request))
    if may_stay(request) and search.has_improved:
        # Where nothing stays there is less to look at, so that more cuts are: what is found there may be better.
        swapped = replace(request, settings=replace(request.settings, residency="off"))
        others = _Search(costs, machine, packer, swapped, top, search.tasks).run(cuts)
        if others.choices and found.add(others.choices[0]):
            search.improve(_MORE_WORK)
    return tuple(_checked(search.settled(choice), costs, request) for choice in found.choices[:top])


def _checked(choice: Choice, costs: CostTable, request: PlanRequest) -> Choice:
    """The same choice with its plan's memory walked in full."""
    plan = make_plan(choice.plan.packing, costs, request, choice.plan.policy)
    assert plan.peak_bytes == choice.plan.peak_bytes, (plan.peak_bytes, choice.plan.peak_bytes)
    return replace(choice, plan=plan)


@dataclass(frozen=True, slots=True, order=True)
class _Candidate:
    """Packs and a policy, not yet composed; no step with it is shorter than the bound."""

    bound_ms: float
    number: int
    packing: Packing = field(compare=False)
    policy: Policy = field(compare=False)
    cut: str = field(compare=False)


class _Search:
    """What is known of one request while it is searched."""

    def __init__(
        self, costs: CostTable, machine: Machine, packer: Packer, request: PlanRequest, top: int, tasks: int = 0
    ) -> None:
        """`tasks`: simulated before, in another search."""
        self._costs = costs
        self._machine = machine
        self._request = request
        self._bounds = TimeBounds(costs, machine, request)
        self._peaks = Peaks(costs, request)
        self._graphs = Graphs(costs, request, self._peaks)
        self._budget = float("inf") if request.budget_bytes is None else request.budget_bytes
        self.packer = packer
        self.found = _Found(top)
        self._packings: dict[tuple[Bounds, Bounds], Packing] = {}
        self._tried: set[tuple[Bounds, Bounds, Policy]] = set()
        self._numbers = count()
        self._work = self._limit = 0  # packs whose ways through the streams have been followed, and may be
        self.tasks = tasks  # simulated

    @property
    def has_improved(self) -> bool:
        """Whether cuts have been looked at beside those that it began with."""
        return bool(self._packings)

    def run(self, cuts: Sequence[tuple[Packing, str]]) -> _Found:
        """All of it, from these ways to cut on."""
        self.look(self.candidates(packing, cut) for packing, cut in cuts)
        if self.found.choices and self._request.policy.grouping and not self._request.is_manual:
            self.improve(_WORK - self._work)
        return self.found

    def look(self, ranked: Iterable[Iterable[_Candidate]]) -> None:
        """Simulates what may be better than what is known, of lists of candidates in the order of their bounds."""
        in_vain = _Patience()
        for candidate in heapq.merge(*ranked):
            if not self.found.wants(candidate.bound_ms) or (self.found.choices and in_vain.is_over):
                break
            in_vain.saw(*self._try(candidate))

    def candidates(self, packing: Packing, cut: str) -> Iterator[_Candidate]:
        """The policies for these packs, the least bound first."""
        return self._ranked(packing, cut, policies(packing, self._machine.copies_overlap, self._request))

    def _ranked(self, packing: Packing, cut: str, every: Policies) -> Iterator[_Candidate]:
        """Those that may fit."""
        every = every.only(self._peaks.at_least(packing, every) <= self._budget)
        if self._request.host_bytes is not None and len(every):
            gradients = gradient_bytes(packing, every)
            stash = away_bytes(packing, every, self._costs, self._request.micro_batches)
            every = every.only(gradients + stash <= self._request.host_bytes)
        if not len(every):
            return
        self._work += len(packing.forward) + len(packing.backward)
        every = self._graphs.filling(packing, every, self._peaks.spare(packing, every, self._budget))
        bounds = self._bounds.tighter(packing, every)
        if not self._request.policy.grouping:
            bounds = np.array([self._bounds.of(packing, every[n]) for n in range(len(every))])
        for n in np.argsort(bounds, kind="stable").tolist():
            yield _Candidate(float(bounds[n]), next(self._numbers), packing, every[n], cut)

    def _try(self, candidate: _Candidate) -> tuple[bool, int]:
        """Simulates it if it fits. Returns whether it is the best so far, and the number of its tasks (see _Patience)."""
        packing, policy = candidate.packing, candidate.policy
        cuts = _cuts_of(packing)
        if (*cuts, policy) in self._tried:
            return False, 0
        self._tried.add((*cuts, policy))
        without = replace(policy, graphs=())
        if self._peaks.at_least_closely(packing, without) > self._budget:  # most are, where little fits
            return False, 1
        peaks = self._peaks.stages(packing, without)
        if max(peaks) > self._budget:
            return False, 1
        choices: list[Choice] = []
        tasks = 0
        for way in self._graphs.ways(packing, without, peaks, self._budget):
            if tasks > _WAYS_TASKS:
                break
            choices.append(self._choice(packing, way, max(peaks), candidate.cut))
            tasks += len(choices[-1].plan.tasks)
        return self.found.add(min(choices, key=_rank)), tasks

    def _choice(self, packing: Packing, policy: Policy, peak: int, cut: str) -> Choice:
        plan = draft_plan(packing, self._costs, self._request, policy, peak)
        self.tasks += len(plan.tasks)
        return Choice(plan, simulate(plan, self._costs, self._machine), f"{cut}; {use_of(packing, policy)}")

    def settled(self, choice: Choice) -> Choice:
        """With as many graphs as fit to the byte; without any, if they bring nothing."""
        packing, cut = choice.plan.packing, choice.reason.partition("; ")[0]
        without, policy = replace(choice.plan.policy, graphs=()), choice.plan.policy
        peaks = self._peaks.stages(packing, policy)
        if max(peaks) > self._budget:
            policy, peaks = without, self._peaks.stages(packing, without)
        for _ in range(_TRIALS):
            more = self._graphs.fitting(packing, policy, peaks, self._budget)
            now = self._peaks.stages(packing, more) if more != policy else peaks
            if more == policy or max(now) > self._budget:
                break
            policy, peaks = more, now
        if policy == without == choice.plan.policy:
            return choice
        most = self._choice(packing, policy, max(peaks), cut)
        if not policy.graphs:
            return most
        least = self._choice(packing, without, self._peaks.of(packing, without), cut)
        return most if steps(most.prediction.step_ms) < steps(least.prediction.step_ms) else least

    def improve(self, work: int) -> None:
        """Looks at the neighbours of the best plans, as long as they bring better ones."""
        expanded: set[Point] = set()
        self._limit = self._work + work
        while self._may_go_on:
            points = (Point.of(choice.plan.packing, choice.plan.policy) for choice in self.found.choices)
            point = next((one for one in points if one not in expanded), None)
            if point is None:
                return
            expanded.add(point)
            self.look(self._around(point))

    @property
    def _may_go_on(self) -> bool:
        return self._work < self._limit and self.tasks < _TASKS

    def _around(self, point: Point) -> Iterator[Iterator[_Candidate]]:
        for near in (point, *neighbours(point)):
            if not self._may_go_on:
                return
            cuts = near.backward, near.forward
            new = cuts not in self._packings
            packing = self._packings[cuts] = self._packings.get(cuts) or self.packer.packing(*cuts)
            name = f"{len(packing.backward)} packs, cut by trial"
            if new:
                yield self.candidates(packing, name)
            if may_stay(self._request):
                policy = near.policy_for(packing, self._request.policy)
                yield self._ranked(packing, name, around(packing, policy, self._machine.copies_overlap, self._request))

    def smallest(self, packings: Iterable[Packing]) -> Plan:
        """The plan that needs least, among those that need least at least."""
        least: list[tuple[float, int, Packing, Policy]] = []
        for packing in packings:
            few = policies(packing, self._machine.copies_overlap, self._request)
            peaks = self._peaks.at_least(packing, few)
            smallest = np.argsort(peaks, kind="stable")[:2].tolist()
            least += ((float(peaks[n]), next(self._numbers), packing, few[n]) for n in smallest)
        tried = heapq.nsmallest(_SMALLEST, least, key=lambda one: one[:2])
        _, _, packing, policy = min(tried, key=lambda one: self._peaks.of(one[2], one[3]))
        return make_plan(packing, self._costs, self._request, policy)


def _cuts_of(packing: Packing) -> tuple[Bounds, Bounds]:
    """Where packs end, in both passes."""
    return tuple(
        tuple(packing.packs[index].positions[-1] for index in order) for order in (packing.backward, packing.forward)
    )  # type: ignore[return-value]


def steps(ms: float) -> int:
    """A time in steps of two thousandths."""
    return math.ceil(math.log(max(ms, 1e-9)) / _QUANTUM)


class _Patience:
    """How long a search goes on in vain."""

    def __init__(self) -> None:
        self._plans = self._tasks = self._looks = 0

    def saw(self, better: bool, tasks: int) -> None:
        """A plan of so many tasks; 1: it did not fit, 0: it is known already."""
        self._looks = 0 if better else self._looks + bool(tasks)
        self._plans = 0 if better else self._plans + (tasks > 1)
        self._tasks = 0 if better else self._tasks + tasks

    @property
    def is_over(self) -> bool:
        return self._plans >= _PATIENCE or self._tasks >= _PATIENT_TASKS or self._looks >= _PATIENT_LOOKS


class _Found:
    """The best choices so far, best first, one for each way to cut."""

    def __init__(self, top: int) -> None:
        self._most = max(top, _BEAM)
        self.choices: list[Choice] = []

    def wants(self, bound_ms: float) -> bool:
        """Whether a plan of that bound could be the best, or fill the list with one that is not much slower."""
        if not self.choices:
            return True
        best_ms = self.choices[0].prediction.step_ms
        if len(self.choices) < self._most:
            return bound_ms <= best_ms * _MARGIN
        return steps(bound_ms) < steps(best_ms)

    def add(self, choice: Choice) -> bool:
        """Returns whether it is the best of all."""
        cuts = _cuts_of(choice.plan.packing)
        same = next((c for c in self.choices if _cuts_of(c.plan.packing) == cuts), None)
        if same and _rank(same) <= _rank(choice):
            return False
        if same:
            self.choices.remove(same)
        self.choices.append(choice)
        self.choices.sort(key=_rank)
        del self.choices[self._most :]
        return self.choices[0] is choice


def _rank(choice: Choice) -> tuple[int, int, int, int]:
    prediction, plan = choice.prediction, choice.plan
    return steps(prediction.step_ms), prediction.swaps.total, len(plan.packs), plan.peak_bytes
