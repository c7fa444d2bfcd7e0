"""What the search looks at: ways to cut both passes, ways to use spare memory, and a lower bound of the time of each.

The bound of a candidate is the largest of what each stream has to do in a step, and of the one chain that nothing can
shorten: the first pack's weights in, all compute, the first pack's gradients out, its update.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from harmony_ds.decomposer.graph import LayerGraph
from harmony_ds.profiler.costs import CostTable
from harmony_ds.profiler.profile import Machine
from harmony_ds.scheduler.choose import Request
from harmony_ds.scheduler.packing import ElementBytes, Packer, uniform_bounds
from harmony_ds.scheduler.partition import BestCuts, Bounds, Combine, sum_of
from harmony_ds.scheduler.plan import Pack, Packing, Policy

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
    graph: LayerGraph, costs: CostTable, element: ElementBytes, request: Request, bounds: TimeBounds
) -> Iterator[Candidate]:
    """Everything to be compared; the same whatever the budget."""
    for packing, cut in packings(graph, costs, element, request):
        for policy, use in policies(packing, bounds.copies_overlap, request):
            bound_ms, swap_bytes = bounds.of(packing, policy)
            yield Candidate(packing, policy, bound_ms, swap_bytes, f"{cut}; {use}")


# ---- where to cut


def packings(
    graph: LayerGraph, costs: CostTable, element: ElementBytes, request: Request
) -> Iterator[tuple[Packing, str]]:
    """Every way to cut both passes, each once, and its name."""
    packer = Packer(graph, costs, element)
    seen: set[tuple[Bounds, Bounds | None]] = set()
    for backward, name in _cuts(graph, costs, packer, request):
        whole = packer.packing(backward)
        if (backward, None) not in seen:
            seen.add((backward, None))
            yield whole, f"{len(whole.backward)} packs {name}"
        if request.pack_layers is not None:
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


def _cuts(graph: LayerGraph, costs: CostTable, packer: Packer, request: Request) -> Iterator[tuple[Bounds, str]]:
    count = len(graph.calls)
    if request.pack_layers is not None:
        yield uniform_bounds(count, request.pack_layers), f"of {request.pack_layers} calls, as configured"
        return
    for size in range(count, 0, -1):
        yield uniform_bounds(count, size), f"of {size} calls"
    singles = packer.packs(tuple(range(count + 1)))
    times = [cost.forward_ms + cost.backward_ms for cost in costs.costs]
    weights = [float(pack.weight_bytes + pack.gradient_bytes) for pack in singles]
    for values, name in ((times, "of balanced time"), (weights, "of balanced memory")):
        cuts = BestCuts(count, sum_of(values), Combine.MAX, count)
        for parts in _ladder(count):
            bounds = cuts.bounds(parts)
            if bounds is not None:
                yield bounds, name


def _ladder(count: int) -> list[int]:
    """1, 2, 3, ... with growing steps, up to `count`."""
    rungs, rung = [], 1
    while rung <= count:
        rungs.append(rung)
        rung += max(1, rung // 8)
    return rungs


# ---- what to do with spare memory


def policies(packing: Packing, copies_overlap: bool, request: Request) -> Iterator[tuple[Policy, str]]:
    """Every policy for these packs, each once, and its name."""
    seen: set[Policy] = set()
    base = request.policy
    ahead = (True, False) if base.prefetch and copies_overlap else (base.prefetch and request.is_manual,)
    for stash_on_host, stash_name in _stashes(packing, request):
        for kept, resident, name in _stays(packing, request):
            for prefetch in ahead:
                policy = replace(base, prefetch=prefetch, stash_on_host=stash_on_host, kept=kept, resident=resident)
                if policy not in seen:
                    seen.add(policy)
                    yield policy, f"{stash_name}{name}{', prefetch' if prefetch else ''}"


def _stashes(packing: Packing, request: Request) -> list[tuple[int, str]]:
    count = len(packing.forward)
    if request.stash == "device" or not count:
        return [(0, "stash on the device")]
    if request.stash == "host":
        return [(count, "stash on the host")]
    counts = sorted({round(share * count) for share in (0.0, *_SHARES)})
    return [(n, f"stash of {n} of {count} packs on the host" if n else "stash on the device") for n in counts]


def _stays(packing: Packing, request: Request) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], str]]:
    """Kept packs, resident packs and a name: none, kept ones, resident ones, both."""
    able = residents(packing)
    if isinstance(request.residency, int):
        chosen = tuple(sorted(able[: request.residency]))
        yield (), chosen, f", {len(chosen)} packs resident" if chosen else ""
        return
    yield (), (), ""
    if request.residency == "off" or request.budget_bytes is None:
        return
    both = [i for i in reversed(packing.forward) if i in packing.backward and packing.packs[i].needs_backward]
    for kept_share in (0.0, *_SHARES):
        kept = both[: round(kept_share * len(both))]
        if kept:
            yield tuple(sorted(kept)), (), f", {len(kept)} packs kept"
        if kept_share not in (0.0, 1.0) or request.resident_state_bytes is None:
            continue
        for share in _SHARES:
            resident = tuple(sorted(able[: round(share * len(able))]))
            rest = tuple(sorted(i for i in kept if i not in resident))
            if resident:
                yield rest, resident, f", {len(resident)} packs resident" + (f", {len(rest)} kept" if rest else "")


def residents(packing: Packing) -> list[int]:
    """Packs that may stay on the device from step to step, the last ones first.

    Both passes must run them as they are, and no other pack may have any of their parameters: two copies of a weight
    would go ways of their own.
    """
    last = packing.backward[-1]
    holders: dict[str, int] = {}
    for pack in packing.packs:
        for name in pack.parameters:
            holders[name] = holders.get(name, 0) + 1
    return [
        index
        for index in reversed(packing.backward)
        if (index in packing.forward or index == last) and all(holders[n] == 1 for n in packing.packs[index].parameters)
    ]


# ---- how fast it can be at best


class TimeBounds:
    """Times below which no step of a candidate can be."""

    def __init__(self, costs: CostTable, machine: Machine, request: Request) -> None:
        self.copies_overlap = machine.copies_overlap
        self._machine = machine
        self._groups = request.micro_batches
        self._deferred = request.policy.deferred_update
        self._set = request.resident_set
        self._costs = costs
        self._forward = _running([cost.forward_ms for cost in costs.costs])
        self._backward = _running([cost.backward_ms for cost in costs.costs])
        self._fused = _running([cost.fused_ms for cost in costs.costs])
        self._stash = _running([float(cost.stash_bytes) for cost in costs.costs])

    def of(self, packing: Packing, policy: Policy) -> tuple[float, int]:
        """The bound in ms, and the bytes of weights and gradients that are swapped."""
        machine, packs = self._machine, packing.packs
        stay = set(policy.resident)
        backward = [packs[i] for i in packing.backward if packs[i].needs_backward or i == packing.backward[-1]]
        there = [packs[i] for i in (*packing.forward, packing.backward[-1]) if i not in stay]
        back = [p for p in backward[:-1] if p.index not in stay and p.index not in policy.kept]
        out = [p for p in backward if p.needs_backward and p.index not in stay]
        in_bytes = self._set.weight_bytes + sum(p.weight_bytes for p in there) + sum(p.weight_bytes for p in back)
        out_bytes = self._set.gradient_bytes + sum(p.gradient_bytes for p in out)
        stash = self._groups * self._stash_bytes(packing, policy)
        swap_in = (len(there) + len(back)) * machine.swap_ms + (in_bytes + stash) / machine.swap_in_bytes_per_ms
        swap_out = len(out) * machine.swap_ms + (out_bytes + stash) / machine.swap_out_bytes_per_ms
        compute = self._compute_ms(packing, backward)
        on_device = sum(packs[i].update_elements for i in stay) / machine.device_update_elements_per_ms
        update = sum(self._update_ms(p) for p in out) + self._set.update_elements / machine.update_elements_per_ms
        swap_bytes = in_bytes + out_bytes
        # What runs first cannot hide its own swap-in, what runs last not its own swap-out; and if both are one pack, the
        # next step's first swap-in waits for the update as well.
        first, last = packs[(*packing.forward, packing.backward[-1])[0]], backward[0]
        begin = machine.swap_ms + first.weight_bytes / machine.swap_in_bytes_per_ms if first.index not in stay else 0.0
        end = machine.swap_ms + last.gradient_bytes / machine.swap_out_bytes_per_ms if last in out else 0.0
        turn = self._update_ms(last) if last in out and last is first else 0.0
        if not machine.copies_overlap:
            return max(compute + swap_in + swap_out + max(turn, on_device), update), swap_bytes
        return max(begin + compute + end + turn, compute + on_device, swap_in, swap_out, update), swap_bytes

    def tighter(self, packing: Packing, policy: Policy) -> float:
        """The bound that follows each pack through the streams, in ms; where copies overlap.

        A pack computes when the one before it has, when its weights are there (which begin to come in when the last
        but one has computed, or, not issued ahead, the last), and when the gradients of the last but one are gone.
        """
        machine, stay = self._machine, set(policy.resident)
        there = [*packing.forward, packing.backward[-1]]
        back = [i for i in reversed(packing.backward[:-1]) if packing.packs[i].needs_backward]
        done, earlier, came, gone, gone_earlier = 0.0, 0.0, 0.0, 0.0, 0.0
        for place, index in enumerate((*there, *back)):
            pack = packing.packs[index]
            backward = place >= len(there) - 1
            begin = max(done, gone_earlier)
            swapped = index not in stay and not (place >= len(there) and index in policy.kept)
            if swapped:
                issued = earlier if policy.prefetch else done
                came = max(came, issued) + machine.swap_ms + pack.weight_bytes / machine.swap_in_bytes_per_ms
                begin = max(begin, came)
            earlier, done = done, begin + self._run_ms(packing, pack, backward)
            gone_earlier = gone
            if backward and pack.needs_backward and index not in stay:
                out = machine.swap_ms + pack.gradient_bytes / machine.swap_out_bytes_per_ms
                gone = max(gone, done) + out
        first, last = there[0], (back or there)[-1]
        turn = self._update_ms(packing.packs[last]) if first == last and last not in stay else 0.0
        return max(done, gone) + turn

    def _run_ms(self, packing: Packing, pack: Pack, backward: bool) -> float:
        """All micro-batches through one pack."""
        first, behind = pack.positions[0], pack.positions[-1] + 1
        if pack is packing.fused:
            ms = self._fused[behind] - self._fused[first] + self._costs.tail_ms
        elif backward:
            ms = self._backward[behind] - self._backward[first]
        else:
            ms = self._forward[behind] - self._forward[first]
        head = self._costs.head_ms if first == 0 and (not backward or not packing.forward) else 0.0
        return self._groups * (ms + head)

    def _compute_ms(self, packing: Packing, backward: list[Pack]) -> float:
        machine, groups = self._machine, self._groups
        fused = packing.fused.positions
        begin = fused[0]
        runs = len(packing.forward) + len(backward)
        ms = self._forward[begin] + self._fused[-1] - self._fused[begin] + self._costs.head_ms + self._costs.tail_ms
        ms += sum(self._backward[p.positions[-1] + 1] - self._backward[p.positions[0]] for p in backward[:-1])
        overhead = 0.0 if machine.copies_overlap else machine.task_ms * runs
        return groups * (ms + overhead)

    def _stash_bytes(self, packing: Packing, policy: Policy) -> int:
        if not policy.stash_on_host or not packing.forward:
            return 0
        away = packing.forward[: policy.stash_on_host]
        return int(self._stash[packing.packs[away[-1]].positions[-1] + 1])

    def _update_ms(self, pack: Pack) -> float:
        machine = self._machine
        norm = pack.update_elements / machine.norm_elements_per_ms if self._deferred else 0.0
        return norm + machine.update_ms + pack.update_elements / machine.update_elements_per_ms


def _running(values: list[float]) -> list[float]:
    """Running sums: the sum of values[a:b] is the difference of two of them."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums
