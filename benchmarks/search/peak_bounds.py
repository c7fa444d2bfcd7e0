"""Lower bounds of the peak bytes of plans over the same packs, for many policies at once."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from benchmarks.search.policies import Policies
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.plan import Packing


class PeakBounds:
    """Bounds of peaks for one request."""

    def __init__(self, costs: CostTable, request: PlanRequest) -> None:
        self._costs = costs
        self._request = request
        self._stash = np.array([*accumulate((cost.stash.new_bytes for cost in costs.costs), initial=0)], float)

    def at_least(self, packing: Packing, policies: Policies) -> NDArray[np.float64]:
        """Bytes below which the peaks cannot be, without graphs: weights, gradients, stash, and what waits for its turn."""
        running = [self._forward_at_least(packing, policies), *self._backward_at_least(packing, policies)]
        most: NDArray[np.float64] = np.max(running, axis=0) + self._stays(packing, policies)
        return most

    def spare(self, packing: Packing, policies: Policies, budget_bytes: float) -> NDArray[np.float64]:
        """Bytes that there are at most for graphs, which are all there when the fused pack runs back."""
        return budget_bytes - self._backward_at_least(packing, policies)[1] - self._stays(packing, policies)

    def _backward_at_least(
        self, packing: Packing, policies: Policies
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """While each pack runs back, and while the fused one does."""
        packs = [packing.packs[index] for index in packing.backward]
        swapped = ~policies.resident
        wanted = self._request.micro_batches
        weights = np.array([pack.weight_bytes for pack in packs])[:, None] * swapped
        # The weights of the pack that runs back next are on their way while one runs.
        ahead = weights * ~policies.kept * np.array([pack.needs_backward for pack in packs])[:, None]
        busy = np.array([pack.gradient_bytes + self._working(pack.positions) for pack in packs])[:, None] + weights
        busy[1:] += ahead[:-1] * policies.prefetch
        # While the second micro-batch runs, all after it wait with what the pack before has left.
        left = [self._costs.costs[pack.positions[0]].backward.input_gradient_bytes for pack in packs]
        behind = [after if pack.needs_backward else 0 for pack, after in zip(packs, left[1:], strict=False)]
        busy[:-1] += max(0, wanted - 2) * np.array(behind, int)[:, None]
        fused, begin = packing.fused, packing.fused.positions[0]
        kept = np.array([pack.weight_bytes for pack in packs]) @ policies.kept
        full = kept + weights[-1] + self._stash_before([begin], packing, policies)[0] + self._working(fused.positions)
        # While the last one runs, the others have left gradients; while the first does, they wait with its inputs.
        last = (left[-1] if any(cost.needs_backward for cost in self._costs.costs[:begin]) else 0) * (wanted - 1)
        inputs = (wanted - 1) * self._costs.costs[begin].waiting.alive_bytes if begin else 0
        full = full + max(last + fused.gradient_bytes, inputs)
        return busy.max(axis=0), full

    def _forward_at_least(self, packing: Packing, policies: Policies) -> NDArray[np.float64]:
        """While each pack runs forward: the others wait with its inputs."""
        wanted, most = self._request.micro_batches, np.zeros(len(policies))
        packs = [packing.packs[index] for index in packing.forward]
        stash = self._stash_before([pack.positions[0] for pack in packs], packing, policies)
        for stage, (index, pack) in enumerate(zip(packing.forward, packs, strict=True)):
            cost = self._costs.costs[pack.positions[0]]
            waiting = (wanted if stage else 1) * cost.waiting.alive_bytes
            swapped = ~policies.resident[index] if index < len(packing.backward) else 1
            most = np.maximum(most, pack.weight_bytes * swapped + waiting + cost.forward.peak_bytes + stash[stage])
        return most

    def _stash_before(self, positions: list[int], packing: Packing, policies: Policies) -> NDArray[np.float64]:
        """Return what all micro-batches of the calls before each position hold, by position and policy."""
        ends = np.array([0, *(packing.packs[i].positions[-1] + 1 for i in packing.forward)])[policies.away]
        before = self._stash[positions][:, None] - self._stash[ends]
        there: NDArray[np.float64] = self._request.micro_batches * np.maximum(0.0, before)
        return there

    def _stays(self, packing: Packing, policies: Policies) -> NDArray[np.float64]:
        """Return the bytes that are there all the time."""
        resident = np.array([packing.packs[index].resident_bytes for index in packing.backward]) @ policies.resident
        stays: NDArray[np.float64] = self._request.resident_bytes + resident
        return stays

    def _working(self, positions: tuple[int, ...]) -> int:
        return max(self._costs.costs[p].backward.peak_bytes for p in (positions[0], positions[-1]))
