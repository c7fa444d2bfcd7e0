"""Estimates the time and the memory of a candidate, from a few micro-batches that stand for all of its group.

A `SampledPlan` is a plan over these few, walked and simulated as a finished plan is. Where a pack keeps the graphs of the
first 3 of 20 micro-batches, these 3 are alike and the other 17 are alike: between two numbers of kept graphs, what is alive
changes by the same bytes from one micro-batch to the next. The first two and the last two of such a run show the most there
is, and one between them is counted as often as there are others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from harmony_ds.scheduler.choose import PlanRequest, make_plan, resident_bytes
from harmony_ds.scheduler.compose import Group, compose_step
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.lowering import run_ms
from harmony_ds.scheduler.memory import MemoryWalks
from harmony_ds.scheduler.pack_bytes import PackBytes
from harmony_ds.scheduler.plan import BACKWARD_KINDS, FORWARD_KINDS, Packing, Plan, Policy, TaskKind
from harmony_ds.scheduler.profile import Machine
from harmony_ds.scheduler.simulate import step_ms
from harmony_ds.scheduler.swaps import swaps_of

_SHOWN = 5
"""How many of the micro-batches of a run of alike ones are in a sampled plan, at most."""


@dataclass(frozen=True, slots=True)
class SampledPlan:
    """A plan over a few micro-batches, which stand for all.

    Attributes:
        plan: its tasks. Its peaks are not filled in, and its numbers of kept graphs are those among the few.
        counts: how many micro-batches each one stands for; empty: for itself.
    """

    plan: Plan
    counts: tuple[int, ...]


class CandidateEstimator:
    """Estimates of candidates for one request."""

    def __init__(self, costs: CostTable, request: PlanRequest) -> None:
        self._costs = costs
        self._request = request
        self._walks = MemoryWalks(costs, request.policy.slices_from_host)

    def sample(self, packing: Packing, policy: Policy) -> SampledPlan:
        """Return the plan over as few micro-batches as show everything."""
        wanted = self._request.micro_batches
        # Waves do not grow evenly with micro-batches: they are walked in full.
        counts = (1,) * wanted if policy.pipeline > 1 else _counts(wanted, policy.graphs)
        graphs = tuple(_sampled_count(counts, count) for count in policy.graphs)
        policy = replace(policy, graphs=graphs, swap_in_delays=())  # which count the runs of all
        tasks = compose_step(packing, Group.with_fresh(len(counts)), policy)
        several = wanted if policy.grouping else len(counts)
        return SampledPlan(Plan(packing, policy, tasks, several, 0, 0), counts)

    def stage_peaks(self, sampled: SampledPlan) -> list[int]:
        """Return the peak in bytes while each pack runs: forward, then back, in the order in which they do."""
        plan = sampled.plan
        packing = plan.packing
        forward = {index: stage for stage, index in enumerate(packing.forward)}
        backward = {index: stage for stage, index in enumerate(reversed(packing.backward), len(forward))}
        stages = dict.fromkeys(FORWARD_KINDS, forward) | dict.fromkeys((TaskKind.FUSED, *BACKWARD_KINDS), backward)
        now = {**forward}  # by device: its stage
        peaks = [0] * (len(forward) + len(backward))
        profile = self._walks.walk(packing.packs, plan.tasks, sampled.counts)
        walked = zip(plan.tasks, profile.devices, profile.weight_bytes, profile.activation_bytes, strict=True)
        for task, device, weights, rest in walked:
            if (numbers := stages.get(task.kind)) is not None:
                stage = now[device] = numbers[task.pack]
            else:
                stage = now.get(device, 0)
            peaks[stage] = max(peaks[stage], weights + rest)
        base = resident_bytes(packing, plan.policy, self._request)
        return [base + peak for peak in peaks]

    def plan(self, packing: Packing, policy: Policy) -> SampledPlan:
        """Return the plan as it is requested, with its peaks: over all micro-batches, or over a few that stand for all."""
        if not self._request.is_sampled:
            return SampledPlan(make_plan(packing, self._costs, self._request, policy), ())
        sampled = self.sample(packing, policy)
        stays = resident_bytes(packing, policy, self._request)
        walked = self._walks.walk(packing.packs, sampled.plan.tasks, sampled.counts)
        peaks = tuple(stays + peak for peak in walked.device_peaks)
        plan = replace(
            sampled.plan,
            policy=policy,
            resident_bytes=stays,
            peak_bytes=max(peaks),
            calls=self._costs.calls,
            activation_bytes=walked.activation_bytes,
            device_peaks=peaks,
        )
        return SampledPlan(plan, sampled.counts)

    def least_step_ms(self, packing: Packing, policy: Policy) -> float:
        """Return a time that no step is shorter than: runs alone, on the device that computes most."""
        return max(self._runs_ms(packing, policy).values())

    def computing_ms(self, packing: Packing, policy: Policy, machine: Machine) -> float:
        """Return the same with the updates of resident packs, which are made on the device, too."""
        busy = self._runs_ms(packing, policy)
        for index in policy.resident:
            pack = packing.packs[index]
            busy[pack.device] += pack.update_elements / machine.device_update_elements_per_ms * pack.is_updated
        return max(busy.values())

    def between_steps_ms(self, packing: Packing, policy: Policy, machine: Machine) -> float:
        """Return a time that no step of these packs computes in: the gradients that leave last are those of the first pack,
        whose update and swap-in the next step waits for.
        """
        first, needed = packing.packs[packing.backward[0]], packing.packs[(*packing.forward, *packing.backward)[0]]
        if not {first.index, needed.index}.isdisjoint(policy.resident):
            return 0.0
        update_ms = 0.0
        if first.needs_backward:
            update_ms = machine.swap_out_ms(first.swap_out_bytes()) + machine.host_update_ms(first.update_elements)
        return update_ms + needed.swap_in_bytes(policy.swaps_in_shares) / machine.swap_in_bytes_per_ms

    def _runs_ms(self, packing: Packing, policy: Policy) -> defaultdict[int, float]:
        """Return by device how long running all micro-batches through its packs takes."""
        counts = dict(enumerate(policy.graphs))
        busy: defaultdict[int, float] = defaultdict(float)
        for index in packing.backward:
            pack = packing.packs[index]
            fused = index == packing.backward[-1]
            kinds = [TaskKind.FUSED] if fused else [TaskKind.FORWARD, *[TaskKind.BACKWARD] * pack.needs_backward]
            one = sum(run_ms(kind, pack, self._costs) for kind in kinds)
            saved = sum(self._costs.costs[p].saved_ms for p in pack.positions)
            busy[pack.device] += one * self._request.micro_batches - saved * counts.get(index, 0)
        return busy

    def pack_bytes(self, packing: Packing, policy: Policy) -> list[PackBytes]:
        """Return what a micro-batch adds in each pack."""
        return self._walks.view(packing.packs, stash_on_host=policy.stash_on_host > 0).packs

    def step_ms(self, sampled: SampledPlan, machine: Machine, pieces: int, wanted_ms: float = float("inf")) -> float:
        """Return the time of a step, the stash for a pack moving in so many pieces; infinite if it is more than wanted."""
        plan, counts = sampled.plan, sampled.counts
        if plan.policy.grouping or len(counts) == self._request.micro_batches:
            counts = counts if plan.policy.grouping else ()
            return step_ms(plan, self._costs, machine, counts, pieces, wanted_ms)
        # One micro-batch after the other passes all packs, each as the one before it.
        fewer = replace(plan, micro_batches=plan.micro_batches - 1)
        fewer = replace(fewer, tasks=compose_step(plan.packing, Group.with_fresh(fewer.micro_batches), plan.policy))
        with_all, with_fewer = (step_ms(one, self._costs, machine) for one in (plan, fewer))
        return with_all + (self._request.micro_batches - len(counts)) * (with_all - with_fewer)

    def swapped_bytes(self, sampled: SampledPlan) -> int:
        """Return what a step moves between host and device."""
        plan = sampled.plan
        if plan.policy.grouping:
            return swaps_of(plan, self._costs, counts=sampled.counts).total
        return swaps_of(plan, self._costs).total * self._request.micro_batches // len(sampled.counts)


def _counts(micro_batches: int, graphs: Sequence[int]) -> tuple[int, ...]:
    """Return, for each micro-batch of the sampled plan, how many it stands for."""
    counts: list[int] = []
    for first, last in pairwise(sorted({0, micro_batches, *(min(count, micro_batches) for count in graphs)})):
        alike = last - first
        counts += [1] * alike if alike <= _SHOWN else [1, 1, alike - 4, 1, 1]
    return tuple(counts)


def _sampled_count(counts: Sequence[int], wanted: int) -> int:
    """Return how many micro-batches of the sampled plan stand for the first `wanted` ones of the group."""
    return min(len(counts), bisect_left([*accumulate(counts, initial=0)], wanted))
