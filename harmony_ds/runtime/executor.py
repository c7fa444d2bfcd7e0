"""Runs the tasks of a plan one after the other, in the plan's order. What to do when is decided by the scheduler alone.

`Executor.run` goes through the tasks; each kind of task has a handler, a method of `Executor` or of `GradientTasks`:

    SWAP_IN             wait until the host has updated the pack's weights, and copy them to the device
    GATHER              bring together the shares of a pack's weights that several processes have swapped in
    EVICT               free the device copies of a pack's weights
    FORWARD             run a micro-batch through a pack, from stash to stash: its lane goes on until it has passed the pack
    FORWARD_FOR_GRAPH   the same, keeping the autograd graph
    FUSED               run a micro-batch through the last pack, its loss and its backward pass through that pack
    BACKWARD            run a pack's layer calls again from the stash, last one first, and propagate gradients through each
    BACKWARD_FROM_GRAPH the same, through the graph that was kept
    STASH_OUT, STASH_IN move a micro-batch's stash for a pack to the host, and back
    CROSSING_OUT, _IN   move what a micro-batch holds between two packs to the host, and back; on the way back through the
                        model: CROSSING_GRADIENTS_OUT, _IN
    MOVE, MOVE_BACK     move activations, or gradients of them, from one device to another

The handlers of REDUCE, SWAP_OUT, FREE_GRADIENTS, NORM, UPDATE and UPDATE_ON_DEVICE are in `gradient_tasks`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor, nn

from harmony_ds.device.base import HOME, Stream
from harmony_ds.errors import ModelError, UnsupportedError
from harmony_ds.model.checkpointing import checkpoints_bypassed
from harmony_ds.model.contract import UnseenError
from harmony_ds.model.graph_cut import on_one_thread
from harmony_ds.model.intercept import Autocast, Request
from harmony_ds.model.own_settings import TrainedFlags, both_trained, trained_by
from harmony_ds.model.token_tensor import TokenTensor
from harmony_ds.model.trees import map_tensors, tensors_in
from harmony_ds.offload.device_copies import DeviceCopy, Leaves
from harmony_ds.offload.stash import StashEntry
from harmony_ds.optim.host_optimizer import Hyper
from harmony_ds.optim.updater import NormOptions
from harmony_ds.runtime.accumulated_gradients import AccumulatedGradients
from harmony_ds.runtime.failure import FailedCall, TaskFailure
from harmony_ds.runtime.garbage import collection_within_steps
from harmony_ds.runtime.gradient_tasks import GradientTasks
from harmony_ds.runtime.lane import AnyLane
from harmony_ds.runtime.leftovers import Leftovers
from harmony_ds.runtime.micro_batch import MicroBatch, OffPlanError
from harmony_ds.runtime.outcome import Outcome
from harmony_ds.runtime.runtime import Runtime
from harmony_ds.scheduler.plan import EMPTY_PLAN, RUNS, Pack, Plan, Task, TaskKind

_GRADIENT_TASKS = (TaskKind.SWAP_OUT, TaskKind.REDUCE, TaskKind.NORM, TaskKind.UPDATE, TaskKind.UPDATE_ON_DEVICE)
ProgressCallback = Callable[[int, int, Task], None]
"""Called after each task with the number of the plan's tasks that are done, the number of all, and the task."""


class Executor:
    """Runner of a plan's tasks, on the calling thread.

    Attributes:
        backward_begun: whether a backward pass has begun since `begin`: the gradients of the step are not what they were.
        accumulated_gradients: those of a step that runs in parts.
        gradient_tasks: the handlers of gradients' tasks.
        failure: the task of a micro-batch that has raised an error since `begin`.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._collection = collection_within_steps()
        self._progress_callback: ProgressCallback | None = None
        # Of the plan that runs, or was run last:
        self._plan = EMPTY_PLAN
        self._is_loaded = True
        self._first_micro_batch_task = 0  # the number of its first task that is a micro-batch's
        self._last_fused: Task | None = None
        self._needs_backward: dict[int, bool] = {}  # position of a layer call -> whether gradients flow through it
        # Where there are several devices: module -> the one that has its buffers.
        self._buffer_devices: dict[nn.Module, int] = {}
        self._micro_batches: Mapping[int, MicroBatch] = {}  # by the numbers that tasks have
        self._tasks_done = 0
        # Of the step:
        self._copies: dict[int, DeviceCopy] = {}  # pack -> its weights that are on the device now
        self._copies_at_begin: list[DeviceCopy] = []  # those that an earlier plan of the step left there
        self.backward_begun = False
        self.failure: TaskFailure | None = None
        self._failed_backward: FailedCall | None = None
        self.accumulated_gradients = AccumulatedGradients(runtime)
        self.gradient_tasks = GradientTasks(runtime, self.accumulated_gradients)
        self._handlers: dict[TaskKind, Callable[[Task], None]] = {
            TaskKind.SWAP_IN: self._swap_in,
            TaskKind.GATHER: self._gather,
            TaskKind.FORWARD: self._forward,
            TaskKind.FUSED: self._fused,
            TaskKind.BACKWARD: self._backward,
            TaskKind.FORWARD_FOR_GRAPH: partial(self._forward, keeps_graph=True),
            TaskKind.BACKWARD_FROM_GRAPH: self._backward,
            TaskKind.EVICT: self._evict,
            TaskKind.STASH_OUT: self._stash_out,
            TaskKind.STASH_IN: self._stash_in,
            TaskKind.CROSSING_OUT: self._crossing_out,
            TaskKind.CROSSING_IN: self._crossing_in,
            TaskKind.CROSSING_GRADIENTS_OUT: self._crossing_gradients_out,
            TaskKind.CROSSING_GRADIENTS_IN: self._crossing_in,
            TaskKind.MOVE: self._move,
            TaskKind.MOVE_BACK: self._move_back,
            TaskKind.REDUCE: self._reduce,
            TaskKind.SWAP_OUT: self._swap_out,
            TaskKind.FREE_GRADIENTS: self.gradient_tasks.free_gradients,
            TaskKind.NORM: self.gradient_tasks.norm,
            TaskKind.UPDATE: self.gradient_tasks.update,
            TaskKind.UPDATE_ON_DEVICE: self.gradient_tasks.update_on_device,
        }

    @property
    def has_unlayered(self) -> bool:
        """Whether an earlier plan of the step has left the unlayered parameters on the device, for the next one to use."""
        return bool(self._unlayered)

    def run(
        self,
        plan: Plan,
        micro_batches: Sequence[MicroBatch],
        hyper: Hyper = (),
        norm_options: NormOptions | None = None,
    ) -> None:
        """Execute every task of `plan`, in its order.

        Args:
            micro_batches: those of the plan's tasks.
            hyper: hyper-parameters for the updates.
            norm_options: if given, updates wait for the norm of all gradients.

        Raises:
            OffPlanError: a micro-batch called a layer that `plan` has no place for; nothing has been updated.
        """
        runtime = self._runtime
        with runtime.device.as_current(), self._collection(), checkpoints_bypassed(), on_one_thread():
            self._load_plan(plan)
            self._tasks_done = 0
            self.accumulate_unlayered()
            self.gradient_tasks.start(hyper, norm_options)
            self._bring_resident_packs()
            self._micro_batches = {micro_batch.index: micro_batch for micro_batch in micro_batches}
            runtime.random.open()
            try:
                tasks = zip(plan.tasks, plan.activation_bytes, strict=True)
                self._execute(islice(tasks, self._first_micro_batch_task))
                if self._first_micro_batch_task < len(plan.tasks):
                    # The swap-in of the unlayered parameters is among the tasks so far: modules can show them now.
                    unlayered = {name: leaf for copy in self._unlayered for name, leaf in copy.leaves.items()}
                    with runtime.installation.installed(unlayered, places=self._buffer_devices):
                        self._execute(tasks)
                        if not self.backward_begun:  # else FUSED has checked it
                            self._check_forward()  # before buffers are copied back: the run may be made again
                runtime.device.enter(HOME)
            finally:
                runtime.layer_calls.close_heads()
                runtime.joins.discard_checks()
                runtime.random.close()
                self._micro_batches = {}
                for index in plan.policy.resident:
                    del self._copies[index]
                runtime.device_transfers.finish()  # last: a device that has failed raises its error here

    def _execute(self, tasks: Iterable[tuple[Task, int]]) -> None:
        """Run tasks, each on its pack's device, with the bytes that it may take beside weights."""
        runtime = self._runtime
        for task, nbytes in tasks:
            runtime.device.enter(self._plan.packs[task.pack].device)
            runtime.device.charge(nbytes, "the activations and gradients of a task")
            try:
                with runtime.timeline.task(task):
                    if task.micro_batch < 0:
                        if task.kind in _GRADIENT_TASKS:
                            runtime.joins.check()
                        self._handlers[task.kind](task)
                    else:
                        micro_batch = self._micro_batches[task.micro_batch]
                        with (
                            runtime.contract.entered(micro_batch.state),
                            Autocast.entered(micro_batch.backward_autocast),
                        ):
                            self._prepare(task, micro_batch)
                            self._handlers[task.kind](task)
                            self._finish(task)
            except BaseException as error:
                self._note_failure(task, error)
                raise
            finally:
                if task.micro_batch >= 0:
                    self._micro_batches[task.micro_batch].is_at_work = False
                runtime.device.discharge(nbytes)
            self._tasks_done += 1
            if self._progress_callback is not None:
                self._progress_callback(self._tasks_done, len(self._plan.tasks), task)

    def _prepare(self, task: Task, micro_batch: MicroBatch) -> None:
        """Bring to the device what a task of a micro-batch needs beside weights: settings, and its crossing tensors."""
        micro_batch.is_at_work = True
        self._apply_user_settings(task.pack, self._unlayered)
        if micro_batch.held_on_host is not None and task.kind in RUNS:
            self._runtime.crossing_tensors.wait(micro_batch.held_on_host)
            micro_batch.held_on_host = None

    def _finish(self, task: Task) -> None:
        """Free what has left the device under a task of a micro-batch; refuse settings that the model's code has made."""
        if self._plan.policy.crossing_on_host and task.kind in RUNS:
            self._runtime.crossing_tensors.free_leaving()
        for copy in self._unlayered:
            self._runtime.device_copies.check_user_settings(copy)

    def _note_failure(self, task: Task, error: BaseException) -> None:
        """Note which micro-batch and layer an error is of."""
        if task.micro_batch >= 0:
            layer = self._failed_layer(self._micro_batches[task.micro_batch], error)
            self.failure = TaskFailure(task.micro_batch, layer)

    def _failed_layer(self, micro_batch: MicroBatch, error: BaseException) -> int | None:
        """Return the layer that raised `error`; None: code between layers, the loss, or not known."""
        lane = micro_batch.lane
        for failed in (self._failed_backward, None if lane is None else lane.failed_call):
            if failed is not None and failed.error_id == id(error):
                return failed.layer
        return None

    def _apply_user_settings(self, pack: int, unlayered: list[DeviceCopy]) -> None:
        """Give the device copies of a pack and of the unlayered parameters the program's `requires_grad` and hooks."""
        device_copies, modes = self._runtime.device_copies, self._runtime.contract.modes
        for copy in unlayered:
            device_copies.apply_user_settings(copy, modes)
        if pack in self._copies:
            device_copies.apply_user_settings(self._copies[pack], modes)

    def on_progress(self, callback: ProgressCallback | None) -> None:
        """Call `callback(done, total, task)`, and no other callback, after each task of a plan; None: call none."""
        self._progress_callback = callback

    def begin(self, outcome: Outcome) -> None:
        """Begin a run of a step, which notes in `outcome` what it updates."""
        self._copies_at_begin = self._unlayered
        self.backward_begun = False
        self.failure = self._failed_backward = None
        self.gradient_tasks.outcome = outcome

    def free_but(self, kept: Leftovers) -> None:
        """Free what the step has on the device, but resident packs and what is `kept` of runs before the last one.

        Gradients on the host are not touched: the updater has them.
        """
        runtime = self._runtime
        runtime.stash.order_streams()  # copies may be under way
        runtime.crossing_tensors.discard_leaving()
        kept_copies = [] if kept is Leftovers.NONE else self._copies_at_begin
        for pack, copy in list(self._copies.items()):
            if copy not in kept_copies:
                self._evict_copy(pack)
            elif kept is Leftovers.COPIES:
                runtime.device_copies.clear_gradients(copy)
        if kept is not Leftovers.COPIES_AND_GRADIENTS:
            runtime.resident_packs.clear_gradients()
            self.gradient_tasks.discard_leaving()
            self.accumulated_gradients.note_gone()
        runtime.device.enter(HOME)

    def _evict_copy(self, pack: int) -> None:
        self._runtime.device.enter(self._plan.packs[pack].device)
        self._runtime.device_copies.evict(self._copies.pop(pack))

    # ---- weights

    def _load_plan(self, plan: Plan) -> None:
        """Work out what the handlers need to know of the whole of `plan`."""
        if plan is self._plan and self._is_loaded:
            return
        self._is_loaded = False  # until all that follows has been done
        if plan.packs != self._plan.packs:
            self._change_packs(plan)
        self._plan = plan
        self._runtime.layer_calls.slices_from_host = plan.policy.slices_from_host
        self._first_micro_batch_task = len(plan.tasks)
        for number, task in enumerate(plan.tasks):
            if task.micro_batch >= 0:
                self._first_micro_batch_task = number
                break
        self._last_fused = next((task for task in reversed(plan.tasks) if task.kind is TaskKind.FUSED), None)
        self._needs_backward = {}
        for index in plan.packing.backward:
            pack = plan.packs[index]
            self._needs_backward.update(dict.fromkeys(pack.positions, pack.needs_backward))
        if self._runtime.device.count > 1:
            devices: defaultdict[int, list[int]] = defaultdict(list)
            for pack in plan.packing.covering:
                for layer in pack.layers:
                    devices[layer].append(pack.device)
            unlayered = [name for pack in plan.packing.unlayered_packs for name in pack.parameters]
            self._buffer_devices = self._runtime.layer_calls.place_buffers(devices, unlayered)
        self.gradient_tasks.load_plan(plan)
        self._is_loaded = True

    def _change_packs(self, plan: Plan) -> None:
        """Prepare for the packs of `plan`, which are not those of the plan before it."""
        # The updater knows an update by its pack's first position: none may be pending from other packs.
        self._runtime.updater.wait_all()
        # Between two plans of a step these are on the device, and the next plan goes on with them.
        unlayered = self._unlayered
        self._copies.clear()
        for pack, copy in zip(plan.packing.unlayered_packs, unlayered, strict=False):
            self._copies[pack.index] = copy
            # Code between layers may have turned out to use more of them.
            self._runtime.device_copies.add_parameters(copy, pack.parameters)

    @property
    def _unlayered(self) -> list[DeviceCopy]:
        """The copy of the unlayered parameters, while it is on the device."""
        index = self._plan.packing.unlayered
        return [self._copies[index]] if index in self._copies else []

    def _bring_resident_packs(self) -> None:
        """Bring resident packs to the device where they are not there yet, once the host has updated them."""
        resident = self._plan.policy.resident
        names = [self._plan.packs[index].parameters for index in resident]
        if not self._runtime.resident_packs.holds(names):
            self._runtime.updater.wait_all()
        self._copies.update(zip(resident, self._runtime.resident_packs.make_resident(names), strict=True))
        for index in resident:
            self._copies[index].modes = None  # hooks may have been registered
            self.accumulated_gradients.move_back(self._plan.packs[index].owned)  # first: later ones are added to them

    def _swap_in(self, task: Task) -> None:
        runtime, pack = self._runtime, self._plan.packs[task.pack]
        for owner in self._plan.owners_of(pack):
            runtime.updater.wait(owner.needed_at)
        runtime.timeline.restart_task()
        if self._plan.policy.swaps_in_shares:  # this device's share; GATHER brings the others'
            rank, devices = runtime.world.local_rank, runtime.world.local_size
            self._copies[task.pack] = runtime.device_copies.swap_in(pack.parameters, rank=rank, devices=devices)
        else:
            self._copies[task.pack] = runtime.device_copies.swap_in(pack.parameters)
            self._mark_arrived(pack)

    def _gather(self, task: Task) -> None:
        device, copy = self._runtime.device, self._copies[task.pack]
        arrived = copy.pop_arrival()
        if arrived is not None:
            device.wait(Stream.PEER, arrived)
        self._runtime.world.gather_shares(f"pack {task.pack}", device, copy.buffer)
        copy.arrived = device.record(Stream.PEER)
        self._mark_arrived(self._plan.packs[task.pack])

    def _mark_arrived(self, pack: Pack) -> None:
        """Let computing wait for the weights of a pack without calls now: code between layers does not ask for them."""
        if not pack.positions:
            self._copies[pack.index].wait(self._runtime.device)

    def _evict(self, task: Task) -> None:
        if not self._plan.packs[task.pack].positions:  # copies of its weights to other devices may be under way
            self._runtime.device_transfers.finish()
        self._runtime.device_copies.evict(self._copies.pop(task.pack))

    def _leaves(self, pack: int) -> Leaves:
        """Return a pack's weights on the device for a task that computes, which waits for their arrival."""
        copy = self._copies[pack]
        copy.wait(self._runtime.device)
        self._runtime.timeline.begin_compute()
        return copy.leaves

    # ---- compute

    def _forward(self, task: Task, keeps_graph: bool = False, loss_follows: bool = False) -> None:
        """Let a forward pass go on until it has passed the pack.

        Args:
            keeps_graph: whether layer calls keep their graphs where these stay valid; else they run again in backward.
            loss_follows: whether the same task propagates back from the loss. Then outputs stay on the pack's device (else
                they are moved to the device of losses), and a head in tiles of tokens has one graph with the loss.
        """
        micro_batch, leaves = self._micro_batches[task.micro_batch], self._leaves(task.pack)
        if micro_batch.forward_done:  # it ended before this pack
            return
        lane = self._enter(micro_batch)
        lane.run_on(
            partial(micro_batch.position_of, self._plan.calls),
            partial(self._answer_cut, task.pack, micro_batch, leaves, keeps_graph, loss_follows),
            self._plan.packs[task.pack].positions[-1],
        )
        if lane.finished:
            micro_batch.finish()
            # Outputs of those that share a loss wait where they are for the last one.
            if not (loss_follows or micro_batch.loss_members):
                micro_batch.outputs = map_tensors(
                    partial(self._runtime.device_transfers.move, place=HOME), micro_batch.outputs
                )

    def _answer_cut(
        self,
        pack: int,
        micro_batch: MicroBatch,
        leaves: Leaves,
        keeps_graph: bool,
        loss_follows: bool,
        request: Request,
        position: int,
    ) -> Any:
        """Return the outputs, cut from their graph, of a layer call."""
        number = micro_batch.pass_position(position)
        self._apply_own_requires_grad(pack, request)
        layer_calls, inter_layer = self._runtime.layer_calls, micro_batch.inter_layer
        read_state = self._runtime.random.snapshot
        if layer_calls.head_tiles.size and not keeps_graph:
            if loss_follows:
                head = layer_calls.open_head(request, leaves, partial(self._accumulate, pack))
            else:
                head = self._open_cut_head(micro_batch, leaves, request, position, number)
            if head is not None:
                return head
        if keeps_graph:
            outputs, call = layer_calls.forward_with_graph(request, number, leaves, inter_layer, read_state)
        else:
            outputs, call = layer_calls.forward(request, number, leaves, inter_layer, read_state, self._plan.rows)
        if call is not None:
            if not self._needs_backward[position]:  # it returned its input when it was measured
                raise OffPlanError
            micro_batch.calls.append((position, call))
        if self._plan.policy.crossing_on_host and request.grad:
            micro_batch.values.note(tensors_in(outputs))
        return outputs

    def _open_cut_head(
        self, micro_batch: MicroBatch, leaves: Leaves, request: Request, position: int, number: int
    ) -> TokenTensor | None:
        """Return the output of a head's call that runs in tiles of tokens, cut from its graph; None: it is not so cut."""
        layer_calls = self._runtime.layer_calls
        if micro_batch.reduce is not None:  # what is kept of its outputs is made while the weights are there
            return layer_calls.open_head(request, leaves)
        record = partial(micro_batch.record_of_head, len(micro_batch.heads))
        weights = partial(self._weights_of, request.layer)
        head = layer_calls.open_recorded_head(request, number, weights, micro_batch.inter_layer, record)
        if head is not None:
            micro_batch.open_head(position, request.layer, head.head)
        return head

    @contextmanager
    def _weights_of(self, layer: int) -> Iterator[Leaves]:
        """Hold the weights of a layer on the device while open: those of a pack there, or copies that are swapped in."""
        for pack, copy in self._copies.items():
            if layer in self._plan.packs[pack].layers:
                yield copy.leaves
                return
        device_copies, device = self._runtime.device_copies, self._runtime.device
        names = self._runtime.layer_calls.layers[layer].names
        resident = self._runtime.resident_packs.leaves(names)  # the host's may be out of date
        with device.as_current():
            copy = device_copies.swap_in(name for name in names if name not in resident)
            copy.leaves.add(resident)
            try:
                copy.wait(device)
                yield copy.leaves
            finally:
                device_copies.evict(copy)

    def _answer_attached(
        self, task: Task, micro_batch: MicroBatch, leaves: Leaves, request: Request, position: int
    ) -> Any:
        """Return the outputs of a layer call as part of the micro-batch's graph."""
        micro_batch.pass_position(position)
        self._apply_own_requires_grad(task.pack, request)
        layer_calls = self._runtime.layer_calls
        if layer_calls.head_tiles.size:
            head = layer_calls.open_head(request, leaves, partial(self._accumulate, task.pack))
            if head is not None:
                return head
        return layer_calls.run_attached(request, leaves)

    def _fused(self, task: Task) -> None:
        plan, micro_batch = self._plan, self._micro_batches[task.micro_batch]
        leaves = self._leaves(task.pack)
        self._begin_shared_loss(task)
        if plan.rows.keep_no_graph:
            self._forward(task, loss_follows=True)
            if plan.policy.slices_from_host:
                self._stash_out(task)
            self._propagate_loss(task, micro_batch, leaves)
            self._backward(task, begins_loss=False)
            return
        if not micro_batch.forward_done:
            position_of = partial(micro_batch.position_of, plan.calls)
            self._enter(micro_batch).run_on(position_of, partial(self._answer_attached, task, micro_batch, leaves))
            micro_batch.finish()
        self._propagate_loss(task, micro_batch, leaves)
        micro_batch.propagate_rest()
        self._accumulate(task.pack)

    def _propagate_loss(self, task: Task, micro_batch: MicroBatch, leaves: Leaves) -> None:
        """Propagate from the loss through the code after the last layer call, and through calls that kept their graph."""
        if self._runtime.random.has(micro_batch):  # its lane may have ended in an earlier pack
            self._runtime.random.switch(micro_batch)
        self.backward_begun = True
        self._set_trained(task.pack, trained_by(micro_batch.lane_settings))
        layer_calls = self._runtime.layer_calls
        tiles = layer_calls.layer_tiles
        gathering = tiles.gathering(partial(self._accumulate, task.pack)) if tiles.size else nullcontext()
        attached = layer_calls.attached_backward(self._plan.packs[task.pack].layers, leaves)
        with (self._runtime.device_transfers.between_layers or nullcontext)(), gathering, attached:
            try:
                micro_batch.propagate_loss()
            except ModelError:  # a loss that is not its own, of calls that should not have been joined
                self._runtime.joins.check()
                raise
        layer_calls.close_heads()
        if task is self._last_fused:
            # Once for all micro-batches, since it takes 0.1 ms or more: nothing is updated before.
            self._check_forward()
        self._runtime.joins.issue_checks()
        if not self._plan.packs[task.pack].needs_backward and any(leaf.grad is not None for leaf in leaves.values()):
            raise OffPlanError  # it returned its input when it was measured

    def _check_forward(self) -> None:
        """Raise UnseenError if forward passes have done what layers that run again would not find as it was for them."""
        self._runtime.random.check_drawn()
        left = self._runtime.contract.settings.find_left()
        if left:
            names = ", ".join(sorted({name for _, name in left}))
            raise UnseenError(f"forward leaves {names} otherwise than before, which was not seen when it was measured.")

    def _backward(self, task: Task, begins_loss: bool = True) -> None:
        """Propagate through a pack's recorded calls, the last one first; those without a graph run again before.

        `begins_loss`: whether a shared loss that the micro-batch is the last one of has not begun to propagate yet.
        """
        micro_batch = self._micro_batches[task.micro_batch]
        leaves = self._leaves(task.pack)
        if begins_loss:
            self._begin_shared_loss(task)
        self.backward_begun = True
        for call in micro_batch.pop_calls(self._plan.packs[task.pack]):
            micro_batch.inter_layer.propagate_due(call.number)
            owned = call.request.lane_settings is not None or micro_batch.lane_settings is not None
            if owned or self._copies[task.pack].modes is not self._runtime.contract.modes:
                self._set_trained(task.pack, both_trained(call.request.lane_settings, micro_batch.lane_settings))
            try:
                self._runtime.layer_calls.backward(
                    call, leaves, self._runtime.random.replay, lambda: self._accumulate(task.pack)
                )
            except BaseException as error:
                self._failed_backward = FailedCall(call.request.layer, id(error))
                raise
            call.refuse_further_gradients()
        micro_batch.close_heads(self._runtime.layer_calls.close_head)
        micro_batch.propagate_rest()
        self._accumulate(task.pack)
        if micro_batch.loss_members and micro_batch is micro_batch.loss_members[0]:
            self._runtime.device_copies.end_shared_loss(self._copies[task.pack])

    def _begin_shared_loss(self, task: Task) -> None:
        """Let the gradients of those that share a loss add up by themselves first, as in one backward pass of autograd."""
        micro_batch = self._micro_batches[task.micro_batch]
        if micro_batch.loss_members and micro_batch is micro_batch.loss_members[-1]:
            self._runtime.device_copies.begin_shared_loss(self._copies[task.pack])

    def _apply_own_requires_grad(self, pack: int, request: Request) -> None:
        """Give the pack's copies the `requires_grad` that the caller of a layer has set for itself.

        Raises:
            UnsupportedError: a parameter that is not trained would get a gradient.
        """
        if not request.grad or (
            request.lane_settings is None and self._copies[pack].modes is self._runtime.contract.modes
        ):
            return
        trained = trained_by(request.lane_settings)
        self._set_trained(pack, trained)
        optimizer = self._runtime.optimizer
        if not trained or optimizer is None:
            return
        for name in self._runtime.device_copies.names_trained_by(trained, self._copies[pack]):
            if not optimizer.trains(name):
                raise UnsupportedError(
                    f"forward sets requires_grad of {name}, which is not trained by this engine: it did not require a "
                    "gradient, or was not among the optimizer's parameters, when initialize was called. Call layers that "
                    "use it under torch.no_grad(), or let it be trained at initialize."
                )

    def _set_trained(self, pack: int, trained: TrainedFlags) -> None:
        modes = trained or self._runtime.contract.modes
        self._runtime.device_copies.apply_user_settings(self._copies[pack], modes, trained)

    def _accumulate(self, pack: int) -> None:
        self._runtime.device_copies.accumulate(self._copies[pack])
        self.accumulate_unlayered()

    def accumulate_unlayered(self) -> None:
        """Add to their sums the gradients that a backward pass, also of the program's own, left on unlayered parameters."""
        for copy in self._unlayered:
            self._runtime.device_copies.accumulate(copy)

    def _enter(self, micro_batch: MicroBatch) -> AnyLane:
        """Return the micro-batch's lane, started, and make its random stream current."""
        if micro_batch.lane is not None:
            self._runtime.random.switch(micro_batch)
            return micro_batch.lane
        self._runtime.random.start(micro_batch, micro_batch.seed)
        return micro_batch.start(self._runtime.device, self._runtime.device_transfers.between_layers)

    # ---- gradients

    def _reduce(self, task: Task) -> None:
        self.gradient_tasks.reduce(task, self._copies[task.pack])

    def _swap_out(self, task: Task) -> None:
        self.gradient_tasks.swap_out(task, self._copies[task.pack])

    def accumulated_gradient(self, name: str) -> Tensor | None:
        """Return the gradient of `name` that has accumulated in this step: the tensor itself; None: there is none."""
        return self.accumulated_gradients.find(name, self._unlayered)

    def discard_accumulated(self, names: Iterable[str]) -> None:
        """Discard the gradients of `names` that have accumulated in this step."""
        self.accumulated_gradients.discard(names, self._unlayered)

    # ---- between packs

    def _crossing_out(self, task: Task) -> None:
        micro_batch, runtime = self._micro_batches[task.micro_batch], self._runtime
        if (lane := micro_batch.lane) is not None:
            waiting = micro_batch.values.crossing(lane.argument_tensors(), micro_batch.inter_layer, runtime.stash)
            micro_batch.held_on_host = runtime.crossing_tensors.swap_out(waiting, ())
            self._wait_for_copies()

    def _crossing_gradients_out(self, task: Task) -> None:
        micro_batch = self._micro_batches[task.micro_batch]
        micro_batch.held_on_host = self._runtime.crossing_tensors.swap_out((), micro_batch.waiting_gradients())
        self._wait_for_copies()

    def _wait_for_copies(self) -> None:
        """Free what has been sent to the host before the next task, where no copy is to be hidden."""
        if self._plan.policy.slices_from_host:
            self._runtime.crossing_tensors.free_leaving()
            self._runtime.stash.free_copied()

    def _crossing_in(self, task: Task) -> None:
        if (held := self._micro_batches[task.micro_batch].held_on_host) is not None:
            self._runtime.crossing_tensors.swap_in(held)

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

    # ---- stash

    def _stash_out(self, task: Task) -> None:
        self._runtime.stash.swap_out(self._stash_entries(task))
        self._wait_for_copies()

    def _stash_in(self, task: Task) -> None:
        self._runtime.stash.swap_in(self._stash_entries(task))

    def _stash_entries(self, task: Task) -> list[StashEntry]:
        calls = self._micro_batches[task.micro_batch].calls_in(self._plan.packs[task.pack])
        return [entry for call in calls for entry in call.entries]
