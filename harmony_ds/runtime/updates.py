"""What happens to gradients once a backward pass has made them: they leave the device, are measured, and update weights.

    REDUCE              add up the gradients of several processes: world.reduce, or gradients.sum_shared
    SWAP_OUT            copy a pack's gradients to the host: gradients.swap_out, or .copy_to_shared
    FREE_GRADIENTS      give back the device memory of the copied gradients
    NORM                compute the norm that all updates wait for: updater.norm
    UPDATE              update a pack's weights on the host: updater.update
    UPDATE_ON_DEVICE    update a resident pack's weights on the device: resident_packs.update

Without clipping, a pack's UPDATE comes right after its SWAP_OUT. With clipping, all packs' SWAP_OUTs come first, then NORM,
then the UPDATEs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from harmony_ds.device.base import Event, Stream
from harmony_ds.distributed import World
from harmony_ds.errors import UsageError
from harmony_ds.offload.host_gradients import GradientTransfer, SharedGradients
from harmony_ds.offload.residency import DeviceCopy
from harmony_ds.optim.host_optimizer import Hyper
from harmony_ds.optim.updater import Clipping, GradientNorm
from harmony_ds.runtime.runtime import Runtime
from harmony_ds.scheduler.plan import EMPTY_PLAN, Plan, Task, TaskKind


@dataclass(slots=True)
class Outcome:
    """Facts about a step, from its begin on.

    Attributes:
        norm: of all gradients; promised when the step returns.
        may_skip: whether its updates are skipped if gradients turn out not to be finite.
        updates_issued: packs whose weights it has changed, or will.
        peers_update: whether other processes may change weights, though the step fails here.
    """

    norm: Future[GradientNorm] | None = None
    may_skip: bool = False
    updates_issued: int = 0
    peers_update: bool = False

    @property
    def overflow(self) -> bool:
        """Whether its updates were skipped; waits for the norm if they may have been.

        Raises:
            BaseException: what has ended the update thread before the norm was known.
        """
        return self.may_skip and self.norm is not None and self.norm.result().overflow


class AccumulatedGradients:
    """The gradients of a step so far, which wait for their update on the host or, those of resident packs, on the device.

    A step may run in parts; between them the program may read, change and discard these gradients. The argument `unlayered`
    is the device copy of the parameters that no layer has, while it is on the device.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._moved_to_host = False  # whether gradients of resident packs have been moved to the host in this step

    def collect_user_gradients(self, names: tuple[str, ...]) -> bool:
        """Hand the updater what the user's own backward passes left on `.grad` of `names`; return whether there was any."""
        runtime = self._runtime
        own = runtime.user_gradients.pop(names)
        if not own:
            return False
        runtime.world.refuse(f"a loss with {min(own)} in it outside the model's forward (a temperature, a penalty)")
        # Copies: the program may write into its tensors right after the step.
        copies = {name: gradient.clone() for name, gradient in own.items()}
        runtime.updater.deposit(runtime.host_gradients.wrap(copies))
        return True

    def to_host(self) -> None:
        """Move the gradients of resident packs to the host, before the packs leave the device."""
        runtime = self._runtime
        gradients = runtime.resident_packs.pop_all()
        if gradients:
            runtime.updater.deposit(runtime.host_gradients.wrap(gradients))
            runtime.updater.measure(tuple(gradients))
            self._moved_to_host = True

    def to_device(self, names: tuple[str, ...]) -> None:
        """Add gradients of `names`, parameters of a resident pack, that are on the host to those on the device."""
        runtime = self._runtime
        if self._moved_to_host:
            for name, gradient in runtime.updater.pop_gradients(names).items():
                runtime.resident_packs.add_gradient(name, gradient)
        for name, gradient in runtime.user_gradients.pop(names).items():
            runtime.resident_packs.add_gradient(name, gradient)

    def find(self, name: str, unlayered: Sequence[DeviceCopy]) -> Tensor | None:
        """Return the gradient of `name`: the tensor itself, on the device or the host; None: there is none."""
        runtime = self._runtime
        if self._moved_to_host and runtime.resident_packs.leaves((name,)):
            self.to_device((name,))
        for copy in unlayered:
            gradient = runtime.residency.gradient(copy, name)
            if gradient is not None:
                return gradient
        gradient = runtime.resident_packs.gradient(name)
        return runtime.updater.gradient(name) if gradient is None else gradient

    def discard(self, names: Iterable[str], unlayered: Sequence[DeviceCopy]) -> None:
        """Discard the gradients of `names`."""
        runtime = self._runtime
        runtime.host_gradients.received.difference_update(names)
        runtime.updater.discard_gradients(tuple(names))
        runtime.resident_packs.clear_gradients(names)
        for copy in unlayered:
            for name in names:
                runtime.residency.clear_gradient(copy, name)

    def note_used(self) -> None:
        """Note that the step which has run in parts is over, and its gradients are used."""
        self._moved_to_host = False


@dataclass(frozen=True, slots=True)
class _CopiesOut:
    """Gradients on the device while they are copied to the host.

    Attributes:
        tensors: kept until the compute stream has waited for the copies.
        arrived: event after the copies.
    """

    tensors: list[Tensor]
    arrived: Event


class Updates:
    """Handlers of the tasks that use gradients, and the update of a step that no task updates.

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
        self._shared: dict[int, SharedGradients] = {}  # pack -> gradients in shared memory, not summed yet
        self._copies_out: dict[int, _CopiesOut] = {}  # pack -> gradients that are being copied to the host
        self._hyper: Hyper = ()
        self._clipping: Clipping | None = None
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

    def start(self, hyper: Hyper, clipping: Clipping | None) -> None:
        """Begin to run the plan, with `hyper` for updates; with `clipping`, they wait for the norm of all gradients."""
        self._hyper, self._clipping = hyper, clipping
        self._swap_outs_left = self._swap_outs.copy()
        # With clipping, no buffer is given back before every gradient has arrived: with a limit, both would wait for ever.
        self._extra_transfers = self._plan.held_transfers if clipping is None else None
        self._runtime.updater.begin()

    def promise_norm(self) -> None:
        """Promise the norm of all gradients for reports, if no update waits for it: it is known after the last update."""
        if self.outcome.norm is None:
            self._runtime.updater.add_norms(self._runtime.resident_packs.send_norms())
            self.outcome.norm = self._runtime.updater.norm_of_updates()

    # ---- updates without a task

    def step_whole(self, clipping: Clipping) -> None:
        """Call the optimizer's own `step` with all gradients that have accumulated; they have to be off the device."""
        optimizer, updater, outcome = self._runtime.optimizer, self._runtime.updater, self.outcome
        assert optimizer is not None
        names = tuple(optimizer.trained)
        self._accumulated.to_host()
        self._runtime.resident_packs.evict_all()
        self._accumulated.collect_user_gradients(names)
        self._refuse_unused(clipping)
        updater.measure(names)
        outcome.norm, outcome.may_skip = updater.norm(clipping), clipping.skip_overflow
        norm = outcome.norm.result()
        gradients = updater.pop_gradients(names)
        if norm.overflow:
            return
        if norm.coefficient is not None:
            for gradient in gradients.values():
                gradient.mul_(norm.coefficient)
        outcome.updates_issued = 1  # if it fails from here on, some weights may have been changed
        optimizer.step_whole(gradients, partial(self._runtime.copy_masters_to_weights, gradients))

    def update_from_user_gradients(self, hyper: Hyper, clipping: Clipping | None) -> None:
        """Update from what the user's own backward passes left on `.grad` of host parameters, and nothing else."""
        optimizer, updater = self._runtime.optimizer, self._runtime.updater
        assert optimizer is not None
        if optimizer.steps_whole:
            self.step_whole(clipping or Clipping())
            return
        names = tuple(optimizer.trained)
        updater.wait_all()
        self._runtime.resident_packs.evict_all()
        self._accumulated.collect_user_gradients(names)
        if clipping is not None:
            self._refuse_unused(clipping)
            updater.measure(names)
            self.outcome.norm, self.outcome.may_skip = updater.norm(clipping), clipping.skip_overflow
        self.outcome.updates_issued = 1
        updater.update(0, names, hyper, self.outcome.norm)
        self.promise_norm()
        updater.wait_all()

    def _refuse_unused(self, clipping: Clipping) -> None:
        """Raise UsageError if a trained parameter has no gradient, and the ds_config refuses that."""
        if not clipping.refuses_unused:
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

    def discard_copies(self) -> None:
        """Discard the gradients that are on their way to the host, after a failure.

        Their memory may be reused: the stash has made the compute stream wait for all copies.
        """
        self._reduced.clear()
        self._shared.clear()
        self._copies_out.clear()

    # ---- handlers of tasks; `copy` is the pack's device copy

    def reduce(self, task: Task, copy: DeviceCopy) -> None:
        """REDUCE: add up a pack's gradients over all processes, on the host or the device."""
        runtime, kind = self._runtime, f"of pack {task.pack}"
        if self._plan.policy.reduce_on_host:
            transfer, write = runtime.host_gradients.sum_shared(
                kind, self._shared.pop(task.pack), self._extra_transfers
            )
            runtime.updater.queue_sum(write)
            self._deposit(task, transfer)
        else:
            gradients, dtype = runtime.residency.gradients(copy), runtime.residency.accumulation_dtype
            self._reduced[task.pack] = runtime.world.reduce(kind, runtime.device, copy.leaves, gradients, dtype)
        self.outcome.peers_update |= self._clipping is None

    def swap_out(self, task: Task, copy: DeviceCopy) -> None:
        """SWAP_OUT: copy a pack's gradients to the host, and have the updater keep them."""
        runtime = self._runtime
        own = runtime.residency.gradients(copy)
        if self._plan.policy.reduce_on_host:
            shared = runtime.host_gradients.copy_to_shared(own, copy.leaves, runtime.updater.raise_failure)
            self._shared[task.pack] = shared
            self._copies_out[task.pack] = _CopiesOut([*own.values()], shared.arrived)
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
        self._copies_out[task.pack] = _CopiesOut(tensors, transfer.arrived)
        self._deposit(task, transfer)

    def _deposit(self, task: Task, transfer: GradientTransfer) -> None:
        """Have the updater keep a transfer; measure a pack's gradients after its last one, if updates wait for the norm."""
        runtime, pack = self._runtime, self._plan.packs[task.pack]
        runtime.updater.deposit(transfer)
        self._swap_outs_left[task.pack] -= 1
        if not self._swap_outs_left[task.pack]:
            self._accumulated.collect_user_gradients(pack.owned)
            if self._clipping is not None and pack.owned:
                runtime.updater.measure(pack.owned)

    def free_gradients(self, task: Task) -> None:
        """FREE_GRADIENTS: free the device tensors of a pack's gradients, which have been copied to the host."""
        copies = self._copies_out.pop(task.pack)
        # The tensors belong to the compute stream, which may reuse their memory only after the copies.
        self._runtime.device.wait(Stream.COMPUTE, copies.arrived)

    def norm(self, task: Task) -> None:
        """NORM: compute the norm of all gradients, of which the updates wait; the caller goes on at once."""
        assert self._clipping is not None
        resident_packs, updater = self._runtime.resident_packs, self._runtime.updater
        for pack in self._plan.packs:
            if pack.index in self._plan.policy.resident:
                self._accumulated.to_device(pack.owned)
                resident_packs.measure(pack.owned)
            elif self._accumulated.collect_user_gradients(pack.owned):  # made since the pack's last swap-out
                updater.measure(pack.owned)
        self._refuse_unused(self._clipping)
        updater.add_norms(resident_packs.send_norms())
        self._runtime.world.agree("norm")  # from here on, weights change
        self.outcome.peers_update = self._runtime.world.size > 1
        self.outcome.norm, self.outcome.may_skip = updater.norm(self._clipping), self._clipping.skip_overflow

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
        resident_packs.update(owned, self._hyper, coefficient, measured=self.outcome.norm is not None)
