"""Which autograd graphs are kept from forward to backward, where memory is spare: those that save most time per byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from harmony_ds.profiler.costs import CostTable
from harmony_ds.scheduler.candidates import may_stay
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.peaks import Peaks
from harmony_ds.scheduler.plan import Packing, Policy
from harmony_ds.scheduler.policies import Policies


class Graphs:
    """Graphs of the plans for one request."""

    def __init__(self, costs: CostTable, request: PlanRequest, peaks: Peaks) -> None:
        self._costs = costs
        self._peaks = peaks
        self._at_once = request.micro_batches if request.policy.grouping else 1
        self._rounds = request.micro_batches // self._at_once
        self._wanted = may_stay(request) and request.settings.keep_graphs and not costs.in_slices

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

    def ways(self, packing: Packing, policy: Policy, peaks: Sequence[int], budget_bytes: float) -> Iterator[Policy]:
        """`fitting` with any pack's graphs before all others: what saves most time per byte may save none of the step's."""
        first = self.fitting(packing, policy, peaks, budget_bytes)
        yield first
        seen = {first}
        for index, _ in self._most_worth(packing) if first.graphs else ():
            way = self.fitting(packing, policy, peaks, budget_bytes, before=index)
            if way not in seen:
                seen.add(way)
                yield way

    def fitting(
        self, packing: Packing, policy: Policy, peaks: Sequence[int], budget_bytes: float, before: int | None = None
    ) -> Policy:
        """`policy` with as many more graphs as fit for certain, those of the pack `before` first.

        Args:
            peaks: its own, by stage (see `Peaks.stages`).
        """
        if not self._wanted:
            return policy
        last = len(packing.forward) + len(packing.backward) - 1
        began = {index: stage for stage, index in enumerate(packing.forward)}
        away = {*packing.forward[: policy.stash_on_host]}  # what has its graph kept does not leave
        stays = {*policy.kept, *policy.resident}
        bytes_of = self._peaks.pack_bytes(packing, policy)
        counts = [*policy.graphs] or [0] * len(packing.backward)
        spare = budget_bytes - np.array(peaks, float)
        # A copy to the host leaves the device when the next one moves, which now may be long after.
        lingering = max((bytes_of[index].stash_bytes for index in away), default=0)
        for index, _ in sorted(self._most_worth(packing), key=lambda one: one[0] != before):
            if index not in stays:
                continue
            pack = bytes_of[index]
            nbytes = max(1, pack.kept_bytes + (pack.stash_bytes if index in away else 0))
            while_there = slice(began[index], last - packing.backward.index(index) + 1)
            left = spare[while_there] - (lingering if index in away else 0)
            if not counts[index]:  # while the pack runs back, one of its graphs is part of what that takes anyway
                left[-1] += pack.kept_bytes - pack.from_graph_excess_bytes
            more = min(self._at_once - counts[index] // self._rounds, int(left.min() // nbytes))
            if more > 0:
                counts[index] += more * self._rounds
                spare[while_there] = left - more * nbytes
                lingering = 0 if index in away else lingering
        return replace(policy, graphs=tuple(counts) if any(counts) else ())

    def _most_worth(self, packing: Packing) -> list[tuple[int, int]]:
        """Packs whose graph saves time, most per byte first (of equal ones the last, whose graphs wait for the shortest
        time), and the bytes of one micro-batch's.
        """
        able = []
        for index in {*packing.forward}.intersection(packing.backward[:-1]):
            pack = packing.packs[index]
            nbytes = max(1, sum(self._costs.costs[p].kept_bytes for p in pack.positions))
            saved_ms = sum(self._costs.costs[p].saved_ms for p in pack.positions)
            if pack.needs_backward and saved_ms > 0:
                able.append((saved_ms / nbytes, index, nbytes))
        return [(index, nbytes) for _, index, nbytes in sorted(able, reverse=True)]
