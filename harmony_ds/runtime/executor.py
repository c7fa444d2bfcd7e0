"""Execute a plan: a handler per kind of task, and no policy of its own.

SWAP_IN    residency.swap_in         FORWARD    lane -> layer_calls.forward, until it has passed the pack;
                                                FORWARD_FOR_GRAPH as well, and BACKWARD_FROM_GRAPH as BACKWARD
GATHER     world.gather              FUSED      lane -> layer_calls.run_attached, loss, backward
EVICT      residency.evict           BACKWARD   inter_layer.propagate_due, layer_calls.backward, in reverse
STASH_*    stash.swap_out, .swap_in

What becomes of the gradients is `updates`'.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor, nn

from harmony_ds.device.base import HOME, Stream
from harmony_ds.errors import ModelError, UnsupportedError
from harmony_ds.model.boundary import on_one_thread
from harmony_ds.model.checkpointing import checkpoints_bypassed
from harmony_ds.model.intercept import Autocast, Request
from harmony_ds.model.own_settings import Trained, both_trained, trained_by
from harmony_ds.model.trees import map_tensors
from harmony_ds.offload.residency import DeviceCopy, Leaves
from harmony_ds.offload.stash import StashEntry
from harmony_ds.optim.host_optimizer import Hyper
from harmony_ds.optim.updater import Clipping
from harmony_ds.runtime.garbage import collection_within_steps
from harmony_ds.runtime.lane import Lane
from harmony_ds.runtime.micro_batch import MicroBatch, OffPlanError
from harmony_ds.runtime.runtime import Runtime
from harmony_ds.runtime.updates import GatheredGradients, Outcome, Updates
from harmony_ds.scheduler.plan import EMPTY_PLAN, Pack, Plan, Task, TaskKind

_USING_GRADIENTS = (TaskKind.SWAP_OUT, TaskKind.REDUCE, TaskKind.NORM, TaskKind.UPDATE, TaskKind.UPDATE_ON_DEVICE)
OnTask = Callable[[int, int, Task], None]
"""Called after each task with the number of the step's tasks that are done, the number of all, and the task."""


class Executor:
    """Runner of a plan's tasks, on the calling thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._collection = collection_within_steps()
        self._plan = EMPTY_PLAN
        self._first = 0  # task of a micro-batch, as what follows
        self._needs_backward: dict[int, bool] = {}  # by position
        self._buffers: dict[nn.Module, int] = {}  # of several devices: the one that a module's buffers are on
        self._micro_batches: Mapping[int, MicroBatch] = {}
        self._copies: dict[int, DeviceCopy] = {}
        self._done = 0  # tasks
        self._before: list[DeviceCopy] = []  # what was on the device when they began
        self.propagated = False
        """Whether the plan that was run last has begun to propagate back."""
        self._told: OnTask | None = None
        self.gathered = GatheredGradients(runtime)
        self.updates = Updates(runtime, self.gathered)
        self._handlers: dict[TaskKind, Callable[[Task], None]] = {
            TaskKind.SWAP_IN: self._swap_in,
            TaskKind.GATHER: self._gather,
            TaskKind.FORWARD: self._forward,
            TaskKind.FUSED: self._fused,
            TaskKind.BACKWARD: self._backward,
            TaskKind.FORWARD_FOR_GRAPH: self._forward,
            TaskKind.BACKWARD_FROM_GRAPH: self._backward,
            TaskKind.EVICT: self._evict,
            TaskKind.STASH_OUT: lambda task: runtime.stash.swap_out(self._entries(task)),
            TaskKind.STASH_IN: lambda task: runtime.stash.swap_in(self._entries(task)),
            TaskKind.MOVE: self._move,
            TaskKind.MOVE_BACK: self._move_back,
            TaskKind.REDUCE: self._reduce,
            TaskKind.SWAP_OUT: self._swap_out,
            TaskKind.FREE_GRADIENTS: self.updates.free_gradients,
            TaskKind.NORM: self.updates.norm,
            TaskKind.UPDATE: self.updates.update,
            TaskKind.UPDATE_ON_DEVICE: self.updates.update_on_device,
        }

    @property
    def begun(self) -> bool:
        """Whether a plan that has been run left the unlayered parameters on the device, for another one to go on with."""
        return bool(self._unlayered)

    def run(
        self, plan: Plan, micro_batches: Sequence[MicroBatch], hyper: Hyper = (), clipping: Clipping | None = None
    ) -> None:
        """Execute every task of `plan`, in its order.

        Args:
            micro_batches: those of the plan's tasks.
            hyper: hyper-parameters for the updates.
            clipping: if given, updates wait for the norm of all gradients.

        Raises:
            OffPlanError: a micro-batch called a layer that `plan` has no place for; nothing has been updated.
        """
        runtime = self._runtime
        with runtime.device.as_current(), self._collection(), checkpoints_bypassed(), on_one_thread():
            self._take(plan)
            self._done = 0
            self.accumulate_unlayered()
            self.updates.start(hyper, clipping)
            self._hold_packs()
            self._micro_batches = {micro_batch.index: micro_batch for micro_batch in micro_batches}
            runtime.random.open()
            try:
                tasks = zip(plan.tasks, plan.activation_bytes, strict=True)
                self._execute(islice(tasks, self._first))
                if self._first < len(plan.tasks):  # what modules show meanwhile has been swapped in by now
                    unlayered = {name: leaf for copy in self._unlayered for name, leaf in copy.leaves.items()}
                    with runtime.installation.installed(unlayered, places=self._buffers):
                        self._execute(tasks)
                runtime.device.enter(HOME)
                if not self.propagated:
                    runtime.random.check_drawn()
            finally:
                runtime.device_transfers.finish()
                runtime.joins.forget()
                runtime.random.close()
                self._micro_batches = {}
                for index in plan.policy.resident:
                    del self._copies[index]

    def _execute(self, tasks: Iterable[tuple[Task, int]]) -> None:
        """Run tasks with the bytes that each works with: one of a micro-batch in the modes that it was called in."""
        runtime, contract = self._runtime, self._runtime.contract
        for task, nbytes in tasks:
            handler, micro_batch = self._handlers[task.kind], self._micro_batches.get(task.micro_batch)
            runtime.device.enter(self._plan.packs[task.pack].device)
            runtime.device.charge(nbytes, "the activations and gradients of a task")
            try:
                with runtime.timeline.task(task):
                    if micro_batch is None:
                        if task.kind in _USING_GRADIENTS:
                            runtime.joins.check()
                        handler(task)
                    else:
                        micro_batch.at_work = True
                        with contract.entered(micro_batch.state), Autocast.entered(micro_batch.backward_autocast):
                            self._apply_user_settings(task.pack)
                            handler(task)
                            for copy in self._unlayered:
                                runtime.residency.check_user_settings(copy)
            finally:
                if micro_batch is not None:
                    micro_batch.at_work = False
                runtime.device.discharge(nbytes)
            self._done += 1
            if self._told is not None:
                self._told(self._done, len(self._plan.tasks), task)

    def _apply_user_settings(self, pack: int) -> None:
        """Give what the device holds of a pack, and the unlayered parameters, `requires_grad` and hooks of the program."""
        copies = self._unlayered
        if pack in self._copies:
            copies.append(self._copies[pack])
        for copy in copies:
            self._runtime.residency.apply_user_settings(copy, self._runtime.contract.modes)

    def on_progress(self, callback: OnTask | None) -> None:
        """Have `callback(done, total, task)`, and no other, called after each task of a step."""
        self._told = callback

    def begin(self) -> None:
        """Begin a step, or a part of one."""
        self._before, self.propagated = self._unlayered, False
        self.updates.outcome = Outcome()

    def abandon_run(self) -> None:
        """Free what the last plan has brought to the device, after a failure before anything was propagated back.

        What earlier plans of the same step have left is as it was.
        """
        for pack, copy in list(self._copies.items()):
            if copy not in self._before:
                self._free(pack)
        self._runtime.stash.abandon()

    def abandon(self) -> None:
        """Free everything on the device but resident packs, after a failure; the updater drops gradients on the host."""
        self._runtime.stash.abandon()
        self._runtime.resident_packs.clear_gradients()
        for pack in list(self._copies):
            self._free(pack)
        self.updates.abandon()
        self._runtime.device.enter(HOME)

    def _free(self, pack: int) -> None:
        self._runtime.device.enter(self._plan.packs[pack].device)
        self._runtime.residency.evict(self._copies.pop(pack))

    # ---- weights

    def _take(self, plan: Plan) -> None:
        """Work out what all tasks of `plan` need to know of it."""
        if plan is self._plan:
            return
        if plan.packs != self._plan.packs:
            # Updates are waited for by the places of their packs, so none may be pending under another plan's.
            self._runtime.updater.wait_all()
            always = dict(zip([pack.index for pack in plan.packing.unlayered_packs], self._unlayered, strict=False))
            self._copies.clear()
            self._copies.update(always)
            for index, copy in self._copies.items():  # more may have turned out to be used between layers
                self._runtime.residency.add_parameters(copy, plan.packs[index].parameters)
        self._plan = plan
        tasks = enumerate(plan.tasks)
        self._first = next((place for place, task in tasks if task.micro_batch >= 0), len(plan.tasks))
        packs = [plan.packs[index] for index in plan.packing.backward]
        self._needs_backward = {position: pack.needs_backward for pack in packs for position in pack.positions}
        if self._runtime.device.count > 1:
            devices: defaultdict[int, list[int]] = defaultdict(list)
            for pack in plan.packing.covering:
                for layer in pack.layers:
                    devices[layer].append(pack.device)
            unlayered = [name for pack in plan.packing.unlayered_packs for name in pack.parameters]
            self._buffers = self._runtime.layer_calls.place_buffers(devices, unlayered)
        self.updates.load_plan(plan)

    @property
    def _unlayered(self) -> list[DeviceCopy]:
        """The copy of the unlayered parameters, while it is on the device."""
        return [self._copies[pack.index] for pack in self._plan.packing.unlayered_packs if pack.index in self._copies]

    def _hold_packs(self) -> None:
        """Bring resident packs to the device, once, when the host has updated them."""
        resident = self._plan.policy.resident
        names = [self._plan.packs[index].parameters for index in resident]
        if not self._runtime.resident_packs.holds(names):
            self._runtime.updater.wait_all()
        self._copies.update(zip(resident, self._runtime.resident_packs.make_resident(names), strict=True))
        for index in resident:
            self._copies[index].modes = None  # hooks may have been registered

    def _swap_in(self, task: Task) -> None:
        pack, world, shared = self._plan.packs[task.pack], self._runtime.world, self._plan.policy.shared
        for owner in self._plan.owners_of(pack):
            self._runtime.updater.wait(owner.needed_at)
        self._runtime.timeline.waited()
        rank, devices = (world.local_rank, world.local_size) if shared else (0, 1)
        self._copies[task.pack] = self._runtime.residency.swap_in(pack.parameters, rank=rank, devices=devices)
        if not shared:
            self._came(pack)

    def _gather(self, task: Task) -> None:
        device, copy = self._runtime.device, self._copies[task.pack]
        if (arrived := copy.pop_arrival()) is not None:
            device.wait(Stream.PEER, arrived)
        self._runtime.world.gather(f"pack {task.pack}", device, copy.buffer)
        copy.arrived = device.record(Stream.PEER)
        self._came(self._plan.packs[task.pack])

    def _came(self, pack: Pack) -> None:
        if not pack.positions:  # used by code that asks for nothing first
            self._copies[pack.index].wait(self._runtime.device)

    def _evict(self, task: Task) -> None:
        if not self._plan.packs[task.pack].positions:  # which may be on its way to other devices
            self._runtime.device_transfers.finish()
        self._runtime.residency.evict(self._copies.pop(task.pack))

    def _leaves(self, pack: int) -> Leaves:
        copy = self._copies[pack]
        copy.wait(self._runtime.device)
        self._runtime.timeline.computes()
        return copy.leaves

    # ---- compute

    def _forward(self, task: Task) -> None:
        micro_batch, leaves = self._micro_batches[task.micro_batch], self._leaves(task.pack)
        if micro_batch.forwarded:  # it ended before this pack
            return
        lane = self._enter(micro_batch)
        lane.run_on(
            partial(micro_batch.place, self._plan.calls),
            partial(self._answer_cut, task, micro_batch, leaves),
            self._plan.packs[task.pack].positions[-1],
        )
        if lane.finished:
            micro_batch.finish()
            # A fused pack propagates back at once; so does that of those that share a loss, when the last one is there.
            if task.kind is not TaskKind.FUSED and not micro_batch.sharing:
                micro_batch.outputs = map_tensors(
                    partial(self._runtime.device_transfers.move, place=HOME), micro_batch.outputs
                )

    def _answer_cut(self, task: Task, micro_batch: MicroBatch, leaves: Leaves, request: Request, position: int) -> Any:
        """Return the outputs, cut from their graph, of a layer call."""
        number = micro_batch.pass_position(position)
        self._train(task.pack, request)
        layer_calls, inter_layer = self._runtime.layer_calls, micro_batch.inter_layer
        read_state = self._runtime.random.snapshot
        if task.kind is TaskKind.FORWARD_FOR_GRAPH:
            outputs, call = layer_calls.forward_with_graph(request, number, leaves, inter_layer, read_state)
        else:
            outputs, call = layer_calls.forward(request, number, leaves, inter_layer, read_state, self._plan.rows)
        if call is not None:
            if not self._needs_backward[position]:  # it returned its input when it was measured
                raise OffPlanError
            micro_batch.calls.append((position, call))
        return outputs

    def _answer_attached(
        self, task: Task, micro_batch: MicroBatch, leaves: Leaves, request: Request, position: int
    ) -> Any:
        """Return the outputs of a layer call as part of the micro-batch's graph."""
        micro_batch.pass_position(position)
        self._train(task.pack, request)
        return self._runtime.layer_calls.run_attached(request, leaves)

    def _fused(self, task: Task) -> None:
        plan, micro_batch = self._plan, self._micro_batches[task.micro_batch]
        leaves = self._leaves(task.pack)
        self._begin_shared_loss(task)
        if plan.rows.cuts:
            # One graph of all rows would need the memory that slices save: this pack is recomputed as the others are.
            self._forward(task)
        elif not micro_batch.forwarded:
            place = partial(micro_batch.place, plan.calls)
            self._enter(micro_batch).run_on(place, partial(self._answer_attached, task, micro_batch, leaves))
            micro_batch.finish()
        if self._runtime.random.has(micro_batch):  # its lane may have ended in an earlier pack
            self._runtime.random.switch(micro_batch)
        self.propagated = True
        self._set_trained(task.pack, trained_by(micro_batch.own))
        with (self._runtime.device_transfers.between_layers or nullcontext)():
            try:
                micro_batch.propagate_loss()
            except ModelError:  # a loss that is not its own, of calls that should not have been joined
                self._runtime.joins.check()
                raise
        self._runtime.random.check_drawn()
        self._runtime.joins.issue_checks()
        if not plan.packs[task.pack].needs_backward and any(leaf.grad is not None for leaf in leaves.values()):
            raise OffPlanError  # it returned its input when it was measured
        if plan.rows.cuts:
            self._backward(task)
            return
        micro_batch.settle()
        self._accumulate(task.pack)

    def _backward(self, task: Task) -> None:
        micro_batch = self._micro_batches[task.micro_batch]
        leaves = self._leaves(task.pack)
        if task.kind is not TaskKind.FUSED:
            self._begin_shared_loss(task)
        self.propagated = True
        for call in micro_batch.take_calls(self._plan.packs[task.pack]):
            micro_batch.inter_layer.propagate_due(call.number)
            owned = call.request.own is not None or micro_batch.own is not None
            if owned or self._copies[task.pack].modes is not self._runtime.contract.modes:
                self._set_trained(task.pack, both_trained(call.request.own, micro_batch.own))
            self._runtime.layer_calls.backward(
                call, leaves, self._runtime.random.replay, lambda: self._accumulate(task.pack)
            )
            call.propagated()
        micro_batch.settle()
        self._accumulate(task.pack)
        if micro_batch.sharing and micro_batch is micro_batch.sharing[0]:
            self._runtime.residency.end_shared_loss(self._copies[task.pack])

    def _begin_shared_loss(self, task: Task) -> None:
        """Let the gradients of those that share a loss add up by themselves first, as in one backward pass of autograd."""
        micro_batch = self._micro_batches[task.micro_batch]
        if micro_batch.sharing and micro_batch is micro_batch.sharing[-1]:
            self._runtime.residency.begin_shared_loss(self._copies[task.pack])

    def _train(self, pack: int, request: Request) -> None:
        """Give the pack's copies the `requires_grad` that the caller of a layer has set for itself.

        Raises:
            UnsupportedError: a parameter that is not trained would get a gradient.
        """
        if not request.grad or (request.own is None and self._copies[pack].modes is self._runtime.contract.modes):
            return
        trained = trained_by(request.own)
        self._set_trained(pack, trained)
        optimizer = self._runtime.optimizer
        if not trained or optimizer is None:
            return
        for name in self._runtime.residency.names_trained_by(trained, self._copies[pack]):
            if not optimizer.trains(name):
                raise UnsupportedError(
                    f"forward sets requires_grad of {name}, which is not trained by this engine: it did not require a "
                    "gradient, or was not among the optimizer's parameters, when initialize was called. Call layers that "
                    "use it under torch.no_grad(), or let it be trained at initialize."
                )

    def _set_trained(self, pack: int, trained: Trained) -> None:
        modes = trained or self._runtime.contract.modes
        self._runtime.residency.apply_user_settings(self._copies[pack], modes, trained)

    def _accumulate(self, pack: int) -> None:
        self._runtime.residency.accumulate(self._copies[pack])
        self.accumulate_unlayered()

    def accumulate_unlayered(self) -> None:
        """Add to their sums the gradients that a backward pass, also of the program's own, left on unlayered parameters."""
        for copy in self._unlayered:
            self._runtime.residency.accumulate(copy)

    def _enter(self, micro_batch: MicroBatch) -> Lane:
        """Return the micro-batch's lane, started, and make its random stream current."""
        if micro_batch.lane is not None:
            self._runtime.random.switch(micro_batch)
            return micro_batch.lane
        self._runtime.random.start(micro_batch, micro_batch.seed)
        return micro_batch.start(self._runtime.device, self._runtime.device_transfers.between_layers)

    # ---- gradients

    def _reduce(self, task: Task) -> None:
        self.updates.reduce(task, self._copies[task.pack])

    def _swap_out(self, task: Task) -> None:
        self.updates.swap_out(task, self._copies[task.pack])

    def gathered_gradient(self, name: str) -> Tensor | None:
        """Return the gradient of `name` that has gathered in this step: the tensor itself; None: there is none."""
        return self.gathered.find(name, self._unlayered)

    def discard_gathered(self, names: Iterable[str]) -> None:
        """Drop the gradients of `names` that have gathered in this step."""
        self.gathered.discard(names, self._unlayered)

    # ---- between devices

    def _move(self, task: Task) -> None:
        """Move what the micro-batch hands to the next pack to that pack's device, while others compute."""
        if (lane := self._micro_batches[task.micro_batch].lane) is not None:
            self._runtime.device_transfers.to_current(lane.waiting_tensors())

    def _move_back(self, task: Task) -> None:
        """Move gradients of the pack's outputs back to its device."""
        micro_batch = self._micro_batches[task.micro_batch]
        if calls := micro_batch.calls_in(self._plan.packs[task.pack]):
            micro_batch.inter_layer.propagate_due(calls[-1].number)

    def _entries(self, task: Task) -> list[StashEntry]:
        calls = self._micro_batches[task.micro_batch].calls_in(self._plan.packs[task.pack])
        return [entry for call in calls for entry in call.entries]
