"""What happens to gradients once a backward pass has made them: they leave the device, are measured, and update weights.

    REDUCE              add up the gradients of several processes: world.reduce, or gradients.sum_slots
    SWAP_OUT            copy a pack's gradients to the host: gradients.swap_out, or .copy_to_slot
    FREE_GRADIENTS      give back the device memory of the copied gradients
    NORM                compute the norm that all updates wait for: updater.norm
    UPDATE              update a pack's weights on the host: updater.update
    UPDATE_ON_DEVICE    update a resident pack's weights on the device: resident_packs.update

Where updates are deferred (clipping, loss scaling), all packs' SWAP_OUTs come first, then NORM, then the UPDATEs.
Else a pack's UPDATE comes right after its SWAP_OUT.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from harmony_ds.device.base import Event, Stream
from harmony_ds.distributed import World
from harmony_ds.errors import UsageError
from harmony_ds.offload.device_copies import DeviceCopy
from harmony_ds.offload.host_gradients import GradientTransfer, SlotGradients
from harmony_ds.optim.host_optimizer import Hyper
from harmony_ds.optim.updater import NormOptions
from harmony_ds.runtime.accumulated_gradients import AccumulatedGradients
from harmony_ds.runtime.outcome import Outcome
from harmony_ds.runtime.runtime import Runtime
from harmony_ds.scheduler.plan import EMPTY_PLAN, Plan, Task, TaskKind


@dataclass(frozen=True, slots=True)
class _LeavingGradients:
    """Gradients on the device while they are copied to the host.

    Attributes:
        tensors: kept until the compute stream has waited for the copies.
        arrived: event after the copies.
    """

    tensors: list[Tensor]
    arrived: Event


class GradientTasks:
    """Handlers of the tasks that use gradients; also the update from gradients that the program has made by itself.

    Attributes:
        outcome: of the step that runs.
    """

    def __init__(self, runtime: Runtime, accumulated: AccumulatedGradients) -> None:
        self._runtime = runtime
        self._accumulated = accumulated
        self._plan = EMPTY_PLAN
        self._extra_transfers: int | None = None  # that may wait on the host beyond the limit; None: any number
        self._swap_outs: Counter[int] = Counter()  # pack -> its SWAP_OUT tasks in the plan
        self._swap_outs_left: Counter[int] = Counter()  # pack -> those that have not been run
        # pack -> this process's pieces of the mean gradients, on the device
        self._reduced: dict[int, dict[str, Tensor]] = {}
        self._in_slots: dict[int, SlotGradients] = {}  # pack -> gradients in shared memory, not summed yet
        self._leaving: dict[int, _LeavingGradients] = {}  # pack -> gradients that are being copied to the host
        self._hyper: Hyper = ()
        self._norm_options: NormOptions | None = None
        self.outcome = Outcome()

    def load_plan(self, plan: Plan) -> None:
        """Prepare for the tasks of `plan`: page-lock the buffers that its gradients will need."""
        runtime = self._runtime
        self._plan = plan
        self._swap_outs = Counter(task.pack for task in plan.tasks if task.kind is TaskKind.SWAP_OUT)
        if not self._swap_outs:
            return
        packs = [plan.packs[index] for index in self._swap_outs]
        if plan.policy.reduce_on_host:
            assert isinstance(runtime.world, World)
            largest = max(pack.gradient_bytes for pack in packs)
            runtime.world.make_slots(runtime.device, plan.policy.gradient_slabs, largest)
        piece_bytes = [pack.piece_bytes(runtime.world.local_rank) for pack in packs]
        runtime.host_gradients.reserve(piece_bytes, plan.held_transfers)

    def start(self, hyper: Hyper, norm_options: NormOptions | None) -> None:
        """Begin to run the plan, with `hyper` for updates; with `norm_options`, they wait for the norm of all gradients."""
        self._hyper, self._norm_options = hyper, norm_options
        self._swap_outs_left = self._swap_outs.copy()
        # Where updates are deferred, no buffer is given back before every gradient has arrived: with a limit, both would
        # wait for ever.
        self._extra_transfers = self._plan.held_transfers if norm_options is None else None
        self._runtime.updater.begin()

    def promise_norm(self) -> None:
        """Promise the norm of all gradients for reports, if no update waits for it: it is known after the last update."""
        if self.outcome.norm is None:
            self._runtime.updater.add_norms(self._runtime.resident_packs.send_norms())
            self.outcome.norm = self._runtime.updater.norm_of_updates()

    # ---- updates without a task

    def step_whole(self, norm_options: NormOptions) -> None:
        """Call the optimizer's own `step` with all gradients that have accumulated; they have to be off the device."""
        optimizer, updater, outcome = self._runtime.optimizer, self._runtime.updater, self.outcome
        assert optimizer is not None
        names = tuple(optimizer.trained)
        self._accumulated.to_host()
        self._runtime.resident_packs.evict_all()
        self._accumulated.collect_user_gradients(names)
        self._refuse_unused(norm_options)
        updater.compute_norms(names)
        outcome.norm, outcome.may_skip = updater.norm(norm_options), norm_options.skip_overflow
        norm = outcome.norm.result()
        gradients = updater.pop_gradients(names)
        if norm.overflow:
            return

        def note_update() -> None:
            outcome.updates_issued = 1  # if it fails from here on, some weights may have been changed

        sync_weights = partial(self._runtime.copy_masters_to_weights, gradients)
        optimizer.step_whole(gradients, norm.coefficient, note_update, sync_weights)

    def update_from_user_gradients(self, hyper: Hyper, norm_options: NormOptions | None) -> None:
        """Update from what the user's own backward passes left on `.grad` of host parameters, and nothing else."""
        optimizer, updater = self._runtime.optimizer, self._runtime.updater
        assert optimizer is not None
        if optimizer.steps_whole:
            self.step_whole(norm_options or NormOptions())
            return
        names = tuple(optimizer.trained)
        updater.wait_all()
        self._runtime.resident_packs.evict_all()
        self._accumulated.collect_user_gradients(names)
        if norm_options is not None:
            self._refuse_unused(norm_options)
            updater.compute_norms(names)
            self.outcome.norm, self.outcome.may_skip = updater.norm(norm_options), norm_options.skip_overflow
        self.outcome.updates_issued = 1
        updater.update(0, names, hyper, self.outcome.norm)
        self.promise_norm()
        updater.wait_all()

    def _refuse_unused(self, norm_options: NormOptions) -> None:
        """Raise UsageError if a trained parameter has no gradient, and the ds_config refuses that."""
        if not norm_options.refuses_unused:
            return
        optimizer, received = self._runtime.optimizer, self._runtime.host_gradients.received
        assert optimizer is not None
        resident = self._runtime.resident_packs
        unused = [name for name in optimizer.trained if name not in received and resident.gradient(name) is None]
        if unused:
            raise UsageError(
                f"your module has parameters that were not used in producing loss ({unused[0]}, and "
                f"{len(unused) - 1} more). Let all trainable parameters take part in the loss, freeze those that do not, "
                "or leave zero_optimization.ignore_unused_parameters out, which is false."
            )

    def discard_leaving(self) -> None:
        """Discard the gradients that are on their way to the host, after a failure.

        Their memory may be reused: the stash has made the compute stream wait for all copies.
        """
        self._reduced.clear()
        self._in_slots.clear()
        self._leaving.clear()

    # ---- handlers of tasks; `copy` is the pack's device copy

    def reduce(self, task: Task, copy: DeviceCopy) -> None:
        """REDUCE: add up a pack's gradients over all processes, on the host or the device."""
        runtime, kind = self._runtime, f"of pack {task.pack}"
        if self._plan.policy.reduce_on_host:
            transfer, write = runtime.host_gradients.sum_slots(
                kind, self._in_slots.pop(task.pack), self._extra_transfers
            )
            runtime.updater.queue_sum(write)
            self._deposit(task, transfer)
        else:
            gradients, dtype = runtime.device_copies.gradients(copy), runtime.device_copies.accumulation_dtype
            self._reduced[task.pack] = runtime.world.reduce(kind, runtime.device, copy.leaves, gradients, dtype)
        self.outcome.peers_update |= self._norm_options is None

    def swap_out(self, task: Task, copy: DeviceCopy) -> None:
        """SWAP_OUT: copy a pack's gradients to the host, and have the updater keep them."""
        runtime = self._runtime
        own = runtime.device_copies.gradients(copy)
        if self._plan.policy.reduce_on_host:
            in_slot = runtime.host_gradients.copy_to_slot(own, copy.leaves, runtime.updater.raise_failure)
            self._in_slots[task.pack] = in_slot
            self._leaving[task.pack] = _LeavingGradients([*own.values()], in_slot.arrived)
            return
        gradients, made_on = own, Stream.COMPUTE
        if task.pack in self._reduced:
            gradients, made_on = self._reduced.pop(task.pack), Stream.PEER
        norms = runtime.host_gradients.norms_of(gradients)
        pack_bytes = self._plan.packs[task.pack].piece_bytes(runtime.world.local_rank)
        transfer = runtime.host_gradients.swap_out(gradients, self._extra_transfers, made_on, norms, pack_bytes)
        tensors = [*own.values(), *gradients.values()]
        if norms is not None:
            tensors.append(norms)
        self._leaving[task.pack] = _LeavingGradients(tensors, transfer.arrived)
        self._deposit(task, transfer)

    def _deposit(self, task: Task, transfer: GradientTransfer) -> None:
        """Have the updater keep a transfer; measure a pack's gradients after its last one, if updates wait for the norm."""
        runtime, pack = self._runtime, self._plan.packs[task.pack]
        runtime.updater.deposit(transfer)
        self._swap_outs_left[task.pack] -= 1
        if not self._swap_outs_left[task.pack]:
            self._accumulated.collect_user_gradients(pack.owned)
            if self._norm_options is not None and pack.owned:
                runtime.updater.compute_norms(pack.owned)

    def free_gradients(self, task: Task) -> None:
        """FREE_GRADIENTS: free the device tensors of a pack's gradients, which have been copied to the host."""
        leaving = self._leaving.pop(task.pack)
        # The tensors belong to the compute stream, which may reuse their memory only after the copies.
        self._runtime.device.wait(Stream.COMPUTE, leaving.arrived)

    def norm(self, task: Task) -> None:
        """NORM: compute the norm of all gradients, of which the updates wait; the caller goes on at once."""
        assert self._norm_options is not None
        resident_packs, updater = self._runtime.resident_packs, self._runtime.updater
        for pack in self._plan.packs:
            if pack.index in self._plan.policy.resident:
                self._accumulated.to_device(pack.owned)
                resident_packs.compute_norms(pack.owned)
            elif self._accumulated.collect_user_gradients(pack.owned):  # made since the pack's last swap-out
                updater.compute_norms(pack.owned)
        self._refuse_unused(self._norm_options)
        updater.add_norms(resident_packs.send_norms())
        self._runtime.world.agree("norm")  # from here on, weights change
        self.outcome.peers_update = self._runtime.world.size > 1
        self.outcome.norm, self.outcome.may_skip = updater.norm(self._norm_options), self._norm_options.skip_overflow

    def update(self, task: Task) -> None:
        """UPDATE: queue the update of the parameters that a pack owns, on the update thread."""
        pack = self._plan.packs[task.pack]
        if not pack.needs_backward and self.outcome.norm is None:  # else SWAP_OUT or NORM has done it
            self._accumulated.collect_user_gradients(pack.owned)
        self.outcome.updates_issued += 1
        self._runtime.updater.update(pack.needed_at, pack.owned, self._hyper, self.outcome.norm)

    def update_on_device(self, task: Task) -> None:
        """UPDATE_ON_DEVICE: update the parameters that a resident pack owns, on the device."""
        owned, resident_packs = self._plan.packs[task.pack].owned, self._runtime.resident_packs
        if self.outcome.overflow:
            resident_packs.clear_gradients(owned)
            return
        self.outcome.updates_issued += 1
        coefficient = None
        if self.outcome.norm is None:
            self._accumulated.to_device(owned)
        else:
            coefficient = self.outcome.norm.result().coefficient
        self._runtime.timeline.begin_compute()
        resident_packs.update(owned, self._hyper, coefficient, norms_known=self.outcome.norm is not None)
