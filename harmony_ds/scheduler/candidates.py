"""What the search looks at: ways to cut both passes into packs, and ways to use spare memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from harmony_ds.decomposer.graph import LayerGraph
from harmony_ds.profiler.costs import CostTable
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.packing import Packer
from harmony_ds.scheduler.partition import BestCuts, Bounds, Combine, sums_of, uniform_bounds
from harmony_ds.scheduler.plan import Packing, Policy
from harmony_ds.scheduler.resident import closed, may_stay, resident_packs

_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_FORWARD_MULTIPLES = (2, 4)


# ---- where to cut


def packings(
    graph: LayerGraph, costs: CostTable, packer: Packer, request: PlanRequest
) -> Iterator[tuple[Packing, str]]:
    """Ways to cut both passes, each once, and its name; the same whatever the budget."""
    seen: set[tuple[Bounds, Bounds | None]] = set()
    cuts = _cuts(graph, costs, packer, request)
    # Where every micro-batch swaps every pack, ends and first packs are nothing special, and plans are long to simulate.
    plain = request.is_manual or not request.policy.grouping
    for backward, name in cuts if plain else _with_short_ends(cuts):
        whole = packer.packing(backward)
        if (backward, None) not in seen:
            seen.add((backward, None))
            yield whole, f"{len(whole.backward)} packs {name}"
        if request.is_manual:
            continue
        for multiple in _FORWARD_MULTIPLES:
            # Forward packs hold no gradients and no graph: several backward packs fit in one.
            before = backward[:-1]
            forward = tuple(sorted({0, *before[len(before) - 1 :: -multiple]}))
            if len(forward) < len(before) and len(forward) > 1 and (backward, forward) not in seen:
                seen.add((backward, forward))
                yield (
                    packer.packing(backward, forward),
                    (f"{len(whole.backward)} packs {name}, {len(forward) - 1} in the forward pass"),
                )


def _cuts(graph: LayerGraph, costs: CostTable, packer: Packer, request: PlanRequest) -> Iterator[tuple[Bounds, str]]:
    count = len(graph.calls)
    if request.settings.pack_layers is not None:
        yield (
            uniform_bounds(count, request.settings.pack_layers),
            f"of {request.settings.pack_layers} calls, as configured",
        )
        return
    for size in _sizes(count):
        yield uniform_bounds(count, size), f"of {size} calls"
    singles = packer.packs(tuple(range(count + 1)))
    times = [cost.forward_ms + cost.backward_ms for cost in costs.costs]
    weights = [float(pack.weight_bytes + pack.gradient_bytes) for pack in singles]
    for values, name in ((times, "of balanced time"), (weights, "of balanced memory")):
        cuts = BestCuts(sums_of(values), Combine.MAX)
        for parts in _ladder(count):
            bounds = cuts.bounds(parts)
            if bounds is not None:
                yield bounds, name


def _with_short_ends(cuts: Iterator[tuple[Bounds, str]]) -> Iterator[tuple[Bounds, str]]:
    """Each cut, and the same with its first pack cut into packs of 1, 2, 4, ... calls and the rest.

    Nothing hides the update of the first pack, which is the last to have its gradients and the first that the next step
    needs: it should be small, and the ones behind it so large that theirs are hidden under what runs before.
    """
    for bounds, name in cuts:
        yield bounds, name
        ends = [2**power - 1 for power in range(1, bounds[1].bit_length()) if 3 * (2**power - 1) < 2 * bounds[1]]
        if ends:
            yield (0, *ends, *bounds[1:]), f"{name}, small ones first"


def _sizes(count: int) -> list[int]:
    """Calls in a pack, the most first: for each number of packs the fewest, and the most, with which there are as many."""
    sizes: set[int] = set()
    for parts in {-(-count // size) for size in range(1, count + 1)}:
        sizes.add(-(-count // parts))
        sizes.add(-(-count // (parts - 1)) - 1 if parts > 1 else count)
    return sorted(sizes, reverse=True)


def _ladder(count: int) -> list[int]:
    """1, 2, 3, ... with growing steps, up to `count`."""
    rungs, rung = [], 1
    while rung <= count:
        rungs.append(rung)
        rung += max(1, rung // 8)
    return rungs


# ---- what to do with spare memory


def policies(
    packing: Packing, copies_overlap: bool, request: PlanRequest, fits: Callable[[Policy], bool]
) -> Iterator[Policy]:
    """A few policies for these packs that fit: with the least memory, and with spare memory used in one way or another."""
    stashes = _stashes(packing, request)
    for early in ahead(copies_overlap, request):
        base = replace(request.policy, resident=_given(packing, request), prefetch=early)
        ways = [replace(base, stash_on_host=away) for away in stashes]
        first = first_fitting(ways, fits)
        if first is None:
            continue
        for way in dict.fromkeys((first, ways[-1])):
            yield way
            if may_stay(request):
                yield from _filled(packing, way, request, fits)


def _filled(
    packing: Packing, policy: Policy, request: PlanRequest, fits: Callable[[Policy], bool]
) -> Iterator[Policy]:
    """The same with as many packs that stay as fit: the last ones kept; before that, the first ones or the last resident."""
    yield _kept(packing, policy, fits)
    if request.settings.residency == "auto":
        count = len(packing.backward)
        for places in (range(count), range(count - 1, -1, -1)):
            more = [
                replace(policy, resident=closed(packing, sorted(places[:number]))) for number in range(count, 0, -1)
            ]
            some = first_fitting(more, fits)
            if some is not None:
                yield _kept(packing, some, fits)


def _kept(packing: Packing, policy: Policy, fits: Callable[[Policy], bool]) -> Policy:
    able = sorted(both_ways(packing).difference(policy.resident))
    most = [replace(policy, kept=tuple(able[first:])) for first in range(len(able) + 1)]
    return first_fitting(most, fits) or policy


def first_fitting(policies: list[Policy], fits: Callable[[Policy], bool]) -> Policy | None:
    """The first of policies, each of which takes less memory than the one before, that fits."""
    if not policies or not fits(policies[-1]):
        return None
    first, last = 0, len(policies) - 1
    while first < last:
        middle = (first + last) // 2
        first, last = (first, middle) if fits(policies[middle]) else (middle + 1, last)
    return policies[last]


def both_ways(packing: Packing) -> set[int]:
    """Packs that may be kept from forward to backward: both passes have them."""
    return {i for i in packing.forward if i in packing.backward[:-1] and packing.packs[i].needs_backward}


def use_of(packing: Packing, policy: Policy) -> str:
    """What a policy uses memory for, for people."""
    count, away = len(packing.forward), policy.stash_on_host
    text = "stash on the device"
    if away:
        text = f"stash of {away} of {count} packs on the host" if away < count else "stash on the host"
    for packs, what in ((policy.kept, "kept"), (policy.resident, "resident")):
        text += f", {len(packs)} pack{'s' * (len(packs) > 1)} {what}" if packs else ""
    if any(policy.graphs):
        text += f", {sum(policy.graphs)} graphs of {sum(map(bool, policy.graphs))} packs"
    text += ", prefetch" if policy.prefetch else ""
    if policy.alone:
        return text
    weights = "shares of the weights" if policy.shared else "whole weights"
    return f"{text}; {weights}, gradients reduced on the {'host' if policy.reduce_on_host else 'devices'}"


def ahead(copies_overlap: bool, request: PlanRequest) -> list[bool]:
    """Whether swaps may be issued ahead, and whether not."""
    if not request.policy.prefetch or request.is_manual:
        return [request.policy.prefetch]
    # Where nothing overlaps, a swap-in issued ahead takes memory and saves nothing.
    return [True, False] if copies_overlap else [False]


def _stashes(packing: Packing, request: PlanRequest) -> list[int]:
    """How many forward packs may have their stash on the host."""
    count = len(packing.forward)
    if request.settings.stash != "auto":
        return [count if request.settings.stash == "host" else 0]
    return sorted({round(share * count) for share in _SHARES}) if count > len(_SHARES) else list(range(count + 1))


def _given(packing: Packing, request: PlanRequest) -> tuple[int, ...]:
    """The packs that are resident because the settings say how many are."""
    residency = request.settings.residency
    return resident_packs(packing, residency) if isinstance(residency, int) else ()
