"""Which autograd graphs are kept from forward to backward, where memory is spare: those that save most time per byte."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from harmony_ds.profiler.costs import CostTable
from harmony_ds.scheduler.candidates import may_stay
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.plan import Packing, Policy
from harmony_ds.scheduler.policies import Policies


class Graphs:
    """Graphs of the plans for one request."""

    def __init__(self, costs: CostTable, request: PlanRequest) -> None:
        self._costs = costs
        self._at_once = request.micro_batches if request.policy.grouping else 1
        self._rounds = request.micro_batches // self._at_once
        self._wanted = may_stay(request) and request.settings.keep_graphs and not costs.in_slices

    def saved_ms(self, packing: Packing, index: int) -> float:
        """What a micro-batch takes less through a pack's backward pass."""
        costs = [self._costs.costs[p] for p in packing.packs[index].positions]
        return sum(cost.backward_ms - cost.propagate_ms for cost in costs)

    def filling(self, packing: Packing, policies: Policies, spare_bytes: NDArray[np.float64]) -> Policies:
        """`policies` with as many graphs as so many bytes hold, of packs that stay from forward to backward."""
        if not self._wanted:
            return policies
        counts = np.zeros(policies.resident.shape, int)
        spare = np.maximum(0.0, spare_bytes)
        for index, nbytes in self._most_worth(packing):
            stays = policies.resident[index] | policies.kept[index]
            there = stays * np.minimum(self._at_once, spare // nbytes)
            counts[index] = there * self._rounds
            spare = spare - there * nbytes
        return replace(policies, graphs=counts)

    def within(self, packing: Packing, policy: Policy, spare_bytes: float) -> Policy:
        """`policy` with no more graphs than so many bytes hold for certain: as if all were there when most else is."""
        if not policy.graphs:
            return policy
        away = {*packing.forward[: policy.stash_on_host]}  # what has its graph kept does not leave
        stash = sum(
            count // self._rounds * self._costs.costs[p].stashed_bytes
            for index, count in enumerate(policy.graphs)
            if index in away
            for p in packing.packs[index].positions
        )
        kept = sum(policy.graphs[index] // self._rounds * nbytes for index, nbytes in self._most_worth(packing))
        return self.less(packing, policy, stash + kept - spare_bytes)

    def less(self, packing: Packing, policy: Policy, nbytes: float) -> Policy:
        """`policy` without graphs of so many bytes, those that save least; without any if it has no more."""
        counts = [*policy.graphs]
        for index, of_one in reversed(self._most_worth(packing)):
            gone = min(counts[index] // self._rounds, -int(-nbytes // of_one)) if nbytes > 0 else 0
            counts[index] -= gone * self._rounds
            nbytes -= gone * of_one
        return replace(policy, graphs=tuple(counts) if any(counts) else ())

    def _most_worth(self, packing: Packing) -> list[tuple[int, int]]:
        """Packs whose graph saves time, most per byte first (of equal ones the last, whose graphs wait for the shortest
        time), and the bytes of one micro-batch's.
        """
        able = []
        for index in {*packing.forward}.intersection(packing.backward[:-1]):
            pack = packing.packs[index]
            nbytes = max(1, sum(self._costs.costs[p].kept_bytes for p in pack.positions))
            saved_ms = self.saved_ms(packing, index)
            if pack.needs_backward and saved_ms > 0:
                able.append((saved_ms / nbytes, index, nbytes))
        return [(index, nbytes) for _, index, nbytes in sorted(able, reverse=True)]
