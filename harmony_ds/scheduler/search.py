"""Searches for the fastest plan that fits.

What is varied: where the passes are cut into packs, each in its own way; how much of the stash waits on the host; which
packs stay on the device from forward to backward, and which from step to step; whether swaps are issued early; whose graphs
are kept.

First many ways to cut are tried, with few uses of memory each; then, again and again, the neighbours of the best few.
All are judged by their outlook: the walks over a few micro-batches that stand for all. Those chosen are walked in full.
Times are compared in steps of two thousandths; of equally fast plans the one that moves fewer bytes is taken, then the one
with fewer packs. Nothing depends on chance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

from harmony_ds.decomposer.graph import LayerGraph
from harmony_ds.errors import ConfigError, DoesNotFitError
from harmony_ds.scheduler.candidates import Cut, Cuts, Kind, every_set, first_fitting, policies, use_of
from harmony_ds.scheduler.choose import PlanRequest, among_devices, explain, make_plan
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.delay_choice import choose_delays
from harmony_ds.scheduler.graphs import Graphs
from harmony_ds.scheduler.grid import counted
from harmony_ds.scheduler.host_room import waiting_of
from harmony_ds.scheduler.lowering import STASH_PIECES
from harmony_ds.scheduler.neighbours import Point, recut, reused
from harmony_ds.scheduler.outlook import Outlook
from harmony_ds.scheduler.pack_bytes import PackBytes
from harmony_ds.scheduler.packing import ElementBytes, Packer
from harmony_ds.scheduler.partition import Bounds
from harmony_ds.scheduler.plan import Packing, Plan, Policy
from harmony_ds.scheduler.profile import Machine
from harmony_ds.scheduler.resident import closed, may_stay
from harmony_ds.scheduler.simulate import Prediction, simulate

_QUANTUM = math.log1p(2e-3)
_BEAM = 6
"""So many of the best ways to cut have their neighbours tried."""
_AT_ONCE = 48
"""So many neighbours of one, before those of the best are gone on with."""
_PATIENCE = 900
"""After so many plans none of which was better, the others are taken not to be."""
_WORK, _FIRST_WORK = 500_000, 300_000
"""After so many tasks walked no more neighbours are tried; after so many, no more ways to cut from scratch."""
_SIMULATED = 3
"""So much more work it is to simulate a task than to walk it."""
_SLOWER, _MARGIN = 2, 1.1
"""After so many ways to cut of one kind, each so much slower than the best, more packs are taken to be slower still."""
_FEW = 6
"""Of so many packs at most, every set of them is tried as the resident ones, and graphs are added by what they take."""
_SHORT = 8
"""Of so many packs at most, all uses of memory are tried for each way to cut."""
_PIECES = 8
"""In so many pieces, at most, the stash for a pack moves while candidates are compared; in fewer where packs are many."""
_MANY = 24
_NEAR = 1.01
"""Those that are slower by more than that are not the best in more pieces, either."""
_TRIALS = 4
"""So often graphs are added to the plan that was found: what is certain to fit is less than what does."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan that fits, what it will take, and how it was found."""

    plan: Plan
    prediction: Prediction
    reason: str


def search(
    graph: LayerGraph, costs: CostTable, machine: Machine, element: ElementBytes, request: PlanRequest, top: int = 1
) -> tuple[Choice, ...]:
    """Return the `top` fastest plans that fit, best first; such as the host has room for, if the fastest is not and any is.

    Raises:
        ConfigError: there are more devices than packs.
        DoesNotFitError: nothing fits the device; says what the smallest plan needs and what would help.
    """
    packs, devices = -(-len(costs.calls) // (request.settings.pack_layers or 1)), request.policy.pipeline
    if packs < devices:
        raise ConfigError(
            f"harmony.devices asks for {devices} devices, and the model's {len(costs.calls)} layer calls make {packs} "
            "packs at most, each of which runs on one device: lower harmony.devices, or harmony.pack_layers."
        )
    fastest = _search(graph, costs, machine, element, replace(request, host_bytes=None), top)
    if request.host_bytes is None or waiting_of(fastest[0].plan, costs).total_bytes <= request.host_bytes:
        return fastest
    return _search(graph, costs, machine, element, request, top) or fastest


def _search(
    graph: LayerGraph, costs: CostTable, machine: Machine, element: ElementBytes, request: PlanRequest, top: int
) -> tuple[Choice, ...]:
    """None where the host's room is what is too small."""
    found: list[tuple[Choice, ...]] = []
    failures: list[str] = []  # not the errors: one that a frame holds, whose traceback holds the frame, is a cycle
    for way in among_devices(request, machine):
        packer = Packer(graph, costs, element, way.policy)
        one = _Search(costs, machine, packer, way, top)
        one.run()
        choices = one.choices()
        if choices:
            found.append(choices)
        elif request.host_bytes is None:
            assert one.smallest is not None
            packing, policy = one.smallest
            smallest = make_plan(packing, costs, way, policy)
            failures.append(explain(smallest, way))
    if not found:
        if failures:
            raise DoesNotFitError(failures[-1])
        return ()
    best = min(found, key=lambda choices: choices[0].prediction.step_ms)
    others = [choices[0] for choices in found if choices is not best]
    return (*best[: max(1, top - len(others))], *others)[:top]


@dataclass(frozen=True, slots=True)
class _Found:
    """A candidate that fits: as in `Choice`, but not walked in full.

    Attributes:
        ms: the time of a step.
        rank: less is better.
        cut: the name of its cuts.
    """

    ms: float
    rank: tuple[int, ...]
    packing: Packing
    policy: Policy
    point: Point
    cut: str


class _Search:
    """The state of the search for one request."""

    def __init__(self, costs: CostTable, machine: Machine, packer: Packer, request: PlanRequest, top: int) -> None:
        self._costs = costs
        self._machine = machine
        self._packer = packer
        self._request = request
        self._outlook = Outlook(costs, machine, request)
        self._graphs = Graphs(costs, request)
        self._budget = float("inf") if request.budget_bytes is None else request.budget_bytes
        self._top = top
        self._most = max(top, _BEAM)
        self._packings: dict[tuple[Bounds, Bounds], Packing] = {}
        self._peaks: dict[tuple[Bounds, Bounds, Policy], list[int]] = {}
        self._tried: set[Point] = set()
        self._work = 0  # tasks walked
        self._cuts: dict[tuple[Bounds, Bounds], Cut] = {}
        self._every: set[tuple[Bounds, Bounds]] = set()
        self._in_vain = 0
        self.found: list[_Found] = []
        self.smallest: tuple[Packing, Policy] | None = None
        self._least = float("inf")

    # ---- the way

    def run(self) -> None:
        """Try ways to cut from scratch, then at neighbours of the best."""
        cuts = Cuts(self._costs, self._packer, self._request)
        self._try_cuts(cuts.first(), cuts)
        varied: set[Cut] = set()
        while not self._request.is_manual and (not varied or self._work < _FIRST_WORK):
            best = (self._cuts[_cuts_of(one.packing)] for one in self.found)
            cut = next((one for one in best if one not in varied), None)
            if cut is None:
                break
            varied.add(cut)
            self._try_cuts(cuts.near(cut), cuts)
        if self._request.thorough and self._request.policy.grouping:
            self._improve()

    def _try_cuts(self, several: Iterable[Cut], cuts: Cuts) -> None:
        slower: Counter[Kind] = Counter()
        for cut in several:
            made = cuts.packing(cut) if slower[cut.kind] < _SLOWER else None
            if made is None or self._cuts.setdefault(_cuts_of(made[0]), cut) != cut:
                continue
            ms = self._try_uses(*made, thorough=len(made[0].backward) <= _SHORT)
            if self.found and len(made[0].backward) > _SHORT:
                slower[cut.kind] = slower[cut.kind] + 1 if ms > _MARGIN * self.found[0].ms else 0

    def _try_uses(self, packing: Packing, cut: str, thorough: bool) -> float:
        """Try a few ways to use memory with these cuts; return the shortest step; infinite if it is too long."""
        peak = partial(self._peak, packing)
        every = policies(packing, self._request, peak, thorough)
        return min([self._try(packing, Point.of(packing, one), one, cut) for one in every], default=0.0)

    def _improve(self) -> None:
        """Try the neighbours of the best, as long as they bring better ones."""
        waiting: dict[Point, Iterator[Point]] = {}
        over: set[Point] = set()
        self._in_vain = 0
        while self._in_vain < _PATIENCE and self._work < _WORK:
            best = next((one for one in self.found[:_BEAM] if one.point not in over), None)
            if best is None:
                return
            if best.point not in waiting:
                waiting[best.point] = self._around(best)
            for _ in range(_AT_ONCE):
                near = next(waiting[best.point], None)
                if near is None or self._work >= _WORK:
                    over.add(best.point)
                    break
                self._try_near(near, best)

    def _around(self, best: _Found) -> Iterator[Point]:
        """Its neighbours: other uses of memory and other cuts in turn. Of few packs, first any that may be resident are."""
        packing = best.packing
        if len(packing.backward) <= _FEW and may_stay(self._request) and _cuts_of(packing) not in self._every:
            self._every.add(_cuts_of(packing))
            peak = partial(self._peak, packing)
            for policy in every_set(packing, self._request, peak):
                yield Point.of(packing, policy)
        uses = reused(best.point, packing, self._request)
        cuts = iter(()) if self._request.is_manual else recut(best.point, self._request.policy.pipeline)
        for both in zip_longest(uses, cuts):
            yield from filter(None, both)

    def _try_near(self, point: Point, best: _Found) -> None:
        """Try a point, or, where it does not fit, those that differ from it by what takes too much."""
        known = len(self._packings)
        packing = self._packing(point)
        cut = best.cut if packing is best.packing else f"{counted(len(packing.backward), 'pack')}, cut by trial"
        if len(self._packings) > known and len(packing.backward) <= _SHORT:
            self._try_uses(packing, cut, thorough=True)
        policy = point.policy_for(packing, self._request.policy)
        if self._peak(packing, policy) <= self._budget:
            self._try(packing, point, policy, cut)
            return
        for way in self._smaller(packing, policy):
            fitting = first_fitting(way, partial(self._peak, packing), self._request)
            if fitting is not None:
                self._try(packing, Point.of(packing, fitting, point.graphs), fitting, cut)

    def _smaller(self, packing: Packing, policy: Policy) -> Iterator[list[Policy]]:
        """Policies of less and less memory."""
        kept, resident, count = policy.kept, policy.resident, len(packing.forward)
        yield [replace(policy, kept=kept[number:]) for number in range(1, len(kept) + 1)]
        if self._request.settings.residency == "auto":
            for index in resident:
                yield [replace(policy, resident=closed(packing, [other for other in resident if other != index]))]
            yield [replace(policy, resident=())]
        if self._request.settings.stash == "auto":
            yield [replace(policy, stash_on_host=away) for away in range(policy.stash_on_host + 1, count + 1)]
        if policy.prefetch and not self._request.is_manual and self._request.policy.prefetch:
            yield [replace(policy, prefetch=False)]

    # ---- one candidate

    def _packing(self, point: Point) -> Packing:
        cuts = point.backward, point.forward
        if cuts not in self._packings:
            self._packings[cuts] = self._packer.packing(*cuts)
        return self._packings[cuts]

    def _stages(self, packing: Packing, policy: Policy) -> list[int]:
        """Return the peak in bytes by stage, without graphs."""
        key = (*_cuts_of(packing), policy)
        peaks = self._peaks.get(key)
        if peaks is None:
            short = self._outlook.short(packing, policy)
            self._work += len(short.plan.tasks)
            peaks = self._peaks[key] = self._outlook.stages(short)
            if max(peaks) < self._least:
                self._least, self.smallest = max(peaks), (packing, policy)
        return peaks

    def _peak(self, packing: Packing, policy: Policy) -> float:
        """Return the device peak in bytes; infinite where the host has no room."""
        room = self._request.host_bytes
        if room is not None:
            plan = Plan(packing, policy, (), self._request.micro_batches, 0, 0)
            if waiting_of(plan, self._costs).total_bytes > room:
                return float("inf")
        return max(self._stages(packing, policy))

    def _try(self, packing: Packing, point: Point, policy: Policy, cut: str) -> float:
        """Simulate a candidate that fits. Returns the time of its step; infinite if it is none of the best."""
        if point in self._tried:
            return float("inf")
        self._tried.add(point)
        first = next((i for i in packing.backward if packing.packs[i].positions[0] == point.graphs), None)
        peaks = self._stages(packing, policy)
        bytes_of = self._outlook.pack_bytes(packing, policy)
        policy = self._graphs.fitting(packing, policy, peaks, bytes_of, first)
        if len(packing.backward) <= _FEW:
            policy = self._with_more_graphs(packing, policy, bytes_of, 1)
        pieces = max(2, min(_PIECES, _PIECES * _MANY // len(packing.packs)))
        wanted_ms = min(
            [one.ms for one in self.found if one.packing.packs == packing.packs]
            + [one.ms for one in self.found[self._most - 1 :]],
            default=float("inf"),
        )
        new = self._timed(_Found(float("inf"), (), packing, policy, point, cut), max(peaks), pieces, wanted_ms)
        better = new.ms < float("inf") and self._add(new)
        self._in_vain = 0 if better else self._in_vain + 1
        return new.ms

    def _timed(self, found: _Found, peak: int, pieces: int, wanted_ms: float = float("inf")) -> _Found:
        if self._outlook.least_ms(found.packing, found.policy) > wanted_ms:
            return found
        short = self._outlook.short(found.packing, found.policy)
        self._work += _SIMULATED * len(short.plan.tasks)
        ms = self._outlook.step_ms(short, pieces, wanted_ms)
        if ms == float("inf"):
            return found
        rank = steps(ms), self._outlook.swapped_bytes(short), len(found.packing.packs), peak
        return replace(found, ms=ms, rank=rank)

    def _add(self, new: _Found) -> bool:
        """Keep it if it is among the best: one for each way to cut; of those that do the same, that of the fewest packs.

        Returns whether it is the best of all.
        """
        same = [one for one in self.found if one.packing.packs == new.packing.packs or one.rank[:2] == new.rank[:2]]
        if any(one.rank <= new.rank for one in same):
            return False
        self.found = [one for one in self.found if one not in same]
        self.found.append(new)
        self.found.sort(key=lambda one: one.rank)
        del self.found[self._most :]
        return self.found[0] is new

    # ---- the end

    def choices(self) -> tuple[Choice, ...]:
        """Return the best, walked and simulated in full."""
        near = [one for place, one in enumerate(self.found) if place < self._top or one.ms < _NEAR * self.found[0].ms]
        finalists = sorted((self._timed(one, one.rank[-1], STASH_PIECES) for one in near), key=lambda one: one.rank)
        choices = [self._with_graphs(one) for one in finalists[: self._top]]
        return tuple(sorted(choices, key=lambda one: steps(one.prediction.step_ms)))

    def _with_graphs(self, found: _Found) -> Choice:
        """With as many graphs as fit to the byte; without any, if they bring nothing."""
        packing, without = found.packing, replace(found.policy, graphs=())
        policy = self._with_more_graphs(packing, found.policy, self._outlook.pack_bytes(packing, without), _TRIALS)
        while len(packing.backward) <= _FEW and self._graphs.wanted:
            several = (one for one in self._graphs.one_more(packing, policy) if self._fits(packing, one))
            if (more := next(several, None)) is None:
                break
            policy = more
        most = self._choice(packing, policy, found.cut)
        if not policy.graphs:
            return most
        least = self._choice(packing, without, found.cut)
        return most if steps(most.prediction.step_ms) < steps(least.prediction.step_ms) else least

    def _with_more_graphs(self, packing: Packing, policy: Policy, bytes_of: list[PackBytes], trials: int) -> Policy:
        """Add graphs by what their plan really takes: less than what `Graphs.fitting` is certain of."""
        for _ in range(trials if self._graphs.wanted else 0):
            peaks = self._outlook.stages(self._outlook.short(packing, policy))
            if max(peaks) > self._budget:
                policy = replace(policy, graphs=())
                continue
            more = self._graphs.fitting(packing, policy, peaks, bytes_of)
            if more == policy or not self._fits(packing, more):
                break
            policy = more
        return policy

    def _fits(self, packing: Packing, policy: Policy) -> bool:
        return max(self._outlook.stages(self._outlook.short(packing, policy))) <= self._budget

    def _choice(self, packing: Packing, policy: Policy, cut: str) -> Choice:
        plan = make_plan(packing, self._costs, self._request, policy)
        delays = choose_delays(plan, self._costs, self._machine)
        if delays:
            plan = make_plan(packing, self._costs, self._request, replace(policy, swap_in_delays=delays))
        assert plan.peak_bytes <= self._budget, (plan.peak_bytes, self._budget)
        return Choice(plan, simulate(plan, self._costs, self._machine), f"{cut}; {use_of(packing, policy)}")


def _cuts_of(packing: Packing) -> tuple[Bounds, Bounds]:
    """Return the ends of packs, in both passes."""
    return tuple(
        tuple(packing.packs[index].positions[-1] for index in order) for order in (packing.backward, packing.forward)
    )  # type: ignore[return-value]


def steps(ms: float) -> int:
    """Return a time in steps of two thousandths."""
    return math.ceil(math.log(max(ms, 1e-9)) / _QUANTUM)
