"""Plans for the micro-batches that a run computes: the tasks for just these, in the packs that the planner has chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from harmony_ds.errors import DoesNotFitError
from harmony_ds.profiling.sample import shapes_of
from harmony_ds.runtime.joint import JointMicroBatch
from harmony_ds.runtime.micro_batch import MicroBatch
from harmony_ds.runtime.runtime import Runtime
from harmony_ds.scheduler.choose import way_to_smaller_micro_batches
from harmony_ds.scheduler.compose import Group, compose_end, compose_evaluation, compose_forward, compose_step
from harmony_ds.scheduler.memory import walk_memory
from harmony_ds.scheduler.plan import Packing, Plan, Policy, Task
from harmony_ds.step.one_time_warnings import NO_ROOM_BESIDE_EARLY, OneTimeWarnings
from harmony_ds.step.planner import Planner

_MOST_PLANS = 256  # to keep: which losses a program reads before its step may differ from step to step
_MOST_TRIES = 8
_Compose = Callable[[Packing, Group, Policy], tuple[Task, ...]]


class PlanComposer:
    """Composer of the plan for each run: the planner's packs and policy, with tasks for the micro-batches of the run.

    The planner's own plan is for a whole step as it is expected. What runs may be a part of a step, a forward pass alone or
    an evaluation. Composed plans are kept until the planner chooses another plan.
    """

    def __init__(self, runtime: Runtime, planner: Planner, warnings: OneTimeWarnings) -> None:
        self._runtime = runtime
        self._planner = planner
        self._warnings = warnings
        self._composed = lru_cache(_MOST_PLANS)(self._compose)
        self._in_force: Plan | None = None

    def sets(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Return `micro_batches`, with a `JointMicroBatch` in the place of consecutive ones whose layer calls are joined.

        Joined are up to `Planner.joined_count` micro-batches of equal shapes. In the plan, a smaller set takes as much
        memory as a full one. If the budget does not hold that, the micro-batches of smaller sets run one by one.
        """
        joined_count, joins = self._planner.joined_count, self._runtime.joins
        if joined_count == 1:
            return micro_batches
        if self._runtime.world.any("run some alone", any(m.forward_done for m in micro_batches)):
            return micro_batches
        if self._runtime.device_copies.are_hooked(self._planner.graph.unlayered):
            raise joins.refuse("hooks of parameters that are used between layers see each for itself")
        self._planner.plan_for(len(micro_batches))
        runs = self._runs(micro_batches)

        for least in (2, joined_count, joined_count + 1):  # all sets; full ones; none
            chosen = self._joined(runs, least)
            if self._fits(chosen):
                break
        else:
            raise joins.refuse("the plan for sets of micro-batches has no room for single ones")
        world = self._runtime.world
        if world.size > 1 and self._runtime.device.count > 1:  # processes exchange packs in one order, a wave's
            counts = world.gather_values("join micro-batches", [micro_batch.count for micro_batch in chosen])
            if any(one != counts[0] for one in counts):
                chosen = self._joined(runs, joined_count + 1)
                self._fits(chosen)
        return chosen

    def _joined(self, runs: list[list[MicroBatch]], least: int) -> list[MicroBatch]:
        """Return the micro-batches of `runs`, those of a run of `least` or more as one."""
        micro_batches: list[MicroBatch] = []
        for run in runs:
            if len(run) >= least:
                micro_batches.append(JointMicroBatch.join(run, self._runtime.joins, self._runtime.random))
            else:
                micro_batches += run
        return micro_batches

    def _runs(self, micro_batches: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
        joined_count = self._planner.joined_count
        runs: list[list[MicroBatch]] = []
        last: list[MicroBatch] = []  # the run that more may join
        for unit in _by_loss(micro_batches):
            if len(unit) > joined_count or not all(self._are_alike(unit[0], one) for one in unit):
                runs += [[one] for one in unit]
                last = []
            elif last and len(last) + len(unit) <= joined_count and self._are_alike(last[0], unit[0]):
                last += unit
            else:
                last = [*unit]
                runs.append(last)
        return runs

    def _are_alike(self, one: MicroBatch, other: MicroBatch) -> bool:
        is_current = self._runtime.contract.is_current
        called = one.autocast, one.backward_autocast, shapes_of(one.inputs)
        alike = called == (other.autocast, other.backward_autocast, shapes_of(other.inputs))
        return alike and is_current(one.state) and is_current(other.state)

    def _fits(self, micro_batches: Sequence[MicroBatch]) -> bool:
        """Return whether the budget holds their step; the plan's peaks then cover it."""
        policy = self._planner.plan_for(1).policy
        return self._planner.raise_peak(self._of_group(compose_step, micro_batches, False, policy).device_peaks)

    def make_room(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Plan anew where micro-batches that share a loss take more than the plan in force has room for.

        Raises:
            DoesNotFitError: the budget is too small for them.
        """
        if not self._runtime.world.any("share a loss", any(m.loss_members for m in micro_batches)):
            return
        for _ in range(_MOST_TRIES):
            policy = self._planner.plan_for(sum(m.count for m in micro_batches)).policy
            group = self._of_group(compose_step, micro_batches, False, policy)
            fits = self._planner.raise_peak(group.device_peaks)
            if not self._runtime.world.any("make room", not fits):
                return
            peak_bytes = max(group.device_peaks)
            apart = self._of_group(compose_step, micro_batches, False, policy, with_shared_losses=False)
            more = peak_bytes - max(apart.device_peaks)
            self._planner.make_room(self._runtime.world.max("make room", more))
        raise DoesNotFitError(
            f"a loss of the outputs of several forward passes takes {peak_bytes:,} bytes of device memory, and the budget "
            f"is {self._runtime.device.budget_bytes:,} bytes. Ways out: (1) raise harmony.device_memory_gib; (2) "
            f"{way_to_smaller_micro_batches(self._planner.costs[1].rows)}."
        )

    def beside_bytes(self, own: Sequence[MicroBatch], others: Sequence[MicroBatch], outputs: int) -> int:
        """Return what is on the device while a run goes on, and is no task's: of micro-batches whose forward pass has run.

        Args:
            own: the run's, of which it is what their outputs need.
            others: of which it is all, but for gradients, which wait on the host.
            outputs: of how many of them all the outputs are on the device.
        """
        _, costs = self._planner.costs
        nbytes = outputs * costs.output_bytes
        nbytes += len(others) * (costs.held_bytes + costs.held_and_stashed_bytes + 2 * costs.scalar_bytes)
        for micro_batch in (*own, *others):
            nbytes += sum(head.hidden.nbytes for *_, head in micro_batch.heads)
        for micro_batch in others:
            for position, call in micro_batch.calls:
                if any(entry.device_tensor is not None for entry in call.entries):
                    nbytes += costs.costs[position].stash.on_device_bytes
        return nbytes

    def step(self, micro_batches: Sequence[MicroBatch], has_unlayered: bool, beside_bytes: int = 0) -> Plan:
        """Return the step over `micro_batches`.

        Args:
            has_unlayered: whether an earlier run has left the unlayered parameters on the device.
            beside_bytes: see there.
        """
        policy = self._policy_for(micro_batches, has_unlayered, sum(m.count for m in micro_batches))
        return self._beside_early(compose_step, micro_batches, has_unlayered, policy, beside_bytes)

    def part_of_step(
        self, micro_batches: Sequence[MicroBatch], has_unlayered: bool, first: bool, beside_bytes: int
    ) -> tuple[Plan, Plan]:
        """Return the step over some of its micro-batches, up to their last backward pass, and from there on.

        After the `first` part each micro-batch's gradient is added for itself: in the order of plain accumulation.
        """
        policy = self._policy_for(micro_batches, has_unlayered, len(micro_batches))
        policy = replace(policy, deferred_update=True, grouping=policy.grouping and first)
        plan = self._beside_early(compose_step, micro_batches, has_unlayered, policy, beside_bytes)
        split = len(plan.tasks) - len(compose_end(plan.packing, policy))
        return plan.part(0, split), plan.part(split)

    def forward(
        self, micro_batch: MicroBatch, has_unlayered: bool, others: Sequence[MicroBatch] = (), outputs: int = 0
    ) -> Plan:
        """Return the forward pass of one micro-batch for itself.

        If it does not fit beside the stash of `others`, whose forward passes have run, that goes to the host now.

        Args:
            others, outputs: see `beside_bytes`.
        """
        policy = replace(self._planner.plan_for(1).policy, swaps_in_shares=False)  # the others may do something else

        beside_bytes = self.beside_bytes((), others, outputs)
        plan = self._of_group(compose_forward, [micro_batch], has_unlayered, policy, beside_bytes)
        if others and self._runtime.device.count == 1 and not self._planner.has_room_for(plan.device_peaks):
            self._send_stash(others)
            beside_bytes = self.beside_bytes((), others, outputs)
        return self._beside_early(compose_forward, [micro_batch], has_unlayered, policy, beside_bytes)

    def _send_stash(self, micro_batches: Sequence[MicroBatch]) -> None:
        stash = self._runtime.stash
        with self._runtime.device.as_current():
            stash.swap_out(
                entry for micro_batch in micro_batches for _, call in micro_batch.calls for entry in call.entries
            )
            stash.free_copied()

    def evaluation(self, micro_batches: Sequence[MicroBatch], has_unlayered: bool) -> Plan:
        """Return the forward passes of a group without gradients, each pack swapped in once for all of them."""
        return self._of_group(
            compose_evaluation, micro_batches, has_unlayered, self._policy_for(micro_batches, has_unlayered, 1)
        )

    def _policy_for(self, micro_batches: Sequence[MicroBatch], has_unlayered: bool, count: int) -> Policy:
        """Return the policy for a group of all processes: they share swap-ins unless some of it has run in one."""
        policy = self._planner.plan_for(count).policy
        if not policy.swaps_in_shares:
            return policy
        alone = has_unlayered or any(m.forward_done for m in micro_batches)
        return replace(policy, swaps_in_shares=not self._runtime.world.any("share swap-ins", alone))

    def _beside_early(
        self,
        compose: _Compose,
        micro_batches: Sequence[MicroBatch],
        has_unlayered: bool,
        policy: Policy,
        beside_bytes: int,
    ) -> Plan:
        """Return the plan of a run beside what micro-batches hold whose forward pass has run alone (`beside_bytes`).

        Where the budget has no room for that, the plan's peaks say so, and the run goes on in what memory there is: its
        tasks are charged without it.
        """
        plan = self._of_group(compose, micro_batches, has_unlayered, policy, beside_bytes)
        is_early = beside_bytes > 0 or any(micro_batch.forward_done for micro_batch in micro_batches)
        if not is_early or self._planner.has_room_for(plan.device_peaks):
            return plan
        self._warnings.log(NO_ROOM_BESIDE_EARLY, f"{plan.peak_bytes:,}", f"{self._planner.room_bytes:,}")
        alone = self._of_group(compose, micro_batches, has_unlayered, policy)
        return replace(alone, peak_bytes=plan.peak_bytes, device_peaks=plan.device_peaks)

    def _of_group(
        self,
        compose: _Compose,
        micro_batches: Sequence[MicroBatch],
        has_unlayered: bool,
        policy: Policy,
        beside_bytes: int | None = None,
        with_shared_losses: bool = True,
    ) -> Plan:
        """Return the plan of a group.

        Args:
            beside_bytes: what is on the device all the time; None: nothing, nor what forward passes hold that have run.
            with_shared_losses: False: as if each of its micro-batches had its own loss.
        """
        fresh, forwarded = (tuple(m.index for m in micro_batches if m.forward_done is ran) for ran in (False, True))
        shared_losses: list[tuple[int, ...]] = []
        if with_shared_losses:
            of_several = [members for members in _by_loss(micro_batches) if len(members) > 1]
            shared_losses = [tuple(member.index for member in members) for members in of_several]
        group = Group(fresh, forwarded, has_unlayered, tuple(shared_losses))
        joint = frozenset(m.index for m in micro_batches if m.count > 1)
        if self._planner.plan is not self._in_force:
            self._in_force = self._planner.plan
            self._composed.cache_clear()
        return self._composed(compose, group, policy, joint, beside_bytes)

    def _compose(
        self, compose: _Compose, group: Group, policy: Policy, joint: frozenset[int], beside_bytes: int | None
    ) -> Plan:
        plan = self._in_force
        assert plan is not None
        tasks = compose(plan.packing, group, policy)
        costs, alone = self._planner.costs
        if compose is compose_evaluation:  # keeps nothing
            calls = tuple(replace(cost, stash=replace(cost.stash, new_bytes=0)) for cost in alone.costs)
            alone = replace(alone, costs=calls, held_bytes=0, output_bytes=0)
        from_host = policy.slices_from_host and compose is not compose_evaluation
        others = dict.fromkeys(joint, costs)
        forwarded = () if beside_bytes is None else group.forwarded
        walked = walk_memory(plan.packs, tasks, alone, others, group.shared_losses, from_host, forwarded)
        more_bytes = beside_bytes or 0
        peaks = tuple(plan.resident_bytes + more_bytes + peak for peak in walked.device_peaks)
        plan = replace(plan, policy=policy, tasks=tasks, micro_batches=len(group.all), rows=self._planner.rows)
        activation_bytes = tuple(nbytes + more_bytes for nbytes in walked.activation_bytes)
        return replace(plan, activation_bytes=activation_bytes, peak_bytes=max(peaks), device_peaks=peaks)


def _by_loss(micro_batches: Sequence[MicroBatch]) -> list[Sequence[MicroBatch]]:
    """Return those that share a loss together, in the order of the last one of each loss."""
    return [m.loss_members or (m,) for m in micro_batches if not m.loss_members or m is m.loss_members[-1]]
