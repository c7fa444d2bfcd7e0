"""Gradients once they are made: they leave the device, are reduced, measured, and updated with.

REDUCE      world.reduce, .reduce_on_host     FREE_GRADIENTS     dropping them
SWAP_OUT    host_gradients.swap_out           UPDATE             updater.update
NORM        updater.norm                      UPDATE_ON_DEVICE   resident_packs.update
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from harmony_ds.device.base import Event, Stream
from harmony_ds.distributed import World
from harmony_ds.offload.host_gradients import GradientTransfer, PostedGradients
from harmony_ds.offload.residency import DeviceCopy
from harmony_ds.optim.host_optimizer import Hyper
from harmony_ds.optim.updater import Clipping, GradientNorm
from harmony_ds.runtime.runtime import Runtime
from harmony_ds.scheduler.plan import NOTHING, Plan, Task, TaskKind


@dataclass(slots=True)
class Outcome:
    """Facts about a step, from its begin on.

    Attributes:
        norm: of all gradients; promised when the step returns.
        may_skip: whether its updates are skipped if gradients turn out not to be finite.
        updates_issued: packs whose weights it has changed, or will.
        others_update: whether other processes may change weights, though the step fails here.
    """

    norm: Future[GradientNorm] | None = None
    may_skip: bool = False
    updates_issued: int = 0
    others_update: bool = False

    @property
    def overflow(self) -> bool:
        """Whether its updates were skipped; waits for the norm if they may have been.

        Raises:
            BaseException: what has ended the update thread before the norm was known.
        """
        return self.may_skip and self.norm is not None and self.norm.result().overflow


class GatheredGradients:
    """Keeper of gradients of a step that has run in part, which wait for their update on the host, or on the device."""

    def __init__(self, runtime: Runtime, unlayered: Callable[[], Sequence[DeviceCopy]]) -> None:
        """Take `unlayered`, which gives the copy of the unlayered parameters while it is on the device."""
        self._runtime = runtime
        self._unlayered = unlayered
        self._moved = False  # to the host, of packs that are updated on the device, since a plan was exchanged

    def receive_own(self, names: tuple[str, ...], measure: bool = False) -> None:
        """Take what the user's own backward passes left on the host parameters `names`.

        Args:
            measure: takes the norms of their gradients anew if so.
        """
        runtime = self._runtime
        if own := runtime.user_gradients.pop(names):
            runtime.world.refuse(f"a loss with {min(own)} in it outside the model's forward (a temperature, a penalty)")
            # Copies: the program may write into its tensors right after the step.
            runtime.updater.receive(runtime.gradients.on_host({name: g.clone() for name, g in own.items()}))
            if measure:
                runtime.updater.measure(names)

    def to_host(self) -> None:
        """Move the gradients of resident packs to the host, since the packs leave the device."""
        runtime = self._runtime
        kept = runtime.resident_packs.take_gradients()
        if kept:
            runtime.updater.receive(runtime.gradients.on_host(kept))
            runtime.updater.measure(tuple(kept))
            self._moved = True

    def to_device(self, names: tuple[str, ...]) -> None:
        """Move gradients of `names`, which are updated on the device, there from the host."""
        on_host = self._runtime.updater.pop_gradients(names) if self._moved else {}
        for gradients in (on_host, self._runtime.user_gradients.pop(names)):
            for name, gradient in gradients.items():
                self._runtime.resident_packs.add_gradient(name, gradient)

    def find(self, name: str) -> Tensor | None:
        """Return the gradient of `name`: the tensor itself."""
        store = self._runtime.resident_packs
        if self._moved and store.leaves((name,)):
            self.to_device((name,))
        for copy in self._unlayered():
            if (found := self._runtime.residency.gradient(copy, name)) is not None:
                return found
        found = store.gradient(name)
        return self._runtime.updater.gradient(name) if found is None else found

    def drop(self, names: Iterable[str]) -> None:
        """Drop the gradients of `names`."""
        self._runtime.gradients.received.difference_update(names)
        self._runtime.updater.drop_gradients(tuple(names))
        self._runtime.resident_packs.clear_gradients(names)
        for copy in self._unlayered():
            for name in names:
                self._runtime.residency.clear_gradient(copy, name)

    def used(self) -> None:
        """End the step."""
        self._moved = False


class Updates:
    """Handler of these tasks, and of steps whose gradients are all there.

    Attributes:
        handlers: by kind of task.
        outcome: of the step that runs.
    """

    def __init__(self, runtime: Runtime, copies: Mapping[int, DeviceCopy], gathered: GatheredGradients) -> None:
        """Work with `copies`: by pack, what is on the device now."""
        self._runtime = runtime
        self._copies = copies
        self._gathered = gathered
        self._plan = NOTHING
        self._held_transfers = 0  # of it
        self._held: int | None = None  # transfers that wait for something else than their update; None: all may
        self._sends: Counter[int] = Counter()  # pack -> how often its gradients leave in the plan
        self._to_send: Counter[int] = Counter()  # and are still to leave
        self._reduced: dict[int, dict[str, Tensor]] = {}  # pack -> this device's pieces of its gradients
        self._left: dict[int, PostedGradients] = {}  # pack -> its gradients, which are to be reduced on the host
        self._leaving: dict[int, tuple[list[Tensor], Event]] = {}
        self._hyper: Hyper = ()
        self._clipping: Clipping | None = None
        self.outcome = Outcome()
        self.handlers: dict[TaskKind, Callable[[Task], None]] = {
            TaskKind.REDUCE: self._reduce,
            TaskKind.SWAP_OUT: self._swap_out,
            TaskKind.FREE_GRADIENTS: lambda task: self._free(task.pack),
            TaskKind.NORM: self._norm,
            TaskKind.UPDATE: self._update,
            TaskKind.UPDATE_ON_DEVICE: self._update_on_device,
        }

    def take(self, plan: Plan) -> None:
        """Take `plan`, whose tasks come from now on."""
        self._plan, self._held_transfers = plan, plan.held_transfers
        self._sends = Counter(task.pack for task in plan.tasks if task.kind is TaskKind.SWAP_OUT)
        if self._sends:
            sent = [plan.packs[index] for index in self._sends]
            if plan.policy.reduce_on_host:
                world, nbytes = self._runtime.world, max(pack.gradient_bytes for pack in sent)
                assert isinstance(world, World)
                world.make_slots(self._runtime.device, plan.policy.gradient_slabs, nbytes)
            waiting = [pack.piece_bytes(self._runtime.world.local_rank) for pack in sent]
            self._runtime.gradients.reserve(waiting, self._held_transfers)

    def start(self, hyper: Hyper, clipping: Clipping | None) -> None:
        """Begin to run the plan, with `hyper` for updates; with `clipping`, they wait for the norm of all gradients."""
        self._hyper, self._clipping, self._to_send = hyper, clipping, self._sends.copy()
        self._held = self._held_transfers if clipping is None else None
        self._runtime.updater.begin()

    def promise_norm(self) -> None:
        """Promise the norm of all gradients, where no update waits for it: when all are made."""
        if self.outcome.norm is None:
            self._runtime.updater.add_norms(self._runtime.resident_packs.take_norms())
            self.outcome.norm = self._runtime.updater.norm_of_updates()

    def step_whole(self, clipping: Clipping) -> None:
        """Call the optimizer's own `step` over all gradients that have gathered, and have left the device."""
        optimizer, updater, outcome = self._runtime.optimizer, self._runtime.updater, self.outcome
        assert optimizer is not None
        names = tuple(optimizer.trained)
        self._gathered.to_host()
        self._runtime.resident_packs.drop()
        self._gathered.receive_own(names)
        updater.measure(names)
        outcome.norm, outcome.may_skip = updater.norm(clipping), clipping.skip_overflow
        norm = outcome.norm.result()
        gradients = updater.pop_gradients(names)
        if norm.overflow:
            return
        if norm.coefficient is not None:
            for gradient in gradients.values():
                gradient.mul_(norm.coefficient)
        outcome.updates_issued = 1  # from here on, it is not known what has been changed
        optimizer.step_whole(gradients, lambda: self._runtime.copy_masters_to_weights(gradients))

    def update_own(self, hyper: Hyper, clipping: Clipping | None) -> None:
        """Update from what the user's own backward passes left on host parameters, and nothing else."""
        optimizer, updater = self._runtime.optimizer, self._runtime.updater
        assert optimizer is not None
        if optimizer.steps_whole:
            self.step_whole(clipping or Clipping())
            return
        names = tuple(optimizer.trained)
        updater.wait_all()
        self._runtime.resident_packs.drop()
        self._gathered.receive_own(names)
        if clipping is not None:
            updater.measure(names)
            self.outcome.norm, self.outcome.may_skip = updater.norm(clipping), clipping.skip_overflow
        self.outcome.updates_issued = 1
        updater.update(0, names, hyper, self.outcome.norm)
        self.promise_norm()
        updater.wait_all()

    def abandon(self) -> None:
        """Free what is on its way, after a failure."""
        self._reduced.clear()
        self._left.clear()
        self._leaving.clear()  # after their copies: the stash has waited for those

    # ---- handlers

    def _reduce(self, task: Task) -> None:
        runtime, copy, kind = self._runtime, self._copies[task.pack], f"of pack {task.pack}"
        if self._plan.policy.reduce_on_host:
            transfer, write = runtime.gradients.reduce_posted(kind, self._left.pop(task.pack), self._held)
            runtime.updater.reduce(write)
            self._receive(task, transfer)
        else:
            residency = runtime.residency
            self._reduced[task.pack] = runtime.world.reduce(
                kind, runtime.device, copy.leaves, residency.gradients(copy), residency.accumulation_dtype
            )
        self.outcome.others_update |= self._clipping is None

    def _swap_out(self, task: Task) -> None:
        runtime, copy = self._runtime, self._copies[task.pack]
        own = runtime.residency.gradients(copy)
        if self._plan.policy.reduce_on_host:
            left = self._left[task.pack] = runtime.gradients.post(own, copy.leaves, runtime.updater.raise_failure)
            self._leaving[task.pack] = [*own.values()], left.arrived
            return
        reduced = self._reduced.pop(task.pack, None)
        gradients, producer = (own, Stream.COMPUTE) if reduced is None else (reduced, Stream.PEER)
        norms = runtime.gradients.norms_of(gradients)
        pack_bytes = self._plan.packs[task.pack].piece_bytes(runtime.world.local_rank)
        transfer = runtime.gradients.swap_out(gradients, self._held, producer, norms, pack_bytes)
        leaving = [*own.values(), *gradients.values(), *([] if norms is None else [norms])]
        self._leaving[task.pack] = leaving, transfer.arrived
        self._receive(task, transfer)

    def _receive(self, task: Task, transfer: GradientTransfer) -> None:
        """Issue the update with the pack's gradients, which are on their way to the host."""
        runtime, pack = self._runtime, self._plan.packs[task.pack]
        runtime.updater.receive(transfer)
        self._to_send[task.pack] -= 1
        if not self._to_send[task.pack]:  # the last of theirs that will come
            self._gathered.receive_own(pack.owned)
            if self._clipping is not None and pack.owned:
                runtime.updater.measure(pack.owned)

    def _free(self, pack: int) -> None:
        _, copied = self._leaving.pop(pack)
        # Their memory belongs to the compute stream: its next owner there comes after the copy.
        self._runtime.device.wait(Stream.COMPUTE, copied)

    def _norm(self, task: Task) -> None:
        assert self._clipping is not None
        store, updater = self._runtime.resident_packs, self._runtime.updater
        for pack in self._plan.packs:
            if pack.index in self._plan.policy.resident:
                self._gathered.to_device(pack.owned)
                store.measure(pack.owned)
            else:  # after the backward pass of the step's last part
                self._gathered.receive_own(pack.owned, measure=True)
        updater.add_norms(store.take_norms())
        self._runtime.world.agree("norm")  # from here on, weights change
        self.outcome.others_update = self._runtime.world.size > 1
        # Not waited for: gradients are still on their way to the host, and the caller goes on.
        self.outcome.norm, self.outcome.may_skip = updater.norm(self._clipping), self._clipping.skip_overflow

    def _update(self, task: Task) -> None:
        pack = self._plan.packs[task.pack]
        if task.pack == self._plan.packing.uncalled and self.outcome.norm is None:
            self._gathered.receive_own(pack.owned)
        self.outcome.updates_issued += 1
        self._runtime.updater.update(pack.needed_at, pack.owned, self._hyper, self.outcome.norm)

    def _update_on_device(self, task: Task) -> None:
        if self.outcome.overflow:
            self._runtime.resident_packs.clear_gradients(self._plan.packs[task.pack].owned)
            return
        self.outcome.updates_issued += 1
        norm, owned = self.outcome.norm, self._plan.packs[task.pack].owned
        coefficient = None if norm is None else norm.result().coefficient
        if norm is None:
            self._gathered.to_device(owned)
        self._runtime.timeline.computes()
        self._runtime.resident_packs.update(owned, self._hyper, coefficient, measured=norm is not None)
