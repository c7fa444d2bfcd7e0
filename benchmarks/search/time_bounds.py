"""Lower bounds of the step times of plans over the same packs, for many policies at once.

Each pack is followed through the streams of two steps of one grouped device; left out is only that jobs slow each other
down.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from benchmarks.search.policies import Policies
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.lowering import STASH_PIECES
from harmony_ds.scheduler.plan import Pack, Packing
from harmony_ds.scheduler.profile import Machine

_Times = NDArray[np.float64]


class TimeBounds:
    """Times below which no step of a candidate can be."""

    def __init__(self, costs: CostTable, machine: Machine, request: PlanRequest) -> None:
        self._machine = machine
        self._micro_batches = request.micro_batches
        self._costs = costs
        self._forward = _running(cost.forward_ms for cost in costs.costs)
        self._backward = _running(cost.backward_ms for cost in costs.costs)
        self._fused = _running(cost.fused_ms for cost in costs.costs)
        self._kept = _running(cost.saved_ms for cost in costs.costs)
        self._stash = _running(float(cost.stash.new_bytes) for cost in costs.costs)

    def tighter(self, packing: Packing, policies: Policies) -> NDArray[np.float64]:
        """Return the bounds that follow each pack through the streams of two steps, in ms, as if nothing slowed."""
        walk = _Walk(self._machine, policies, packing, self._micro_batches)
        ends = []
        for _ in range(2):
            for index, backward in walk.order:
                walk.swap_in(index, backward)
                pack = packing.packs[index]
                run_ms = self._run_ms(packing, pack, backward)
                times = run_ms - walk.graphs(index) * (self._saved_ms(pack) if backward else 0.0)
                walk.run(index, backward, times, self._stash_of(pack))
            ends.append(walk.finish())
        return ends[1] - ends[0]

    def _stash_of(self, pack: Pack) -> float:
        """Return the bytes of one micro-batch."""
        return self._stash[pack.positions[-1] + 1] - self._stash[pack.positions[0]]

    def _saved_ms(self, pack: Pack) -> float:
        """By not recomputing one micro-batch."""
        return self._kept[pack.positions[-1] + 1] - self._kept[pack.positions[0]]

    def _run_ms(self, packing: Packing, pack: Pack, backward: bool) -> float:
        """All micro-batches through one pack."""
        fused = backward and pack is packing.fused
        sums = self._fused if fused else self._backward if backward else self._forward
        ms = sums[pack.positions[-1] + 1] - sums[pack.positions[0]]
        return self._micro_batches * (ms + (self._costs.tail_ms if fused else 0.0))


class _Walk:
    """When each stream is done with what was queued on it so far, in ms, of each policy."""

    def __init__(self, machine: Machine, policies: Policies, packing: Packing, micro_batches: int) -> None:
        packs, base, count = packing.packs, policies.base, len(policies)
        self._machine = machine
        self._policy = base
        self._packing = packing
        self._prefetch = policies.prefetch
        self._graphs = policies.graphs
        self._micro_batches = micro_batches
        there = [*packing.forward, packing.backward[-1]]
        back = [i for i in reversed(packing.backward[:-1]) if packs[i].needs_backward]
        self.order = [(i, False) for i in there[:-1]] + [(there[-1], True)] + [(i, True) for i in back]
        none = np.zeros(count, bool)
        self._stay = {i: policies.resident[i] if i < len(policies.resident) else none for i, _ in self.order}
        both = {*packing.forward}.intersection(back)
        self._kept = {i: policies.kept[i] if i in both else none for i, _ in self.order}
        ends = np.array([0, *(packs[i].positions[-1] + 1 for i in packing.forward)])[policies.away]
        self._away = {i: packs[i].positions[0] < ends for i, _ in self.order}
        self._any_away = bool(policies.away.any())
        owner = {name: i for i in packing.backward for name in packs[i].owned}
        self._owners = {i: {owner[n] for n in packs[i].parameters if n in owner} for i, _ in self.order}
        self._updated: dict[int, _Times] = {}
        self._computed = self._came = self._gone = self._host = np.zeros(count)
        # When the last pack's gradients were gone, and those of the one before it; when the last eviction was safe, and
        # that before the last run.
        self._freed = self._freed_earlier = self._evicted = self._evicted_earlier = np.zeros(count)

    def graphs(self, index: int) -> _Times:
        """Return of how many micro-batches they are kept."""
        return self._graphs[index].astype(float) if index < len(self._graphs) else np.zeros(len(self._prefetch))

    def swap_in(self, index: int, backward: bool) -> None:
        machine = self._machine
        moved = ~(self._stay[index] | self._kept[index]) if backward else ~self._stay[index]
        ms = machine.swap_in_ms(self._packing.packs[index].swap_in_bytes(False))
        since = self._came
        for owner in self._owners[index]:
            if owner in self._updated:
                since = np.maximum(since, self._updated[owner])
        safe = np.where(self._prefetch, self._evicted_earlier, self._evicted)
        self._came = np.where(moved, np.maximum(since, safe) + ms, self._came)
        self._computed = np.where(moved, np.maximum(self._computed, self._came), self._computed)

    def run(self, index: int, backward: bool, run_ms: _Times, stash_bytes: float) -> None:
        """All micro-batches through a pack, each `run_ms / micro_batches`, and their stash beside them."""
        begin = np.maximum(self._computed, self._freed_earlier)
        self._computed = begin + run_ms
        if self._any_away and (backward or index in self._packing.forward):
            self._move_stash(index, begin, run_ms / self._micro_batches, backward, stash_bytes)
        self._evicted_earlier, self._freed_earlier = self._evicted, self._freed
        stays = self._stay[index] if backward else self._stay[index] | self._kept[index]
        self._evicted = np.where(stays, self._evicted, self._computed)
        pack = self._packing.packs[index]
        if backward and pack.needs_backward:
            self._swap_out(pack)

    def _move_stash(self, index: int, begin: _Times, one_ms: _Times, backward: bool, stash_bytes: float) -> None:
        machine, count = self._machine, self._micro_batches - self.graphs(index)
        away = self._away[index] & (count > 0)
        one_copy = machine.swap_in_ms(stash_bytes) if backward else machine.swap_out_ms(stash_bytes)
        if backward:
            # It comes after what has left so far. The last micro-batch computes when its stash is back.
            self._came = np.where(away, np.maximum(self._came, self._gone) + count * one_copy, self._came)
            self._computed = np.where(away, np.maximum(self._computed, self._came + one_ms), self._computed)
        else:
            # The first stash leaves when its micro-batch has computed, and each computes when the last but one has left.
            left = count - 2 * -(-count // STASH_PIECES)
            throttled = np.maximum(self._gone, begin + one_ms) + left * one_copy + one_ms
            self._computed = np.where(away & (left > 0), np.maximum(self._computed, throttled), self._computed)
            self._gone = np.where(away, np.maximum(self._gone, begin + one_ms) + count * one_copy, self._gone)

    def _swap_out(self, pack: Pack) -> None:
        machine, stay = self._machine, self._stay[pack.index]
        gone = np.maximum(self._gone, self._computed) + machine.swap_out_ms(pack.swap_out_bytes())
        host_ms = 0.0
        if self._policy.deferred_update:
            host_ms = machine.host_norm_ms(pack.update_elements, self._policy.leave_whole)
        self._gone = np.where(stay, self._gone, gone)
        self._freed = np.where(stay, self._freed, gone)
        self._host = np.where(stay, self._host, np.maximum(self._host, gone) + host_ms)
        if not self._policy.deferred_update:
            self._update(pack)

    def _update(self, pack: Pack) -> None:
        machine, stay = self._machine, self._stay[pack.index]
        device_ms = pack.update_elements / machine.device_update_elements_per_ms
        self._host = self._host + ~stay * machine.host_update_ms(pack.update_elements)
        self._computed = self._computed + stay * device_ms
        self._updated[pack.index] = np.where(stay, 0.0, self._host)

    def finish(self) -> _Times:
        """Return the end of a step; updates that come last begin."""
        if self._policy.deferred_update:
            stay = np.logical_or.reduce(list(self._stay.values()))  # what stays is updated after all norms
            self._computed = np.where(stay, np.maximum(self._computed, self._host), self._computed)
            for index in self._packing.backward:
                if self._packing.packs[index].needs_backward:
                    self._update(self._packing.packs[index])
        return np.maximum(self._computed, self._gone)


def _running(values: Iterable[float]) -> list[float]:
    """Return running sums: the sum of values[a:b] is the difference of two of them."""
    return list(accumulate(values, initial=0.0))
