"""The device peak of a plan without composing all of it.

What is alive while a task runs grows by the same bytes with every further micro-batch, and within a pack the first
two or the last two micro-batches have the most alive (every count changes evenly from one to the next). So two short
groups are walked, and what each of those tasks holds is continued to the group that is wanted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from harmony_ds.profiler.costs import CostTable
from harmony_ds.scheduler.choose import PlanRequest, resident_bytes
from harmony_ds.scheduler.compose import Group, compose_step, stash_moves
from harmony_ds.scheduler.memory import MemoryWalks
from harmony_ds.scheduler.pack_bytes import PackBytes
from harmony_ds.scheduler.plan import BACKWARD_KINDS, FORWARD_KINDS, Packing, Policy, Task, TaskKind
from harmony_ds.scheduler.policies import Policies

_SHORT = 4
_ALL = 2**31
"""Graphs of so many micro-batches are those of all, however many there are."""
_Place = tuple[tuple[TaskKind, int, int], int]


class Peaks:
    """Peaks of plans for one request."""

    def __init__(self, costs: CostTable, request: PlanRequest) -> None:
        self._costs = costs
        self._request = request
        self._stash = np.array([*accumulate((cost.stash_bytes for cost in costs.costs), initial=0)], float)
        self._walks: dict[int, tuple[Packing, MemoryWalks]] = {}  # by identity: a packing takes long to hash

    def of(self, packing: Packing, policy: Policy) -> int:
        """The peak in bytes."""
        return max(self.stages(packing, policy))

    def stages(self, packing: Packing, policy: Policy) -> list[int]:
        """The peak in bytes while each pack runs: forward, then back, in the order in which they do."""
        wanted = self._request.micro_batches
        graphs = tuple(_ALL if count >= wanted else count for count in policy.graphs)
        policy = replace(policy, graphs=graphs)
        # What each has left behind grows between their tasks, not only within a pack; where some keep graphs, unevenly.
        if not policy.grouping or not {0, _ALL}.issuperset(graphs):
            held = [(stage, nbytes) for _, stage, nbytes in self._walked(packing, policy, wanted)]
        elif wanted <= _SHORT + 1:
            held = [*self._held(packing, policy, wanted).values()]
        else:
            short, longer = self._held(packing, policy, _SHORT), self._held(packing, policy, _SHORT + 1)
            further = wanted - _SHORT
            held = [(stage, nbytes + further * (longer[at][1] - nbytes)) for at, (stage, nbytes) in short.items()]
        base = resident_bytes(packing, policy, self._request)
        peaks = [base] * (len(packing.forward) + len(packing.backward))
        for stage, nbytes in held:
            peaks[stage] = max(peaks[stage], base + nbytes)
        return peaks

    def pack_bytes(self, packing: Packing, policy: Policy) -> list[PackBytes]:
        """What a micro-batch adds in each pack."""
        return self._walks_of(packing).pack_bytes(away=policy.stash_on_host > 0)

    def at_least(self, packing: Packing, policies: Policies) -> NDArray[np.float64]:
        """Bytes below which the peaks cannot be, without graphs: weights, gradients, stash, and what waits for its turn."""
        running = [self._forward_at_least(packing, policies), *self._backward_at_least(packing, policies)]
        most: NDArray[np.float64] = np.max(running, axis=0) + self._stays(packing, policies)
        return most

    def at_least_closely(self, packing: Packing, policy: Policy) -> int:
        """Bytes below which the peak is not, for one policy without graphs: what the packs before the fused one take when
        they run back, told from each pack by itself. Where little fits that mostly is the peak, to the byte.
        """
        if not policy.grouping:
            return 0
        walks, away = self._walks_of(packing), policy.stash_on_host > 0
        costs, bytes_of = walks.costs(away), walks.pack_bytes(away)
        fused, loss = packing.backward[-1], 2 * costs.scalar_bytes
        held = loss + min(costs.held_bytes, bytes_of[fused].alive_after_forward_bytes)
        first_needing = min((place for place, cost in enumerate(costs.costs) if cost.needs_backward), default=0)
        resident, taking = {*policy.resident}, stash_moves(packing, policy)[1]
        order = [i for i in reversed(packing.backward[:-1]) if packing.packs[i].needs_backward]
        kept = {*policy.kept}.intersection(packing.forward, order) - resident
        there = sum(bytes_of[index].weight_bytes for index in kept)  # of packs that are still to run back
        last, most = self._request.micro_batches - 1, 0
        for before, index, after in zip([fused, *order], order, [*order[1:], None], strict=False):
            pack = bytes_of[index]
            running = pack.gradient_bytes + there + (0 if index in resident | kept else pack.weight_bytes)
            if before not in resident and packing.packs[before].needs_backward:  # its gradients are on their way out
                running += bytes_of[before].gradient_bytes
            if policy.prefetch and after is not None and after not in resident | kept:
                running += bytes_of[after].weight_bytes
            came, excess = (pack.returning_bytes, pack.excess_bytes) if index in taking else (0, 0)
            waiting = held + bytes_of[before].shared_bytes
            done = loss if pack.first <= first_needing else held + pack.shared_bytes
            for m in {0, min(1, last), max(0, last - 1), last}:
                now = held + (excess if came else 0) + pack.backward_bytes[m > 0] + (came if m < last else 0)
                most = max(most, running + m * done + (last - m) * waiting + now)
            there -= pack.weight_bytes if index in kept else 0
        always = sum(pack.weight_bytes + pack.gradient_bytes for pack in packing.always)
        return resident_bytes(packing, policy, self._request) + always + costs.margin_bytes + most

    def spare(self, packing: Packing, policies: Policies, budget_bytes: float) -> NDArray[np.float64]:
        """Bytes that there are at most for graphs, which are all there when the fused pack runs back."""
        return budget_bytes - self._backward_at_least(packing, policies)[1] - self._stays(packing, policies)

    def _backward_at_least(
        self, packing: Packing, policies: Policies
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """While each pack runs back, and while the fused one does."""
        packs = [packing.packs[index] for index in packing.backward]
        swapped = ~policies.resident
        wanted = self._at_once(policies)
        weights = np.array([pack.weight_bytes for pack in packs])[:, None] * swapped
        # The weights of the pack that runs back next are on their way while one runs.
        ahead = weights * ~policies.kept * np.array([pack.needs_backward for pack in packs])[:, None]
        busy = np.array([pack.gradient_bytes + self._working(pack.positions) for pack in packs])[:, None] + weights
        busy[1:] += ahead[:-1] * policies.prefetch
        # While the second micro-batch runs, all behind it wait with what the pack before has left.
        left = [self._costs.costs[pack.positions[0]].shared_bytes for pack in packs]
        behind = [after if pack.needs_backward else 0 for pack, after in zip(packs, left[1:], strict=False)]
        busy[:-1] += max(0, wanted - 2) * np.array(behind, int)[:, None]
        fused, begin = packing.fused, packing.fused.positions[0]
        kept = np.array([pack.weight_bytes for pack in packs]) @ policies.kept
        full = kept + weights[-1] + self._stash_before([begin], packing, policies)[0] + self._working(fused.positions)
        # While the last one runs, the others have left gradients; while the first does, they wait with its inputs.
        last = (left[-1] if any(cost.needs_backward for cost in self._costs.costs[:begin]) else 0) * (wanted - 1)
        inputs = (wanted - 1) * self._costs.costs[begin].alive_bytes if begin else 0
        full = full + max(last + fused.gradient_bytes, inputs)
        return busy.max(axis=0), full

    def _forward_at_least(self, packing: Packing, policies: Policies) -> NDArray[np.float64]:
        """While each pack runs forward: the others wait with its inputs."""
        wanted, most = self._at_once(policies), np.zeros(len(policies))
        packs = [packing.packs[index] for index in packing.forward]
        stash = self._stash_before([pack.positions[0] for pack in packs], packing, policies)
        for stage, (index, pack) in enumerate(zip(packing.forward, packs, strict=True)):
            cost = self._costs.costs[pack.positions[0]]
            waiting = (wanted if stage else 1) * cost.alive_bytes
            swapped = ~policies.resident[index] if index < len(packing.backward) else 1
            most = np.maximum(most, pack.weight_bytes * swapped + waiting + cost.forward_bytes + stash[stage])
        return most

    def _stash_before(self, positions: list[int], packing: Packing, policies: Policies) -> NDArray[np.float64]:
        """Of all micro-batches and the calls before each position, what is on the device: shape (positions, policies)."""
        ends = np.array([0, *(packing.packs[i].positions[-1] + 1 for i in packing.forward)])[policies.away]
        before = self._stash[positions][:, None] - self._stash[ends]
        there: NDArray[np.float64] = self._at_once(policies) * np.maximum(0.0, before)
        return there

    def _stays(self, packing: Packing, policies: Policies) -> NDArray[np.float64]:
        """What is there all the time."""
        always = sum(pack.weight_bytes + pack.gradient_bytes for pack in packing.always)
        resident = np.array([packing.packs[index].resident_bytes for index in packing.backward]) @ policies.resident
        stays: NDArray[np.float64] = always + self._request.resident_bytes + resident
        return stays

    def _at_once(self, policies: Policies) -> int:
        return self._request.micro_batches if policies.base.grouping else 1

    def _working(self, positions: tuple[int, ...]) -> int:
        return max(self._costs.costs[p].backward_bytes for p in (positions[0], positions[-1]))

    def _held(self, packing: Packing, policy: Policy, micro_batches: int) -> dict[_Place, tuple[int, int]]:
        """The stage of each task and the bytes alive at it, by kind, pack, how often it has run, and micro-batch counted
        from the nearer end.
        """
        held: dict[_Place, tuple[int, int]] = {}
        times: Counter[tuple[TaskKind, int, int]] = Counter()
        for task, stage, nbytes in self._walked(packing, policy, micro_batches):
            m = task.micro_batch
            if m >= 0 and 2 <= m < micro_batches - 2:
                continue
            near = m if m < 2 else m - micro_batches  # -1 where there is none, the last is -1 too: kinds differ
            key = (task.kind, task.pack, near)
            times[key] += 1
            held[key, times[key]] = stage, nbytes
        return held

    def _walked(self, packing: Packing, policy: Policy, micro_batches: int) -> Iterator[tuple[Task, int, int]]:
        """Each task, the stage that it is part of, and the bytes alive at it."""
        forward = {index: stage for stage, index in enumerate(packing.forward)}
        backward = {index: stage for stage, index in enumerate(reversed(packing.backward), len(forward))}
        stage = 0
        tasks = compose_step(packing, Group.of(micro_batches), policy)
        profile = self._walks_of(packing).walk(tasks)
        for task, weights, rest in zip(tasks, profile.weight_bytes, profile.activation_bytes, strict=True):
            if task.kind in FORWARD_KINDS:
                stage = forward.get(task.pack, len(forward))  # a last pack that is not fused runs forward, too
            elif task.kind is TaskKind.FUSED or task.kind in BACKWARD_KINDS:
                stage = backward[task.pack]
            yield task, stage, weights + rest

    def _walks_of(self, packing: Packing) -> MemoryWalks:
        if id(packing) not in self._walks:
            self._walks[id(packing)] = packing, MemoryWalks(packing.packs, self._costs)
        return self._walks[id(packing)][1]
