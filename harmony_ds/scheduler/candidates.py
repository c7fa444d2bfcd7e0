"""The candidates of the search: ways to cut both passes into packs, and ways to use spare memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import combinations, product

from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.grid import counted
from harmony_ds.scheduler.packing import Packer
from harmony_ds.scheduler.partition import BestCuts, Bounds, uniform_bounds
from harmony_ds.scheduler.plan import Packing, Policy
from harmony_ds.scheduler.resident import closed, may_stay, resident_packs

_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_MULTIPLES = (1, 2, 4)
_FORWARD_SHARES = (0.3, 0.45, 0.65)


# ---- where to cut


class Kind(Enum):
    """How packs are cut."""

    EQUAL = "of {size} calls"
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

    kind: Kind
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
        self._best = {Kind.TIME: BestCuts(times), Kind.MEMORY: BestCuts(weights), Kind.WORKING: BestCuts(working)}

    def first(self) -> Iterator[Cut]:
        """Yield the cuts to begin with: of every kind, into 1, 2, 3, 4, 6, 9, ... packs, the fewest first."""
        if self._size is not None:
            yield Cut(Kind.EQUAL, -(-self._count // self._size))
            return
        yield from (Cut(kind, parts) for parts in _ladder(self._count) for kind in Kind)

    def near(self, cut: Cut) -> Iterator[Cut]:
        """Yield the cuts to try next if that one is good."""
        yield replace(cut, small_first=not cut.small_first)
        yield from (replace(cut, multiple=multiple, forward=0) for multiple in _MULTIPLES if multiple != cut.multiple)
        if self._packer.pipeline == 1 and cut.parts > 3:
            for parts in sorted({round(share * cut.parts) for share in _FORWARD_SHARES}):
                yield replace(cut, multiple=1, forward=parts)
        for parts in sorted({cut.parts - 1, cut.parts + 1, round(0.8 * cut.parts), round(1.25 * cut.parts)}):
            if 0 < parts <= self._count and parts != cut.parts:
                yield replace(cut, parts=parts)

    def packing(self, cut: Cut) -> tuple[Packing, str] | None:
        """Its packs and its name; None: there are none."""
        bounds = self.bounds(cut)
        if bounds is None:
            return None
        backward, forward = bounds
        name = cut.kind.value.format(size=self._size_of(cut)) + (", as configured" if self._size is not None else "")
        name += ", small ones first" if cut.small_first else ""
        name += f", {len(forward) - 1} in the forward pass" if cut.multiple > 1 or cut.forward else ""
        return self._packer.packing(backward, forward), f"{counted(len(backward) - 1, 'pack')} {name}"

    def bounds(self, cut: Cut) -> tuple[Bounds, Bounds] | None:
        """Return the bounds of its packs in the backward pass and in the forward pass; None: there are none."""
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
    """1, 2, 3, ... with growing steps, up to `count`."""
    rungs, rung = [], 1
    while rung < count:
        rungs.append(rung)
        rung += max(1, rung // 2)
    return [*rungs, count]


# ---- what to do with spare memory


Peak = Callable[[Policy], float]


def policies(packing: Packing, request: PlanRequest, peak: Peak, thorough: bool = True) -> Iterator[Policy]:
    """Yield a few policies for these packs that fit, spare memory used in one way or another.

    Args:
        peak: the device peak in bytes; infinite where the host has no room.
        thorough: also without early swaps, with all the stash on the host, and with the last packs resident.
    """
    stashes, early_or_not = _stashes(packing, request), prefetch_choices(request)
    residency = request.settings.residency
    given = resident_packs(packing, residency) if isinstance(residency, int) else ()
    base = replace(request.policy, resident=given)
    least = peak(replace(base, prefetch=early_or_not[-1], stash_on_host=stashes[-1]))
    if request.budget_bytes is not None and least > request.budget_bytes:
        return
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
                yield from _filled(packing, way, request, peak, thorough)
        if not thorough:
            return


def every_set(packing: Packing, request: PlanRequest, peak: Peak) -> Iterator[Policy]:
    """For each set of packs that may be resident, the policy with the least stash on the host that fits, and packs kept."""
    able = closed(packing, packing.backward) if request.settings.residency == "auto" else ()
    sets = [some for number in range(len(able) + 1) for some in combinations(able, number)]
    for early, resident in product(prefetch_choices(request), sets):
        if closed(packing, resident) == resident:
            base = replace(request.policy, resident=resident, prefetch=early)
            ways = [replace(base, stash_on_host=away) for away in _stashes(packing, request)]
            first = first_fitting(ways, peak, request)
            if first is not None:
                yield _kept(packing, first, request, peak)


def _filled(packing: Packing, policy: Policy, request: PlanRequest, peak: Peak, thorough: bool) -> Iterator[Policy]:
    """Yield the policy with as many packs that stay as fit: the last kept; or the first, or the last, resident."""
    yield _kept(packing, policy, request, peak)
    if request.settings.residency == "auto":
        count = len(packing.backward)
        for places in (range(count), range(count - 1, -1, -1))[: 2 if thorough else 1]:
            more = [replace(policy, resident=closed(packing, sorted(places[:n]))) for n in range(count, 0, -1)]
            some = first_fitting(more, peak, request)
            if some is not None:
                yield _kept(packing, some, request, peak)


def _kept(packing: Packing, policy: Policy, request: PlanRequest, peak: Peak) -> Policy:
    able = sorted(both_ways(packing).difference(policy.resident))
    most = [replace(policy, kept=tuple(able[first:])) for first in range(len(able) + 1)]
    return first_fitting(most, peak, request) or policy


def first_fitting(policies: Sequence[Policy], peak: Peak, request: PlanRequest) -> Policy | None:
    """Return the first of policies, each of which takes less memory than the one before, that fits.

    Few peaks are asked for: where memory changes evenly, the place is told from those of the first and the last.
    """
    budget = request.budget_bytes
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
        share = (most - budget) / (most - least) if most < float("inf") else 0.5
        middle = min(max(low + round(share * (high - low)), low + 1), high - 1)
        here = peak(policies[middle])
        if here > budget:
            low, most = middle, here
        else:
            high, least = middle, here
    return policies[high]


def both_ways(packing: Packing) -> set[int]:
    """Packs that may be kept from forward to backward: both passes have them."""
    return {i for i in packing.forward if i in packing.backward[:-1] and packing.packs[i].needs_backward}


def use_of(packing: Packing, policy: Policy) -> str:
    """Return what a policy uses memory for, for people."""
    count, away = len(packing.forward), policy.stash_on_host
    place = f"of {away} of {count} packs on the host" if 0 < away < count else f"on the {'host' if away else 'device'}"
    text = f"{policy.pipeline} devices, " * (policy.pipeline > 1) + f"stash {place}"
    for packs, what in ((policy.kept, "kept"), (policy.resident, "resident")):
        text += f", {counted(len(packs), 'pack')} {what}" if packs else ""
    if holders := sum(map(bool, policy.graphs)):
        text += f", {sum(policy.graphs)} graphs of {counted(holders, 'pack')}"
    text += ", prefetch" if policy.prefetch else ""
    if policy.alone:
        return text
    weights = "shares of the weights" if policy.shared else "whole weights"
    return f"{text}; {weights}, gradients reduced on the {'host' if policy.reduce_on_host else 'devices'}"


def prefetch_choices(request: PlanRequest) -> list[bool]:
    """Return whether swaps may be issued early, and whether not."""
    return [True, False] if request.policy.prefetch and not request.is_manual else [request.policy.prefetch]


def _stashes(packing: Packing, request: PlanRequest) -> list[int]:
    """How many forward packs may have their stash on the host."""
    count = len(packing.forward)
    if request.settings.stash != "auto":
        return [count if request.settings.stash == "host" else 0]
    return sorted({round(share * count) for share in _SHARES}) if count > len(_SHARES) else list(range(count + 1))
