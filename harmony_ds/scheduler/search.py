"""Searches for the fastest plan that fits the device.

A plan is decided by a few choices: where the calls are cut into packs, for each pass in its own way; how much of the
stash waits on the host, and whether what waits between packs does, too; which packs stay on the device from forward to
backward (kept), and which from step to step (resident); whether swaps are issued early; whose autograd graphs are kept.
Together they are a `Point` of the search. All of them cannot be tried, so that the search goes in four steps, from the
many to the few:

1. Propose (`candidates`): many ways to cut the calls into packs, and for each of them a few ways to use memory.
2. Estimate (`estimator`): the peak and the time of each proposal, from a plan over a few micro-batches that stand for all.
   What does not fit is dropped, and the best few ways to cut are remembered (`_Search.found`).
3. Improve (`neighbours`): again and again, small changes of the best few are proposed and estimated in the same way, as
   long as they bring better ones.
4. Choose: the best few that are left are simulated in full, with all micro-batches, and the fastest is the plan.
   (Of a plan that is only to be estimated, many micro-batches are never listed: see `PlanRequest.most_listed`.)

All of that is done with crossing tensors on the device; again with them on the host where nothing fits, or where the best
plan is short of memory.

Times are compared in steps of two thousandths; of equally fast plans the one that moves fewer bytes is taken, then the one
with fewer packs. Nothing depends on chance: the same model, machine and settings always give the same plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

from harmony_ds.decomposer.graph import LayerGraph
from harmony_ds.errors import ConfigError, DoesNotFitError
from harmony_ds.scheduler.candidates import (
    CandidateKind,
    Cut,
    Cuts,
    describe_policy,
    every_resident_set,
    first_fitting,
    propose_policies,
)
from harmony_ds.scheduler.choose import PlanRequest, among_devices, explain, may_move_crossing
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.delay_choice import choose_delays
from harmony_ds.scheduler.estimator import CandidateEstimator
from harmony_ds.scheduler.graphs import Graphs
from harmony_ds.scheduler.grid import counted
from harmony_ds.scheduler.host_room import waiting_of
from harmony_ds.scheduler.lowering import STASH_PIECES
from harmony_ds.scheduler.neighbours import Point, neighbours_by_cuts, neighbours_by_memory
from harmony_ds.scheduler.pack_bytes import PackBytes
from harmony_ds.scheduler.packing import ElementBytes, Packer
from harmony_ds.scheduler.partition import Bounds
from harmony_ds.scheduler.plan import Packing, Plan, Policy
from harmony_ds.scheduler.profile import Machine
from harmony_ds.scheduler.resident import may_stay, tied_closure
from harmony_ds.scheduler.simulate import Prediction, run_steps
from harmony_ds.scheduler.swaps import swaps_of

_QUANTUM = math.log1p(2e-3)
_BEAM = 6
"""How many of the best candidates are remembered, one for each way to cut, and have their neighbours tried."""
_AT_ONCE = 48
"""How many neighbours of one candidate are tried before the search looks again which candidate is the best."""
_PATIENCE = 900
"""The search for neighbours ends after this many in a row that were not better than the best."""
_WORK, _FIRST_WORK = 500_000, 300_000
"""Bounds on work, in tasks walked: after the first no more neighbours are tried, after the second no more ways to cut."""
_SIMULATED = 3
"""Work of simulating a task, where walking its memory is 1."""
_SLOWER, _MARGIN = 2, 1.1
"""A kind of cut is given up after this many ways in a row whose steps take this many times the best: each has more packs
than the one before, and the next ones would be slower still.
"""
_FEW = 6
"""With at most this many packs, every set of resident packs is tried, and graphs are added by what plans really take."""
_SHORT = 8
"""With at most this many packs, all uses of memory are proposed for each way to cut."""
_PIECES = 8
"""Most transfers in which the simulator lets the stash for one pack move while candidates are compared: a plan moves it in
more, each of which takes time to simulate. With many packs they are fewer, see `_MANY`.
"""
_MANY = 24
"""With more packs than this, the transfers of `_PIECES` are so many times fewer as the packs are more."""
_NEAR = 1.01
"""Candidates that are estimated to be slower than the best by more than this factor are not simulated again at the end."""
_ALMOST = 1 - 1e-9
"""The same time is added up in another order."""
_TRIALS = 4
"""How often more kept graphs are tried for the plan that was found. What `Graphs.fitting` is certain of is less than what
fits, so that another trial may find room for more.
"""


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan that fits, what it will take, and how it was found.

    Attributes:
        reserved_bytes: what the device's caching allocator has to reserve for the plan, as a replay of its requests says
            (`allocator_fit`); all that it may, where luck serves the plan; None: not replayed.
        counts: how many micro-batches each one of the plan stands for (see `PlanRequest.most_listed`); empty: for itself.
    """

    plan: Plan
    prediction: Prediction
    reason: str
    reserved_bytes: int | None = None
    counts: tuple[int, ...] = ()


def search(
    graph: LayerGraph,
    costs: CostTable,
    machine: Machine,
    element: ElementBytes,
    request: PlanRequest,
    top: int = 1,
    among: int = 1,
    fastest: tuple[Choice, ...] = (),
) -> tuple[Choice, ...]:
    """Return the `top` fastest plans that fit, best first.

    If the host has no room for what the fastest keeps there, the plans are such as it has room for, if there are any.

    Args:
        among: how many of those that are estimated to be the fastest are simulated in full to find them; at least `top`.
        fastest: the fastest plans whatever host memory there is, where they are known; empty: they are searched for.

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
    among = max(top, among)
    if not fastest:
        unbounded = replace(request, host_bytes=None)
        fastest = _search_all_ways(graph, costs, machine, element, unbounded, top, among)
    if request.host_bytes is None or waiting_of(fastest[0].plan, costs).total_bytes <= request.host_bytes:
        return fastest
    return _search_all_ways(graph, costs, machine, element, request, top, among) or fastest


def _search_all_ways(
    graph: LayerGraph,
    costs: CostTable,
    machine: Machine,
    element: ElementBytes,
    request: PlanRequest,
    top: int,
    among: int,
) -> tuple[Choice, ...]:
    """Search once for each way in which several devices may work together; return the best of all.

    Empty where it is the host's room that is too small. Raises DoesNotFitError where it is the device's.
    """
    found: list[tuple[Choice, ...]] = []
    # Budgets that would do, with messages. Not the errors: one that a frame holds, whose traceback holds the frame, is a
    # cycle.
    failures: list[tuple[int, str]] = []
    for way in among_devices(request, machine):
        packer = Packer(graph, costs, element, way.policy)
        one = _Search(costs, machine, packer, way, top, among)
        one.explore()
        choices = one.choose()
        tried = [one]
        if may_move_crossing(way) and not way.policy.crossing_on_host and one.might_gain_by_moving_crossing:
            moving = replace(way, policy=replace(way.policy, crossing_on_host=True))
            moving = replace(moving, thorough=moving.thorough and not choices)
            other = _Search(costs, machine, packer, moving, top, among)
            other.explore()
            choices = _faster(choices, other.choose())
            tried.append(other)
        if choices:
            found.append(choices)
        elif request.host_bytes is None:
            smallest = min((attempt.smallest_plan for attempt in tried), key=_peak_of)
            failures.append((smallest.peak_bytes + way.beside_bytes, explain(smallest, way, graph, costs)))
    if not found:
        if failures:
            least_budget_bytes, message = min(failures)
            raise DoesNotFitError(message, least_budget_bytes)
        return ()
    best = min(found, key=lambda choices: choices[0].prediction.step_ms)
    others = [choices[0] for choices in found if choices is not best]
    return (*best[: max(1, top - len(others))], *others)[:top]


def smallest_failure(failures: Sequence[DoesNotFitError]) -> DoesNotFitError:
    """Return the one of `failures` that the smallest budget would mend; the first one, if that is known of none."""
    known = [error for error in failures if error.least_budget_bytes is not None]
    return min(known, key=_least_budget_bytes) if known else failures[0]


def _least_budget_bytes(error: DoesNotFitError) -> int:
    assert error.least_budget_bytes is not None
    return error.least_budget_bytes


def _faster(choices: tuple[Choice, ...], others: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """Return the choices of which the first is the faster one; `choices` where both are as fast."""
    if not choices or not others:
        return choices or others
    ranks = [time_rank(several[0].prediction.step_ms) for several in (choices, others)]
    return others if ranks[1] < ranks[0] else choices


def _peak_of(plan: Plan) -> int:
    return plan.peak_bytes


@dataclass(frozen=True, slots=True)
class _Found:
    """A candidate that fits, with its estimate.

    Attributes:
        ms: the time of a step; infinite: not estimated, or more than was asked for.
        rank: less is better.
        cut: the name of its cuts, for people.
    """

    ms: float
    rank: tuple[int, ...]
    packing: Packing
    policy: Policy
    point: Point
    cut: str


class _Search:
    """The search for one request: `explore`, then `choose`.

    Attributes:
        found: the best candidates so far, best first, one for each way to cut.
        smallest: what takes the least memory of all that were tried; None: nothing was tried.
    """

    def __init__(
        self, costs: CostTable, machine: Machine, packer: Packer, request: PlanRequest, top: int, among: int
    ) -> None:
        """Begin a search for the `top` fastest plans `among` so many that are simulated in full."""
        self._costs = costs
        self._machine = machine
        self._packer = packer
        self._request = request
        self._estimator = CandidateEstimator(costs, request)
        self._graphs = Graphs(costs, request)
        self._budget = float("inf") if request.budget_bytes is None else request.budget_bytes
        self._top = top
        self._among = among
        self._remembered = max(among, _BEAM)  # the length of `found`
        self._packings: dict[tuple[Bounds, Bounds], Packing] = {}
        self._peaks: dict[tuple[Bounds, Bounds, Policy], list[int]] = {}
        self._tried: set[Point] = set()
        self._work = 0  # tasks walked
        self._cuts: dict[tuple[Bounds, Bounds], Cut] = {}
        # Cuts with which every set of resident packs was tried:
        self._with_every_set: set[tuple[Bounds, Bounds]] = set()
        self._in_vain = 0  # neighbours in a row that were not better than the best
        self.found: list[_Found] = []
        self.smallest: tuple[Packing, Policy] | None = None
        self._smallest_bytes = float("inf")

    @property
    def smallest_plan(self) -> Plan:
        """The plan that takes the least memory of all that were tried."""
        assert self.smallest is not None
        packing, policy = self.smallest
        return self._estimator.plan(packing, policy).plan

    @property
    def might_gain_by_moving_crossing(self) -> bool:
        """Whether nothing fits, or the best has all of its stash on the host and takes longer than the device computes and
        waits between two steps.
        """
        if not self.found:
            return True
        best = self.found[0]
        all_stash_goes = 0 < len(best.packing.forward) <= best.policy.stash_on_host
        busy_ms = self._estimator.least_step_ms(best.packing, best.policy)
        busy_ms += self._estimator.between_steps_ms(best.packing, best.policy, self._machine)
        return all_stash_goes and best.ms > _NEAR * busy_ms

    # ---- propose ways to cut, and uses of memory for each

    def explore(self) -> None:
        """Try ways to cut from scratch, then others like the best of them, then neighbours of the best candidates."""
        cuts = Cuts(self._costs, self._packer, self._request)
        self._try_cuts(cuts.first(), cuts)
        varied: set[Cut] = set()
        while not self._request.is_manual and (not varied or self._work < _FIRST_WORK):
            best = (self._cuts[_cuts_of(candidate.packing)] for candidate in self.found)
            cut = next((cut for cut in best if cut not in varied), None)
            if cut is None:
                break
            varied.add(cut)
            self._try_cuts(cuts.near(cut), cuts)
        if self._request.thorough and self._request.policy.grouping:
            self._improve()

    def _try_cuts(self, several: Iterable[Cut], cuts: Cuts) -> None:
        """Try a few uses of memory with each cut; give up a kind of cut that only gets slower with more packs."""
        slower: Counter[CandidateKind] = Counter()
        for cut in several:
            if slower[cut.kind] >= _SLOWER:
                continue
            made = cuts.packing(cut)
            if made is None:
                continue
            packing, name = made
            if self._cuts.setdefault(_cuts_of(packing), cut) != cut:  # another cut makes the same packs
                continue
            has_few_packs = len(packing.backward) <= _SHORT
            ms = self._try_policies(packing, name, thorough=has_few_packs)
            if self.found and not has_few_packs:
                is_slower = ms > _MARGIN * self.found[0].ms
                slower[cut.kind] = slower[cut.kind] + 1 if is_slower else 0

    def _try_policies(self, packing: Packing, cut: str, thorough: bool) -> float:
        """Try a few uses of memory with these packs; return the time of the shortest step.

        Infinite: no step is short enough to be remembered. 0: nothing fits.
        """
        shortest_ms = float("inf")
        fits = False
        for policy in propose_policies(packing, self._request, partial(self._peak, packing), thorough):
            fits = True
            shortest_ms = min(shortest_ms, self._try(packing, Point.from_policy(packing, policy), policy, cut))
        return shortest_ms if fits else 0.0

    # ---- improve the best by small changes

    def _improve(self) -> None:
        """Try the neighbours of the best candidates, as long as they bring better ones."""
        waiting: dict[Point, Iterator[Point]] = {}  # by candidate: its neighbours that have not been tried
        finished: set[Point] = set()  # candidates without any
        self._in_vain = 0
        while self._in_vain < _PATIENCE and self._work < _WORK:
            best = next((candidate for candidate in self.found[:_BEAM] if candidate.point not in finished), None)
            if best is None:
                return
            if best.point not in waiting:
                waiting[best.point] = self._neighbours(best)
            for _ in range(_AT_ONCE):
                neighbour = next(waiting[best.point], None)
                if neighbour is None or self._work >= _WORK:
                    finished.add(best.point)
                    break
                self._try_neighbour(neighbour, best)

    def _neighbours(self, best: _Found) -> Iterator[Point]:
        """Yield the neighbours of a candidate: with another use of memory and with other cuts, in turn.

        Before them, of few packs, the candidate with every set of packs that may be resident.
        """
        packing = best.packing
        if len(packing.backward) <= _FEW and may_stay(self._request) and _cuts_of(packing) not in self._with_every_set:
            self._with_every_set.add(_cuts_of(packing))
            for policy in every_resident_set(packing, self._request, partial(self._peak, packing)):
                yield Point.from_policy(packing, policy)
        by_memory = neighbours_by_memory(best.point, packing, self._request)
        by_cuts: Iterator[Point] = iter(())
        if not self._request.is_manual:
            by_cuts = neighbours_by_cuts(best.point, self._request.policy.pipeline)
        for pair in zip_longest(by_memory, by_cuts):
            for point in pair:
                if point is not None:
                    yield point

    def _try_neighbour(self, point: Point, best: _Found) -> None:
        """Try a point, or, where it does not fit, those that differ from it by what takes too much."""
        known = len(self._packings)
        packing = self._packing(point)
        cut = best.cut if packing is best.packing else f"{counted(len(packing.backward), 'pack')}, cut by trial"
        if len(self._packings) > known and len(packing.backward) <= _SHORT:
            self._try_policies(packing, cut, thorough=True)
        policy = point.to_policy(packing, self._request.policy)
        if self._peak(packing, policy) <= self._budget:
            self._try(packing, point, policy, cut)
            return
        for smaller in self._with_less_memory(packing, policy):
            fitting = first_fitting(smaller, partial(self._peak, packing), self._request)
            if fitting is not None:
                self._try(packing, Point.from_policy(packing, fitting, point.graphs), fitting, cut)

    def _with_less_memory(self, packing: Packing, policy: Policy) -> Iterator[list[Policy]]:
        """Yield lists of policies, of less and less memory, each list by another means: fewer packs kept, one resident pack
        less, none resident, more stash on the host, swaps not issued early.
        """
        kept, resident, count = policy.kept, policy.resident, len(packing.forward)
        yield [replace(policy, kept=kept[number:]) for number in range(1, len(kept) + 1)]
        if self._request.settings.residency == "auto":
            for index in resident:
                others = [other for other in resident if other != index]
                yield [replace(policy, resident=tied_closure(packing, others))]
            yield [replace(policy, resident=())]
        if self._request.settings.stash == "auto" and not policy.crossing_on_host:
            yield [replace(policy, stash_on_host=number) for number in range(policy.stash_on_host + 1, count + 1)]
        if policy.prefetch and not self._request.is_manual and self._request.policy.prefetch:
            yield [replace(policy, prefetch=False)]

    # ---- estimate one candidate

    def _packing(self, point: Point) -> Packing:
        cuts = point.backward, point.forward
        if cuts not in self._packings:
            self._packings[cuts] = self._packer.packing(*cuts)
        return self._packings[cuts]

    def _stage_peaks(self, packing: Packing, policy: Policy) -> list[int]:
        """Return the peak in bytes by stage, without graphs."""
        key = (*_cuts_of(packing), policy)
        peaks = self._peaks.get(key)
        if peaks is None:
            sampled = self._estimator.sample(packing, policy)
            self._work += len(sampled.plan.tasks)
            peaks = self._peaks[key] = self._estimator.stage_peaks(sampled)
            if max(peaks) < self._smallest_bytes:
                self._smallest_bytes, self.smallest = max(peaks), (packing, policy)
        return peaks

    def _peak(self, packing: Packing, policy: Policy) -> float:
        """Return the device peak in bytes; infinite where the host has no room."""
        room = self._request.host_bytes
        if room is not None:
            plan = Plan(packing, policy, (), self._request.micro_batches, 0, 0)
            if waiting_of(plan, self._costs).total_bytes > room:
                return float("inf")
        return max(self._stage_peaks(packing, policy))

    def _try(self, packing: Packing, point: Point, policy: Policy, cut: str) -> float:
        """Estimate a candidate that fits, with as many kept graphs as fit, and remember it if it is one of the best.

        Returns the time of its step; infinite if it is none of the best, or has been tried before.
        """
        if point in self._tried:
            return float("inf")
        self._tried.add(point)
        graphs_first = next((i for i in packing.backward if packing.packs[i].positions[0] == point.graphs), None)
        peaks = self._stage_peaks(packing, policy)
        bytes_of = self._estimator.pack_bytes(packing, policy)
        policy = self._graphs.fitting(packing, policy, peaks, bytes_of, graphs_first)
        if len(packing.backward) <= _FEW:
            policy = self._with_more_graphs(packing, policy, bytes_of, 1)
        pieces = max(2, min(_PIECES, _PIECES * _MANY // len(packing.packs)))
        # Only what is faster than the same packs so far, and than the last of those remembered, is of interest.
        to_beat = [candidate.ms for candidate in self.found if candidate.packing.packs == packing.packs]
        to_beat += [candidate.ms for candidate in self.found[self._remembered - 1 :]]
        candidate = _Found(float("inf"), (), packing, policy, point, cut)
        candidate = self._estimate(candidate, max(peaks), pieces, min(to_beat, default=float("inf")))
        is_better = candidate.ms < float("inf") and self._remember(candidate)
        self._in_vain = 0 if is_better else self._in_vain + 1
        return candidate.ms

    def _estimate(self, found: _Found, peak: int, pieces: int, wanted_ms: float = float("inf")) -> _Found:
        """Return the candidate with its time and rank; as it was, if it takes more than `wanted_ms`."""
        if self._estimator.least_step_ms(found.packing, found.policy) > wanted_ms:
            return found
        sampled = self._estimator.sample(found.packing, found.policy)
        self._work += _SIMULATED * len(sampled.plan.tasks)
        ms = self._estimator.step_ms(sampled, self._machine, pieces, wanted_ms)
        if ms == float("inf"):
            return found
        rank = time_rank(ms), self._estimator.swapped_bytes(sampled), len(found.packing.packs), peak
        return replace(found, ms=ms, rank=rank)

    def _remember(self, new: _Found) -> bool:
        """Remember a candidate if it is among the best; return whether it is the best of all.

        One is remembered for each way to cut; of those that take the same time and move the same bytes, that of the fewest
        packs.
        """
        same = [
            known for known in self.found if known.packing.packs == new.packing.packs or known.rank[:2] == new.rank[:2]
        ]
        if any(known.rank <= new.rank for known in same):
            return False
        self.found = [known for known in self.found if known not in same]
        self.found.append(new)
        self.found.sort(key=_rank_of)
        del self.found[self._remembered :]
        return self.found[0] is new

    # ---- choose, by simulating the best in full

    def choose(self) -> tuple[Choice, ...]:
        """Return the best candidates as plans with all their tasks, simulated in full.

        One that cannot be among the best is not simulated: computing alone takes it as long as the last of them takes.
        """
        finalists: list[_Found] = []
        for place, candidate in enumerate(self.found):
            if place < self._among or candidate.ms < _NEAR * self.found[0].ms:
                finalists.append(self._estimate(candidate, candidate.rank[-1], STASH_PIECES))
        finalists.sort(key=_rank_of)
        best: list[Choice] = []
        for candidate in finalists[: self._among]:
            policy = self._with_most_graphs(candidate)
            least_ms = _ALMOST * self._estimator.computing_ms(candidate.packing, policy, self._machine)
            if len(best) < self._top or time_rank(least_ms) < _rank_of_choice(best[-1]):
                best.append(self._fastest_choice(candidate, policy))
                best.sort(key=_rank_of_choice)
                del best[self._top :]
        return tuple(best)

    def _with_most_graphs(self, found: _Found) -> Policy:
        """Return the candidate's policy with as many kept graphs as fit to the byte."""
        packing, without = found.packing, replace(found.policy, graphs=())
        policy = self._with_more_graphs(packing, found.policy, self._estimator.pack_bytes(packing, without), _TRIALS)
        while len(packing.backward) <= _FEW and self._graphs.wanted:
            several = (more for more in self._graphs.one_more(packing, policy) if self._fits(packing, more))
            one_more = next(several, None)
            if one_more is None:
                break
            policy = one_more
        return policy

    def _fastest_choice(self, found: _Found, policy: Policy) -> Choice:
        """Return the candidate's plan with the graphs of `policy`; without any, if they bring nothing."""
        packing, without = found.packing, replace(policy, graphs=())
        most = self._simulated_choice(packing, policy, found.cut)
        least_ms = self._estimator.least_step_ms(packing, without)
        if not policy.graphs or time_rank(most.prediction.step_ms) < time_rank(_ALMOST * least_ms):
            return most
        least = self._simulated_choice(packing, without, found.cut)
        return most if time_rank(most.prediction.step_ms) < time_rank(least.prediction.step_ms) else least

    def _with_more_graphs(self, packing: Packing, policy: Policy, bytes_of: list[PackBytes], trials: int) -> Policy:
        """Add kept graphs by what their plan really takes: less than what `Graphs.fitting` is certain of."""
        if not self._graphs.wanted:
            return policy
        for _ in range(trials):
            peaks = self._estimator.stage_peaks(self._estimator.sample(packing, policy))
            if max(peaks) > self._budget:
                policy = replace(policy, graphs=())
                continue
            more = self._graphs.fitting(packing, policy, peaks, bytes_of)
            if more == policy or not self._fits(packing, more):
                break
            policy = more
        return policy

    def _fits(self, packing: Packing, policy: Policy) -> bool:
        return max(self._estimator.stage_peaks(self._estimator.sample(packing, policy))) <= self._budget

    def _simulated_choice(self, packing: Packing, policy: Policy, cut: str) -> Choice:
        """Return the plan as it is requested, if all tasks are listed with the delays of swap-ins that make it faster.

        Of so many micro-batches that they are not, the runs of each pack hide the host's updates.
        """
        planned = self._estimator.plan(packing, policy)
        steps = run_steps(planned.plan, self._costs, self._machine, planned.counts)
        delays = () if planned.counts else choose_delays(planned.plan, self._costs, self._machine, steps)
        if delays:
            planned = self._estimator.plan(packing, replace(policy, swap_in_delays=delays))
            steps = run_steps(planned.plan, self._costs, self._machine)
        plan, counts = planned.plan, planned.counts
        assert plan.peak_bytes <= self._budget, (plan.peak_bytes, self._budget)
        prediction = steps.prediction(swaps_of(plan, self._costs, counts=counts))
        moves_stash = prediction.swaps.stash_out + prediction.swaps.stash_in > 0
        uses = describe_policy(packing, policy, moves_stash)
        return Choice(plan, prediction, f"{cut}; {uses}" if uses else cut, counts=counts)


def _rank_of(found: _Found) -> tuple[int, ...]:
    return found.rank


def _rank_of_choice(choice: Choice) -> int:
    return time_rank(choice.prediction.step_ms)


def _cuts_of(packing: Packing) -> tuple[Bounds, Bounds]:
    """Return the ends of packs, in the backward pass and in the forward pass."""
    backward = tuple([packing.packs[index].positions[-1] for index in packing.backward])
    forward = tuple([packing.packs[index].positions[-1] for index in packing.forward])
    return backward, forward


def time_rank(ms: float) -> int:
    """Return a time in steps of two thousandths: times of the same rank count as equal."""
    return math.ceil(math.log(max(ms, 1e-9)) / _QUANTUM)
