"""What the search looks at: ways to cut both passes into packs, and ways to use spare memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from harmony_ds.decomposer.graph import LayerGraph
from harmony_ds.profiler.costs import CostTable
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.packing import ElementBytes, Packer
from harmony_ds.scheduler.partition import BestCuts, Bounds, Combine, sum_of, uniform_bounds
from harmony_ds.scheduler.plan import Packing, Policy
from harmony_ds.scheduler.resident import resident_packs
from harmony_ds.scheduler.time_bounds import TimeBounds

_SHARES = (0.25, 0.5, 0.75, 1.0)
_FORWARD_MULTIPLES = (2, 4)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Packs and a policy, not yet composed.

    Attributes:
        bound_ms: no step with it is shorter.
        swap_bytes: weights and gradients that it moves.
        reason: how it was cut, and what its spare memory is used for.
    """

    packing: Packing
    policy: Policy
    bound_ms: float
    swap_bytes: int
    reason: str


def candidates(
    graph: LayerGraph, costs: CostTable, element: ElementBytes, request: PlanRequest, bounds: TimeBounds
) -> Iterator[Candidate]:
    """Everything to be compared; the same whatever the budget."""
    for packing, cut in packings(graph, costs, element, request):
        for policy, use in policies(packing, bounds.copies_overlap, request):
            bound_ms, swap_bytes = bounds.of(packing, policy)
            yield Candidate(packing, policy, bound_ms, swap_bytes, f"{cut}; {use}")


# ---- where to cut


def packings(
    graph: LayerGraph, costs: CostTable, element: ElementBytes, request: PlanRequest
) -> Iterator[tuple[Packing, str]]:
    """Every way to cut both passes, each once, and its name."""
    packer = Packer(graph, costs, element, request.policy.devices)
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
        cuts = BestCuts(count, sum_of(values), Combine.MAX)
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


def policies(packing: Packing, copies_overlap: bool, request: PlanRequest) -> Iterator[tuple[Policy, str]]:
    """Every policy for these packs, each once, and its name."""
    seen: set[Policy] = set()
    base = request.policy
    ahead: tuple[bool, ...] = (base.prefetch,)
    if base.prefetch and not request.is_manual:
        # Where nothing overlaps, a swap-in issued ahead takes memory and saves nothing.
        ahead = (True, False) if copies_overlap else (False,)
    for stash_on_host, stash_name in _stashes(packing, request):
        for kept, resident, name in _stays(packing, request):
            for prefetch in ahead:
                policy = replace(base, prefetch=prefetch, stash_on_host=stash_on_host, kept=kept, resident=resident)
                if policy not in seen:
                    seen.add(policy)
                    yield policy, f"{stash_name}{name}{', prefetch' if prefetch else ''}"


def _stashes(packing: Packing, request: PlanRequest) -> list[tuple[int, str]]:
    count = len(packing.forward)
    if request.settings.stash == "device" or not count:
        return [(0, "stash on the device")]
    if request.settings.stash == "host":
        return [(count, "stash on the host")]
    counts = sorted({round(share * count) for share in (0.0, *_SHARES)})
    return [(n, f"stash of {n} of {count} packs on the host" if n else "stash on the device") for n in counts]


def _stays(packing: Packing, request: PlanRequest) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], str]]:
    """Kept packs, resident packs and a name: none, kept ones, resident ones, both."""
    if isinstance(request.settings.residency, int):
        chosen = resident_packs(packing, request.settings.residency)
        yield (), chosen, f", {len(chosen)} packs resident" if chosen else ""
        return
    yield (), (), ""
    if request.settings.residency == "off" or request.budget_bytes is None:
        return
    both = [i for i in reversed(packing.forward) if i in packing.backward and packing.packs[i].needs_backward]
    for kept_share in (0.0, *_SHARES):
        kept = both[: round(kept_share * len(both))]
        if kept:
            yield tuple(sorted(kept)), (), f", {len(kept)} packs kept"
        if kept_share not in (0.0, 1.0):
            continue
        for resident, where in _residents(packing, ("last", "first") if request.policy.grouping else ("last",)):
            rest = tuple(sorted(i for i in kept if i not in resident))
            yield rest, resident, f", the {where} resident" + (f", {len(rest)} kept" if rest else "")


def _residents(packing: Packing, ends: tuple[str, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
    """Resident packs and where they are: the last ones, which all micro-batches pass twice in a row, or the first ones,
    for whose update the next step waits.
    """
    for share in _SHARES:
        count = round(share * len(packing.backward))
        for where in ends if count < len(packing.backward) else ends[:1]:
            resident = resident_packs(packing, count, first=where == "first")
            if resident:
                yield resident, f"{where} pack" if len(resident) == 1 else f"{where} {len(resident)} packs"
