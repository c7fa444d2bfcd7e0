"""What the search looks at: ways to cut both passes into packs, and ways to use spare memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from harmony_ds.decomposer.graph import LayerGraph
from harmony_ds.profiler.costs import CostTable
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.packing import Packer
from harmony_ds.scheduler.partition import BestCuts, Bounds, Combine, sums_of, uniform_bounds
from harmony_ds.scheduler.plan import Packing, Policy
from harmony_ds.scheduler.policies import Policies
from harmony_ds.scheduler.resident import closed, holders, resident_packs

_SWAPPED, _KEPT, _RESIDENT = range(3)
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_SINGLE = 32
_MOST = 6_000
"""So many policies of the same packs are all looked at."""
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


def policies(packing: Packing, copies_overlap: bool, request: PlanRequest) -> Policies:
    """The policies for these packs: all there are where they are few, else what is likely to be near the best."""
    stashes, ahead = _stashes(packing, request), _ahead(copies_overlap, request)
    states = _states(packing, request, _MOST // (len(stashes) * len(ahead)))
    which, away, early = (grid.ravel() for grid in np.meshgrid(np.arange(len(states)), stashes, ahead, indexing="ij"))
    chosen = states[which].T
    return Policies(request.policy, chosen == _RESIDENT, chosen == _KEPT, away, early)


def around(packing: Packing, policy: Policy, copies_overlap: bool, request: PlanRequest) -> Policies:
    """The policies that differ from one in a pack or two, in the stash of one pack, or in whether swaps are ahead."""
    row = np.zeros(len(packing.backward), int)
    row[list(policy.resident)], row[list(policy.kept)] = _RESIDENT, _KEPT
    changed = [(row, policy.stash_on_host, policy.prefetch)]
    choices = _choices(packing, request) if may_stay(request) else []
    single = [(place, state) for place, of_pack in enumerate(choices) for state in of_pack if state != row[place]]
    several = [[one] for one in single] + (list(combinations(single, 2)) if len(single) <= _SINGLE else [])
    for changes in several:
        states = row.copy()
        for place, state in changes:
            states[place] = state
        changed.append((states, policy.stash_on_host, policy.prefetch))
    if request.settings.stash == "auto":
        least, most = max(0, policy.stash_on_host - 1), min(len(packing.forward), policy.stash_on_host + 1)
        changed += [(row, away, policy.prefetch) for away in {least, most} - {policy.stash_on_host}]
    changed += [(row, policy.stash_on_host, early) for early in _ahead(copies_overlap, request)]
    states = np.array([one for one, _, _ in changed])
    chosen = _with_their_own(packing, states).T
    away, early = np.array([n for _, n, _ in changed]), np.array([early for _, _, early in changed])
    return Policies(request.policy, chosen == _RESIDENT, chosen == _KEPT, away, early)


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


def may_stay(request: PlanRequest) -> bool:
    """Whether the search decides which packs are kept, and perhaps which are resident."""
    return request.settings.residency in ("auto", "kept") and request.budget_bytes is not None


def _ahead(copies_overlap: bool, request: PlanRequest) -> list[bool]:
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


def _states(packing: Packing, request: PlanRequest, most: int) -> NDArray[np.int_]:
    """What becomes of each pack of the backward pass, a row for each way: swapped, kept, or resident."""
    count = len(packing.backward)
    if isinstance(request.settings.residency, int):
        chosen = resident_packs(packing, request.settings.residency)
        return np.array([[_RESIDENT if index in chosen else _SWAPPED for index in packing.backward]])
    if not may_stay(request):
        return np.zeros((1, count), int)
    choices = _choices(packing, request)
    if request.policy.grouping and math.prod(map(len, choices)) <= most:
        rows = np.array(list(product(*choices)))
        possible: NDArray[np.int_] = rows[(rows == _with_their_own(packing, rows)).all(axis=1)]
        return possible
    return np.unique(_with_their_own(packing, np.array(list(_likely(choices, request.policy.grouping)))), axis=0)


def _choices(packing: Packing, request: PlanRequest) -> list[list[int]]:
    """What can become of each pack of the backward pass."""
    both = {i for i in packing.forward if i in packing.backward and packing.packs[i].needs_backward}
    able = closed(packing, packing.backward) if request.settings.residency == "auto" else ()
    return [[_SWAPPED] + [_KEPT] * (i in both) + [_RESIDENT] * (i in able) for i in packing.backward]


def _with_their_own(packing: Packing, rows: NDArray[np.int_]) -> NDArray[np.int_]:
    """The same, but that a pack is swapped if one that it shares a parameter with is not resident as it is."""
    having = holders(packing)
    tied = [
        (index, other)
        for index in packing.backward
        for other in having[index]
        if index != other < len(packing.backward)
    ]
    rows = rows.copy()
    for index, other in tied * len(packing.backward) if tied else ():
        alone = (rows[:, index] == _RESIDENT) & (rows[:, other] != _RESIDENT)
        rows[alone, index] = _SWAPPED
    return rows


def _likely(choices: list[list[int]], grouping: bool) -> Iterator[list[int]]:
    """The first packs resident, for whose update the next step waits, or the last ones; of the others, the last kept."""
    count = len(choices)
    some = [0, *(2**power for power in range(count.bit_length())), count]
    for number in some:
        for first in (True, False) if grouping else (False,):
            there = range(number) if first else range(count - number, count)
            states = [_RESIDENT if i in there and _RESIDENT in choices[i] else _SWAPPED for i in range(count)]
            rest = [i for i in range(count) if states[i] == _SWAPPED and _KEPT in choices[i]]
            for kept_share in (0.0, 0.5, 1.0):
                kept = {*rest[len(rest) - round(kept_share * len(rest)) :]}
                yield [_KEPT if i in kept else state for i, state in enumerate(states)]
