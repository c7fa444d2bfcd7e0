"""Which autograd graphs are kept from forward to backward, where memory is spare: those that save most time per byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.pack_bytes import PackBytes
from harmony_ds.scheduler.plan import Packing, Policy
from harmony_ds.scheduler.resident import may_stay


class Graphs:
    """Graphs of the plans for one request."""

    def __init__(self, costs: CostTable, request: PlanRequest) -> None:
        self._costs = costs
        self._at_once = request.micro_batches if request.policy.grouping else 1
        self._rounds = request.micro_batches // self._at_once
        self._budget = request.budget_bytes
        self.wanted = may_stay(request) and request.settings.keep_graphs and not costs.in_slices

    def fitting(
        self,
        packing: Packing,
        policy: Policy,
        peaks: Sequence[int],
        bytes_of: Sequence[PackBytes],
        before: int | None = None,
    ) -> Policy:
        """`policy` with as many more graphs as fit for certain, those of the pack `before` first.

        Args:
            peaks: its own, by stage (see `CandidateEstimator.stage_peaks`).
            bytes_of: what a micro-batch adds in each pack.

        None where crossing tensors wait on the host: a graph may hold the same tensors.
        """
        if not self.wanted or self._budget is None or policy.crossing_on_host:
            return policy
        last = len(packing.forward) + len(packing.backward) - 1
        began = {index: stage for stage, index in enumerate(packing.forward)}
        away = {*packing.forward[: policy.stash_on_host]}  # what has its graph kept does not leave
        order = [*packing.forward, *reversed(packing.backward)]
        counts = [*policy.graphs] or [0] * len(packing.backward)
        spare = [self._budget - peak for peak in peaks]
        # A copy to the host leaves the device when the next one moves, which now may be long after.
        lingering = max((bytes_of[index].stash_bytes for index in away), default=0)
        for index in sorted(self._most_worth(packing, policy), key=lambda one: one != before):
            pack, ends = bytes_of[index], last - packing.backward.index(index)
            nbytes = max(1, pack.kept_graph_bytes + (pack.stash_bytes if index in away else 0))
            here, packs = packing.packs[index].device, packing.packs
            stages = [stage for stage in range(began[index], ends + 1) if packs[order[stage]].device == here]
            left = [spare[stage] - (lingering if index in away else 0) for stage in stages]
            if not counts[index]:  # while the pack runs back, one of its graphs is part of what that takes anyway
                left[-1] += pack.kept_graph_bytes - pack.from_graph_excess_bytes
            more = min(self._at_once - counts[index] // self._rounds, min(left) // nbytes)
            if more > 0:
                counts[index] += more * self._rounds
                for stage, room in zip(stages, left, strict=True):
                    spare[stage] = room - more * nbytes
                lingering = 0 if index in away else lingering
        return replace(policy, graphs=tuple(counts) if any(counts) else ())

    def one_more(self, packing: Packing, policy: Policy) -> Iterator[Policy]:
        """Yield `policy` with a graph more in one pack, whether it fits or not."""
        if policy.crossing_on_host:
            return
        counts = [*policy.graphs] or [0] * len(packing.backward)
        for index in self._most_worth(packing, policy):
            if counts[index] < self._at_once * self._rounds:
                more = counts[index] + self._rounds
                yield replace(policy, graphs=(*counts[:index], more, *counts[index + 1 :]))

    def _most_worth(self, packing: Packing, policy: Policy) -> list[int]:
        """Packs that stay and whose graph saves time, most per byte first; of equal ones the last, whose graphs wait for
        the shortest time.
        """
        able = []
        stays = {*policy.kept, *policy.resident, *(packing.last_forward_packs if policy.pipeline > 1 else ())}
        for index in stays.intersection(packing.forward, packing.backward[:-1]):
            pack = packing.packs[index]
            nbytes = max(1, sum(self._costs.costs[p].forward.kept_graph_bytes for p in pack.positions))
            saved_ms = sum(self._costs.costs[p].saved_ms for p in pack.positions)
            if pack.needs_backward and saved_ms > 0:
                able.append((saved_ms / nbytes, index))
        return [index for _, index in sorted(able, reverse=True)]
