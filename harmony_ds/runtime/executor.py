"""Executes a plan: a handler per kind of task, and no policy of its own.

SWAP_IN        residency.swap_in              FORWARD    lane -> layer_calls.forward, until the pack is behind it
EVICT          residency.evict                FUSED      lane -> layer_calls.attached, loss, backward
SWAP_OUT       host_gradients.swap_out        BACKWARD   glue.settle, layer_calls.backward, in reverse
FREE_GRADIENTS dropping them                  STASH_*    stash.move_out, stash.bring_in
UPDATE         updater.update                 NORM       updater.norm
UPDATE_ON_DEVICE                              device_store.update
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from harmony_ds.calls.boundary import Glue
from harmony_ds.calls.intercept import Autocast
from harmony_ds.device.base import Event, Stream
from harmony_ds.offload.host_optimizer import Hyper
from harmony_ds.offload.residency import DeviceCopy
from harmony_ds.offload.stash import StashEntry
from harmony_ds.offload.updater import Clipping
from harmony_ds.runtime.gathered import GatheredGradients
from harmony_ds.runtime.lane import Lane
from harmony_ds.runtime.micro_batch import MicroBatch, OffPlanError
from harmony_ds.runtime.parts import Parts
from harmony_ds.runtime.unlayered import Unlayered
from harmony_ds.runtime.work import UNCALLED, UNLAYERED, Outcome, Work, owners_of
from harmony_ds.scheduler.plan import Pack, Task, TaskKind

Progress = Callable[[int, int, Task], None]


class Executor:
    """Runs tasks on the calling thread."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._unlayered = Unlayered(parts)
        self._packs: tuple[Pack, ...] = ()  # whose numbers pending updates go by
        self._copies: dict[int, DeviceCopy] = {}
        self._leaving: dict[int, tuple[dict[str, Tensor], Event]] = {}
        self._to_send: Counter[int] = Counter()  # pack -> how often its gradients are still to leave
        self._hyper: Hyper = ()
        self._clipping: Clipping | None = None
        self.on_progress: Progress | None = None
        self.gathered = GatheredGradients(parts, self._unlayered)
        self.outcome = Outcome()
        self._handlers: dict[TaskKind, Callable[[Work, Task], None]] = {
            TaskKind.SWAP_IN: self._swap_in,
            TaskKind.FORWARD: self._forward,
            TaskKind.FUSED: self._fused,
            TaskKind.BACKWARD: self._backward,
            TaskKind.SWAP_OUT: self._swap_out,
            TaskKind.UPDATE: self._update,
            TaskKind.EVICT: self._evict,
            TaskKind.FREE_GRADIENTS: self._free_gradients,
            TaskKind.STASH_OUT: self._stash_out,
            TaskKind.STASH_IN: self._stash_in,
            TaskKind.NORM: self._norm,
            TaskKind.UPDATE_ON_DEVICE: self._update_on_device,
        }

    def run(self, work: Work, hyper: Hyper = (), clipping: Clipping | None = None) -> None:
        """Executes every task of `work`.

        Args:
            hyper: hyper-parameters for the updates.
            clipping: if given, updates wait for the norm of all gradients.

        Raises:
            OffPlanError: a micro-batch called a layer that `work` has no place for; nothing has been updated.
            BaseException: whatever the model, the loss, the optimizer or the device raised.
        """
        parts = self._parts
        self._hyper, self._clipping = hyper, clipping
        self._to_send = Counter(task.pack for task in work.tasks if task.kind is TaskKind.SWAP_OUT)
        self.outcome = Outcome()
        self._number_packs(work)
        self._unlayered.swap_in(work.unlayered)
        self._hold_packs(work)
        parts.random.open()
        try:
            with parts.lending.lent(self._unlayered.leaves):
                total = len(work.tasks)
                for done, (task, nbytes) in enumerate(zip(work.tasks, work.activation_bytes, strict=True)):
                    parts.device.charge(nbytes, f"the activations and gradients of task {task}")
                    try:
                        with parts.timeline.task(task), self._as_called(work, task):
                            self._handlers[task.kind](work, task)
                    finally:
                        parts.device.discharge(nbytes)
                    if self.on_progress is not None:
                        self.on_progress(done + 1, total, task)
        except BaseException:
            parts.random.undo()
            raise
        finally:
            parts.random.close()
            for index in work.policy.resident:
                del self._copies[index]

    def abandon(self) -> None:
        """After a failure: frees everything on the device but resident packs. Gradients on the host are dropped by the
        updater.
        """
        self._parts.device_store.forget_gradients()
        for copy in self._copies.values():
            self._parts.residency.evict(copy)
        self._unlayered.evict()
        self._copies.clear()
        while self._leaving:
            self._free(next(iter(self._leaving)))
        self._parts.stash.abandon()

    @contextmanager
    def _as_called(self, work: Work, task: Task) -> Iterator[None]:
        """What the calls of a micro-batch saw, around its tasks."""
        if task.micro_batch < 0:
            yield
            return
        micro_batch = work.micro_batches[task.micro_batch]
        with self._parts.calls.entered(micro_batch.state), Autocast.entered(micro_batch.backward_autocast):
            yield

    def release_unlayered(self, work: Work) -> None:
        """SWAP_OUT and EVICT of the parameters that no layer owns."""
        copy = self._unlayered.copy
        if copy is None:
            return
        with self._parts.timeline.unlayered():
            self._send(work, UNLAYERED, copy, self._unlayered.names)
        self._free(UNLAYERED)
        self._unlayered.evict()

    # ---- weights

    def _number_packs(self, work: Work) -> None:
        """Updates are waited for by the numbers of their packs, so none may be pending under another plan's."""
        if work.packs != self._packs and self._parts.updater is not None:
            self._parts.updater.wait_all()
        self._packs = work.packs

    def _hold_packs(self, work: Work) -> None:
        """Resident packs: what the host still has to update of them comes to the device once."""
        resident = work.policy.resident
        names = [work.packs[index].parameters for index in resident]
        if self._parts.updater is not None and not self._parts.device_store.holds(names):
            self._parts.updater.wait_all()
        self._copies.update(zip(resident, self._parts.device_store.hold(names), strict=True))
        for index in resident:
            self._parts.residency.follow(self._copies[index])

    def _swap_in(self, work: Work, task: Task) -> None:
        pack = work.packs[task.pack]
        if self._parts.updater is not None:
            for owner in owners_of(work.packs, pack):
                self._parts.updater.wait(owner)
        self._parts.timeline.waited()
        copy = self._copies[task.pack] = self._parts.residency.swap_in(pack.parameters)
        self._parts.residency.follow(copy)

    def _evict(self, work: Work, task: Task) -> None:
        self._parts.residency.evict(self._copies.pop(task.pack))

    def _leaves(self, pack: int) -> Mapping[str, Tensor]:
        copy = self._copies[pack]
        copy.wait(self._parts.device)
        self._parts.timeline.computes()
        return copy.leaves

    # ---- compute

    def _forward(self, work: Work, task: Task) -> None:
        micro_batch = work.micro_batches[task.micro_batch]
        pack = work.packs[task.pack]
        leaves = self._leaves(task.pack)
        if micro_batch.forwarded:  # it ended before this pack
            return
        lane = self._enter(micro_batch)
        while lane.request is not None:
            position = micro_batch.place(lane.request.layer, work.order)
            if position > pack.positions[-1]:
                return
            number = micro_batch.pass_position(position)
            outputs, call = self._parts.layer_calls.forward(
                lane.request,
                number,
                leaves,
                micro_batch.glue,
                self._parts.random.snapshot,
            )
            if call is not None:
                if not pack.needs_backward:  # it returned its input when it was measured
                    raise OffPlanError
                micro_batch.calls.append((position, call))
            if position == len(work.order) - 1 and work.parks(task):
                micro_batch.parked.append(outputs)
                return
            lane.resume(outputs)
            del outputs
        micro_batch.finish()

    def _fused(self, work: Work, task: Task) -> None:
        micro_batch = work.micro_batches[task.micro_batch]
        leaves = self._leaves(task.pack)
        if work.in_pieces:
            # One graph of all rows would need the memory that pieces save: this pack is recomputed as the others are.
            self._forward(work, task)
        elif not micro_batch.forwarded:
            lane = self._enter(micro_batch)
            while lane.request is not None:
                micro_batch.pass_position(micro_batch.place(lane.request.layer, work.order))
                lane.resume(self._parts.layer_calls.attached(lane.request, leaves))
            micro_batch.finish()
        self._propagate_loss(micro_batch)
        if not work.packs[task.pack].needs_backward and any(leaf.grad is not None for leaf in leaves.values()):
            raise OffPlanError  # it returned its input when it was measured
        if work.in_pieces:
            self._backward(work, task)
            return
        self._settle(micro_batch)
        self._accumulate(task.pack)

    def _propagate_loss(self, micro_batch: MicroBatch) -> None:
        loss = micro_batch.objective(micro_batch.outputs)
        micro_batch.outputs = None
        if loss is not None and loss.requires_grad:
            glue = micro_batch.glue
            loss.backward(retain_graph=not glue.is_trivial and glue.touches(loss))

    def _run_to_end(self, micro_batch: MicroBatch) -> None:
        """What comes behind the last call."""
        if micro_batch.parked:  # it may have ended without that call
            lane = self._enter(micro_batch)
            lane.resume(micro_batch.parked.pop())
            if lane.request is not None:
                raise OffPlanError
            micro_batch.finish()

    def _backward(self, work: Work, task: Task) -> None:
        micro_batch = work.micro_batches[task.micro_batch]
        leaves = self._leaves(task.pack)
        if work.parks(task):
            self._run_to_end(micro_batch)
            self._propagate_loss(micro_batch)
        for call in micro_batch.take_calls(work.packs[task.pack]):
            micro_batch.glue.settle(call.number)
            self._parts.layer_calls.backward(
                call, leaves, self._parts.random.replay, lambda: self._accumulate(task.pack)
            )
            call.propagated()
        self._settle(micro_batch)
        self._accumulate(task.pack)

    def _settle(self, micro_batch: MicroBatch) -> None:
        """Once every layer is behind: what is left leads to resident parameters and to the user's own leaves."""
        if not micro_batch.calls:
            micro_batch.glue.settle(-1)
            micro_batch.glue = Glue()

    def _accumulate(self, pack: int) -> None:
        self._parts.residency.accumulate(self._copies[pack])
        self._unlayered.accumulate()

    def _enter(self, micro_batch: MicroBatch) -> Lane:
        """The micro-batch's lane, with its random stream current; started if it was not."""
        if micro_batch.lane is None:
            self._parts.random.start(micro_batch, micro_batch.seed)
            micro_batch.lane = Lane(
                micro_batch.forward, micro_batch.grad, micro_batch.autocast, self._parts.device, micro_batch.context
            )
            micro_batch.lane.resume()
        else:
            self._parts.random.switch(micro_batch)
        return micro_batch.lane

    # ---- stash

    def _stash_out(self, work: Work, task: Task) -> None:
        self._parts.stash.move_out(_entries(work, task))

    def _stash_in(self, work: Work, task: Task) -> None:
        self._parts.stash.bring_in(_entries(work, task))

    # ---- gradients and updates

    def _swap_out(self, work: Work, task: Task) -> None:
        self._to_send[task.pack] -= 1
        complete = not self._to_send[task.pack]
        self._send(work, task.pack, self._copies[task.pack], work.packs[task.pack].owned if complete else ())
        self._wait_for_host(work)

    def _send(self, work: Work, pack: int, copy: DeviceCopy, owned: tuple[str, ...]) -> None:
        """`owned`: parameters of which this is the last that will come."""
        assert self._parts.gradients is not None and self._parts.updater is not None
        gradients = self._parts.world.reduce(
            f"pack {pack}", self._parts.device, copy.leaves, self._parts.residency.gradients(copy)
        )
        self.outcome.others_update |= self._clipping is None and self._parts.world.size > 1
        delivery = self._parts.gradients.swap_out(gradients, work.held_deliveries if self._clipping is None else None)
        self._leaving[pack] = (gradients, delivery.arrived)
        self._parts.updater.receive(delivery)
        self.gathered.receive_own(owned)
        if self._clipping is not None and owned:
            self._parts.updater.measure(owned)

    def _wait_for_host(self, work: Work) -> None:
        """Where updates do not overlap: until the host has done what it was asked for."""
        if not work.policy.overlap_update and self._parts.updater is not None:
            self._parts.updater.wait_all()

    def _free_gradients(self, work: Work, task: Task) -> None:
        self._free(task.pack)

    def _free(self, pack: int) -> None:
        _, copied = self._leaving.pop(pack)
        # Their memory belongs to the compute stream: its next owner there comes behind the copy.
        self._parts.device.wait(Stream.COMPUTE, copied)

    def _norm(self, work: Work, task: Task) -> None:
        assert self._parts.updater is not None and self._clipping is not None
        self.release_unlayered(work)
        store, updater = self._parts.device_store, self._parts.updater
        for pack in work.packs:
            if pack.index in work.policy.resident:
                self.gathered.to_device(pack.owned)
                store.measure(pack.owned)
            else:  # behind the backward pass of the step's last part
                self.gathered.receive_own(pack.owned, measure=True)
        self.gathered.receive_own(work.uncalled, measure=True)
        updater.add_norms(store.take_norms())
        self._parts.world.agree("norm")
        self.outcome.others_update = self._parts.world.size > 1
        self.outcome.norm = updater.norm(self._clipping)
        if self._clipping.skip_overflow and self.outcome.norm.result().overflow:
            self.outcome.overflow = True
            updater.discard()
            store.forget_gradients()

    def _update(self, work: Work, task: Task) -> None:
        assert self._parts.updater is not None
        if self.outcome.overflow:
            return
        self.outcome.updates_issued += 1
        self._parts.updater.update(task.pack, work.packs[task.pack].owned, self._hyper, self.outcome.norm)
        self._wait_for_host(work)

    def _update_on_device(self, work: Work, task: Task) -> None:
        if self.outcome.overflow:
            return
        self.outcome.updates_issued += 1
        coefficient = None if self.outcome.norm is None else self.outcome.norm.result().coefficient
        owned = work.packs[task.pack].owned
        if self.outcome.norm is None:
            self.gathered.to_device(owned)
        self._parts.timeline.computes()
        self._parts.device_store.update(owned, self._hyper, coefficient, measured=self.outcome.norm is not None)

    def _update_uncalled(self, work: Work) -> None:
        if not work.uncalled or self._parts.updater is None or self.outcome.overflow:
            return
        if self.outcome.norm is None:
            self.gathered.receive_own(work.uncalled)
        self._parts.updater.update(UNCALLED, work.uncalled, self._hyper, self.outcome.norm)

    def finish_step(self, work: Work) -> None:
        """What no layer owns leaves the device (unless the norm needed it earlier) and is updated; the norm is promised."""
        self.release_unlayered(work)
        updater = self._parts.updater
        if work.unlayered and updater is not None and not self.outcome.overflow:
            self.outcome.updates_issued += 1
            with self._parts.timeline.unlayered():
                updater.update(UNLAYERED, work.unlayered, self._hyper, self.outcome.norm)
        self._update_uncalled(work)
        if self.outcome.norm is None and updater is not None:
            updater.add_norms(self._parts.device_store.take_norms())
            self.outcome.norm = updater.norm_of_updates()
        self._wait_for_host(work)

    def release(self, work: Work | None) -> Outcome:
        """Before a step that the executor does not take: the gradients on the device leave it. What is to be told of it."""
        self.outcome = Outcome()
        if work is not None:
            self.release_unlayered(work)
        return self.outcome

    def finish_forward(self) -> None:
        """After a step without gradients: the device is free of what no layer owns."""
        self._unlayered.evict()


def _entries(work: Work, task: Task) -> list[StashEntry]:
    calls = work.micro_batches[task.micro_batch].calls_in(work.packs[task.pack])
    return [entry for call in calls for entry in call.entries]


__all__ = ["Executor", "OffPlanError"]
