"""What the search proposes: ways to cut both passes into packs, and, for given packs, ways to use spare memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import combinations, product

from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.crossing import crossing_moves
from harmony_ds.scheduler.grid import counted
from harmony_ds.scheduler.packing import Packer
from harmony_ds.scheduler.partition import BestCuts, Bounds, uniform_bounds
from harmony_ds.scheduler.plan import Packing, Policy
from harmony_ds.scheduler.resident import may_stay, resident_packs, tied_closure

_FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
_MULTIPLES = (1, 2, 4)
_FORWARD_FRACTIONS = (0.3, 0.45, 0.65)


# ---- where to cut


class CandidateKind(Enum):
    """What the packs of a cut have in common."""

    EQUAL = "of {size}"
    TIME = "of balanced time"
    MEMORY = "of balanced memory"
    WORKING = "of balanced working memory"


@dataclass(frozen=True, slots=True)
class Cut:
    """A way to cut both passes.

    Attributes:
        parts: packs of the backward pass.
        small_first: with the first pack cut into packs of 1, 2, 4, ... calls and the rest. Nothing hides the update of the
            first pack, which is the last to have its gradients and the first that the next step needs: it should be small,
            and the ones after it so large that theirs are hidden under what runs before.
        multiple: so many of its packs are one in the forward pass, which holds neither gradients nor graphs.
        forward: packs of the forward pass, cut for themselves and not as multiples of the others; 0: as multiples.
    """

    kind: CandidateKind
    parts: int
    small_first: bool = False
    multiple: int = 1
    forward: int = 0


class Cuts:
    """Ways to cut the calls of one model."""

    def __init__(self, costs: CostTable, packer: Packer, request: PlanRequest) -> None:
        self._count = count = len(costs.calls)
        self._packer = packer
        self._size = request.settings.pack_layers
        singles = packer.packs(tuple(range(count + 1)))
        times = [cost.forward_ms + cost.backward_ms for cost in costs.costs]
        weights = [float(pack.weight_bytes + pack.gradient_bytes) for pack in singles]
        # What a layer computes in backward is on the device for its whole pack: of convolutions it is most of their memory.
        working = [weight + cost.forward.graph_bytes for weight, cost in zip(weights, costs.costs, strict=True)]
        self._best = {
            CandidateKind.TIME: BestCuts(times),
            CandidateKind.MEMORY: BestCuts(weights),
            CandidateKind.WORKING: BestCuts(working),
        }

    def first(self) -> Iterator[Cut]:
        """Yield the cuts to begin with: of every kind, into 1, 2, 3, 4, 6, 9, ... packs, the fewest first."""
        if self._size is not None:
            yield Cut(CandidateKind.EQUAL, -(-self._count // self._size))
            return
        yield from (Cut(kind, parts) for parts in _ladder(self._count) for kind in CandidateKind)

    def near(self, cut: Cut) -> Iterator[Cut]:
        """Yield the cuts to try next if `cut` is good: one change away from it."""
        yield replace(cut, small_first=not cut.small_first)
        yield from (replace(cut, multiple=multiple, forward=0) for multiple in _MULTIPLES if multiple != cut.multiple)
        if self._packer.pipeline == 1 and cut.parts > 3:
            for parts in sorted({round(fraction * cut.parts) for fraction in _FORWARD_FRACTIONS}):
                yield replace(cut, multiple=1, forward=parts)
        for parts in sorted({cut.parts - 1, cut.parts + 1, round(0.8 * cut.parts), round(1.25 * cut.parts)}):
            if 0 < parts <= self._count and parts != cut.parts:
                yield replace(cut, parts=parts)

    def packing(self, cut: Cut) -> tuple[Packing, str] | None:
        """Return the packs of a cut and its name for people; None: the calls cannot be cut so."""
        bounds = self.bounds(cut)
        if bounds is None:
            return None
        backward, forward = bounds
        name = cut.kind.value.format(size=counted(self._size_of(cut), "call"))
        if self._size is not None:
            name += ", as configured"
        if cut.small_first:
            name += ", small ones first"
        if cut.multiple > 1 or cut.forward:
            name += f", {len(forward) - 1} in the forward pass"
        return self._packer.packing(backward, forward), f"{counted(len(backward) - 1, 'pack')} {name}"

    def bounds(self, cut: Cut) -> tuple[Bounds, Bounds] | None:
        """Return the bounds of the packs in the backward pass and in the forward pass; None: the calls cannot be cut so."""
        best = self._best.get(cut.kind)
        bounds = uniform_bounds(self._count, self._size_of(cut)) if best is None else best.bounds(cut.parts)
        if cut.small_first:
            ends = [2**power - 1 for power in range(1, bounds[1].bit_length()) if 3 * (2**power - 1) < 2 * bounds[1]]
            if not ends:
                return None
            bounds = (0, *ends, *bounds[1:])
        before = bounds[:-1]
        if cut.forward:
            if self._packer.pipeline > 1 or best is None or not 0 < cut.forward <= before[-1]:
                return None
            return bounds, best.bounds(cut.forward, before[-1])
        forward = tuple(sorted({0, *before[len(before) - 1 :: -cut.multiple]}))
        if cut.multiple > 1 and not 1 < len(forward) < len(before):
            return None
        return bounds, forward

    def _size_of(self, cut: Cut) -> int:
        return self._size or -(-self._count // cut.parts)


def _ladder(count: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 9, ... and `count`: numbers of packs to try."""
    rungs, rung = [], 1
    while rung < count:
        rungs.append(rung)
        rung += max(1, rung // 2)
    return [*rungs, count]


# ---- what to do with spare memory


Peak = Callable[[Policy], float]
"""Tells the device peak in bytes of given packs with a policy; infinite where the host has no room."""


def propose_policies(packing: Packing, request: PlanRequest, peak: Peak, thorough: bool = True) -> Iterator[Policy]:
    """Yield a few policies for these packs that fit, spare memory used in one way or another.

    Args:
        thorough: also without early swaps, with all the stash on the host, and with the last packs resident.
    """
    stashes, early_or_not = _stash_counts(packing, request), prefetch_choices(request)
    residency = request.settings.residency
    given = resident_packs(packing, residency) if isinstance(residency, int) else ()
    base = replace(request.policy, resident=given)
    smallest = _with_host_room([replace(base, prefetch=early_or_not[-1], stash_on_host=n) for n in stashes], peak)
    if not smallest or (request.budget_bytes is not None and peak(smallest[-1]) > request.budget_bytes):
        return
    stashes = stashes[: len(smallest)]
    for early in early_or_not:
        base = replace(base, prefetch=early)
        ways = [replace(base, stash_on_host=away) for away in stashes]
        first = first_fitting(ways, peak, request)
        if first is None:
            continue
        if thorough or not may_stay(request) or request.policy.pipeline > 1:
            yield first
        for way in dict.fromkeys((first, ways[-1])) if thorough else (first,):
            if may_stay(request):
                yield from _with_staying_packs(packing, way, request, peak, thorough)
        if not thorough:
            return


def every_resident_set(packing: Packing, request: PlanRequest, peak: Peak) -> Iterator[Policy]:
    """Yield, for each set of packs that may be resident, the policy with the least stash on the host that fits, and as many
    packs kept as fit.
    """
    able = tied_closure(packing, packing.backward) if request.settings.residency == "auto" else ()
    sets = [some for number in range(len(able) + 1) for some in combinations(able, number)]
    for early, resident in product(prefetch_choices(request), sets):
        if tied_closure(packing, resident) == resident:
            base = replace(request.policy, resident=resident, prefetch=early)
            ways = [replace(base, stash_on_host=away) for away in _stash_counts(packing, request)]
            first = first_fitting(ways, peak, request)
            if first is not None:
                yield _with_packs_kept(packing, first, request, peak)


def _with_staying_packs(
    packing: Packing, policy: Policy, request: PlanRequest, peak: Peak, thorough: bool
) -> Iterator[Policy]:
    """Yield the policy with as many packs on the device as fit: the last ones kept from forward to backward; or the first
    ones, or the last ones, resident from step to step and as many of the others kept.
    """
    yield _with_packs_kept(packing, policy, request, peak)
    if request.settings.residency == "auto":
        count = len(packing.backward)
        for places in (range(count), range(count - 1, -1, -1))[: 2 if thorough else 1]:
            more = [replace(policy, resident=tied_closure(packing, sorted(places[:n]))) for n in range(count, 0, -1)]
            some = first_fitting(more, peak, request)
            if some is not None:
                yield _with_packs_kept(packing, some, request, peak)


def _with_packs_kept(packing: Packing, policy: Policy, request: PlanRequest, peak: Peak) -> Policy:
    """Return the policy with as many of the last packs kept from forward to backward as fit."""
    able = sorted(packs_in_both_passes(packing).difference(policy.resident))
    most = [replace(policy, kept=tuple(able[first:])) for first in range(len(able) + 1)]
    return first_fitting(most, peak, request) or policy


def first_fitting(policies: Sequence[Policy], peak: Peak, request: PlanRequest) -> Policy | None:
    """Return the first of policies, each of which takes less memory than the one before, that fits.

    Few peaks are computed: where memory changes evenly from one policy to the next, the peaks of the first and the last
    one tell about where the budget lies between them.
    """
    budget = request.budget_bytes
    policies = _with_host_room(policies, peak)
    if not policies or budget is None:
        return policies[0] if policies and peak(policies[0]) < float("inf") else None
    low, high = 0, len(policies) - 1
    least = peak(policies[high])
    if least > budget:
        return None
    most = peak(policies[low])
    if most <= budget:
        return policies[low]
    while high - low > 1:  # the one at `low` does not fit, the one at `high` does
        fraction = (most - budget) / (most - least) if most < float("inf") else 0.5
        middle = min(max(low + round(fraction * (high - low)), low + 1), high - 1)
        here = peak(policies[middle])
        if here > budget:
            low, most = middle, here
        else:
            high, least = middle, here
    return policies[high]


def _with_host_room(policies: Sequence[Policy], peak: Peak) -> Sequence[Policy]:
    """Return the policies without the last ones, those with the most stash on the host, that the host has no room for."""
    count = len(policies)
    while count and peak(policies[count - 1]) == float("inf"):
        count -= 1
    return policies[:count]


def packs_in_both_passes(packing: Packing) -> set[int]:
    """Return the packs that may be kept from forward to backward: those that both passes have."""
    return {i for i in packing.forward if i in packing.backward[:-1] and packing.packs[i].needs_backward}


def describe_policy(packing: Packing, policy: Policy, moves_stash: bool) -> str:
    """Return how a policy uses memory, as text for people; "": nothing is to be said.

    Args:
        moves_stash: whether any stash is copied to the host: that of a pack that gets no tensors has no bytes.
    """
    uses: list[str] = []
    if policy.pipeline > 1:
        uses.append(f"{policy.pipeline} devices")
    count, on_host = len(packing.forward), policy.stash_on_host
    if moves_stash and 0 < on_host < count:
        uses.append(f"stash of {on_host} of {count} packs on the host")
    elif count:  # the fused pack alone has no stash
        uses.append("stash on the host" if moves_stash else "stash on the device")
    if crossing_moves(packing, policy):
        uses.append("crossing tensors on the host")
    if policy.slices_from_host:
        uses.append("slices from the host")
    if policy.kept:
        uses.append(f"{counted(len(policy.kept), 'pack')} kept")
    if policy.resident:
        uses.append(f"{counted(len(policy.resident), 'pack')} resident")
    packs_with_graphs = sum(1 for count in policy.graphs if count)
    if packs_with_graphs:
        uses.append(f"{counted(sum(policy.graphs), 'graph')} of {counted(packs_with_graphs, 'pack')}")
    if policy.prefetch:
        uses.append("prefetch")
    text = ", ".join(uses)
    if policy.alone:
        return text
    weights = "shares of the weights" if policy.swaps_in_shares else "whole weights"
    place = "host" if policy.reduce_on_host else "devices"
    return f"{text}; {weights}, gradients reduced on the {place}"


def prefetch_choices(request: PlanRequest) -> list[bool]:
    """Return whether swaps may be issued early, and whether not."""
    return [True, False] if request.policy.prefetch and not request.is_manual else [request.policy.prefetch]


def _stash_counts(packing: Packing, request: PlanRequest) -> list[int]:
    """Return the numbers of forward packs to try with their stash on the host."""
    count = len(packing.forward)
    if request.policy.crossing_on_host:
        return [count]
    if request.settings.stash != "auto":
        return [count if request.settings.stash == "host" else 0]
    if count <= len(_FRACTIONS):
        return list(range(count + 1))
    return sorted({round(fraction * count) for fraction in _FRACTIONS})
