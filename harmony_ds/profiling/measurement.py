"""Measure the bytes of a model's layer calls on the device, with one micro-batch, and their order.

The model's forward runs on the calling thread. Each layer is swapped in alone, run forward and, with a made-up
gradient, backward at once, exactly as a step would run it; then it is evicted. What a step runs as one graph is put
together from intervals: each call up to its return, the code after it up to the next call, and the loss.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from harmony_ds.decomposer.find import Layer
from harmony_ds.decomposer.graph import slab_bytes
from harmony_ds.device.allocation_trace import AllocationTrace
from harmony_ds.device.base import MemoryProbe
from harmony_ds.errors import ModelError
from harmony_ds.model.contract import UnseenError
from harmony_ds.model.crossing import WaitingValues
from harmony_ds.model.intercept import Request
from harmony_ds.model.recorded_call import RecordedCall, WriteCheck
from harmony_ds.model.sameness import comparison
from harmony_ds.model.targets import GradientSum, InterLayerGradient, OutputGradient
from harmony_ds.model.token_tensor import TokenTensor, is_not_computed
from harmony_ds.model.trees import tensors_in
from harmony_ds.offload.device_copies import DeviceCopies, DeviceCopy
from harmony_ds.offload.stash import StashEntry
from harmony_ds.profiling.call_measurement import CallMeasurement, MicroBatchMeasurement, Pairs
from harmony_ds.profiling.passes import ModelPasses
from harmony_ds.profiling.sample import Sample
from harmony_ds.profiling.watches import FlowWatch, RoutingWatch, extremes
from harmony_ds.runtime.runtime import Runtime
from harmony_ds.runtime.streaming import LayerCallObserver
from harmony_ds.scheduler.costs import BackwardBytes, CostTable, ForwardBytes, StashBytes, WaitingBytes
from harmony_ds.scheduler.crossing import CrossingValue
from harmony_ds.scheduler.rows import WHOLE_CALLS, Rows

_logger = logging.getLogger(__name__)


class Measurement(LayerCallObserver):
    """Bytes of each layer call of one micro-batch, and of the code around the calls; they leave as a `CostTable`.

    It is used once.
    """

    def __init__(
        self,
        runtime: Runtime,
        layers: tuple[Layer, ...],
        unlayered: tuple[str, ...] = (),
        rows: Rows = WHOLE_CALLS,
        observers: Sequence[LayerCallObserver] = (),
        traces: bool = False,
    ) -> None:
        """Run with `unlayered` parameters, as far as they are known, and with layer calls cut into `rows`.

        Args:
            observers: told of each call, too, after this object.
            traces: whether allocations are recorded, one by one. Compiled code runs uncompiled then.
        """
        self._runtime = runtime
        self._observers = observers
        self._layers = layers
        self._passes = ModelPasses(runtime, layers, unlayered, rows)
        self._interval: MemoryInterval
        self._measured = MicroBatchMeasurement()
        self._kept: list[StashEntry] = []
        self._recorded: list[RecordedCall] = []  # until the forward pass is over, as in a step
        self._stashed: list[_StashedInput] = []
        self._unlayered: DeviceCopy
        self._versions: dict[str, int] = {}  # of unlayered parameters' gradients
        self._reached: dict[InterLayerGradient, None] = {}  # in the order that gradients came to them
        self._inputs: list[Tensor] = []  # of the last call; in a graph that is not cut they would stay
        self._repeated_inputs: set[tuple[int, int]] = set()  # where those among them are that the call before took, too
        self._values = WaitingValues()
        self._crossing: list[_Crossing] = []
        self._base = 0  # bytes alive before the first call
        self._write_checks: list[tuple[int, WriteCheck]] = []  # of inputs of calls, by layer
        self._surprises: list[str] = []
        self._flow: FlowWatch | None = None
        self._traces = traces
        self._trace = AllocationTrace(runtime.device.torch_device.type)  # records only where it is entered

    def measure(self, sample: Sample) -> CostTable:
        """Return costs of its forward pass and of propagating its loss.

        Raises:
            UnseenError: the model does something that was not known of it, and is now: to be measured again.
            ModelError: a layer gives something else when it is run again on what it was given.
            ModelError: forward writes into parameters.
        """
        with (
            self._passes.opened(self._run_call, [self, *self._observers]) as unlayered,
            self._runtime.layer_calls.collecting_unseen() as self._surprises,
        ):
            _gather_from_zero(unlayered)  # the plan counts the unlayered parameters' gradients from the first task on
            self._unlayered = unlayered
            self._flow = FlowWatch(unlayered.leaves.values()) if self._runtime.device.count > 1 else None
            with self._runtime.device.probe() as probe, self._trace if self._traces else nullcontext():
                self._interval = MemoryInterval(probe)
                torch.ones(1, 1, device=self._runtime.device.torch_device).matrix_power(2)  # cuBLAS's workspace stays
                self._base = probe.allocated_bytes()
                self._run(sample)
        self._measured.rows = sample.rows
        self._measured.in_slices = self._passes.rows.keep_no_graph
        table = self._measured.table()
        if not self._traces:
            return table
        return replace(table, allocations=replace(self._measured.allocations(), uploads=tuple(self._trace.uploads)))

    def _run(self, sample: Sample) -> None:
        """Run the micro-batch forward and backward, and note what the passes take."""
        measured = self._measured
        measured.scalar = self._allocated_bytes(torch.float32)
        measured.grain = self._allocated_bytes(torch.uint8)
        loss, before_loss = self._run_forward(sample)
        self._propagate_loss(loss, before_loss)
        del loss
        self._inputs = []
        self._release_head()
        measured.incoming = self._trace.numbers(gradient.gradient for call in measured.calls for gradient in call.made)
        self._trace.begin([])
        self._trace.pause()
        measured.tail.taken.extend(self._take_gradients())
        measured.tail.unlayered = self._changed_unlayered_gradients()
        self._note_held()
        self._settle_between_calls()

    def _run_forward(self, sample: Sample) -> tuple[Tensor | None, _BeforeLoss]:
        """Run the forward pass, make the loss, drop the outputs; note what each takes, and check what the model did."""
        measured = self._measured
        self._interval.begin()
        self._trace.begin(measured.lead)
        with self._flow or nullcontext():
            outputs = self._passes.forward(sample)
            measured.end = self._interval.peak()
            before = _BeforeLoss(self._interval.left(), self._alive_bytes())
            measured.outputs = _storage_bytes(outputs) + max(0, before.left_bytes)
            if measured.calls and measured.calls[-1].cost.runs_with_loss and not _has_graph(outputs):
                # The head's, which waits for a loss of the program's own:
                measured.outputs += _storage_bytes(self._inputs)
            self._interval.begin()
            if self._flow is not None:
                self._flow.in_loss = True
            self._trace.begin(measured.loss)
            loss = sample.surrogate_loss(outputs)
        measured.making = max(measured.end, before.left_bytes + self._interval.peak()) + 2 * measured.scalar
        if self._flow is not None:
            measured.flow = self._flow.flow
        self._check_surprises()
        self._check_unwritten(self._unlayered)
        measured.spans = self._passes.inter_layer.spans(self._consumers(), loss, len(measured.calls))
        self._trace.begin(measured.propagate)
        with_outputs = self._interval.alive()
        del outputs  # as a step does before it propagates
        measured.freed_outputs = with_outputs - self._interval.alive()
        return loss, before

    def _propagate_loss(self, loss: Tensor | None, before: _BeforeLoss) -> None:
        """Propagate from the loss to the outputs of layers; note what that takes, and making the loss before it."""
        measured = self._measured
        self._passes.propagate_loss(loss)
        # The loss is scaled before it is propagated.
        loss_peak = self._interval.peak() + 2 * measured.scalar
        measured.loss_phase = before.alive_bytes + loss_peak
        tail_peak = max(measured.end + 2 * measured.scalar, before.left_bytes + loss_peak)
        measured.tail.note(forward=ForwardBytes(peak_bytes=tail_peak))

    def _release_head(self) -> None:
        """Release the weights of a head that has run with the loss, and their sums: the plan counts these."""
        self._runtime.layer_calls.close_heads()
        with_head = self._interval.alive()
        self._passes.release_head()
        self._measured.loss_phase -= with_head - self._interval.alive()

    def _note_held(self) -> None:
        """Release the recorded calls; note what the micro-batch holds between the passes, and what is stashed of that."""
        measured = self._measured
        held = max(0, self._interval.alive() - self._base)
        for stashed in self._pop_freed():
            call = measured.calls[stashed.number]
            waiting = call.cost.waiting
            after_forward_bytes = max(0, waiting.after_forward_bytes - stashed.nbytes)
            call.note(waiting=replace(waiting, after_forward_bytes=after_forward_bytes))
        measured.crossing = tuple(value.as_cost() for value in self._crossing)
        measured.held_and_stashed = self._drop_recorded()
        measured.held = max(0, held - measured.held_and_stashed)

    def _allocated_bytes(self, dtype: torch.dtype) -> int:
        """Return what the allocator takes for one element."""
        self._interval.begin()
        scalar = torch.empty((), dtype=dtype, device=self._runtime.device.torch_device)
        nbytes = self._interval.left()
        del scalar
        return nbytes

    # ---- one call of a layer

    def call_reached(self, request: Request) -> None:
        """Note the bytes of the code since the last call; release that call's inputs."""
        self._check_last_call()
        self._trace.pause()
        calls, interval, lead = self._measured.calls, self._interval, 0
        if calls:
            graph = calls[-1].cost.forward.graph_bytes
            calls[-1].note_forward(peak_bytes=graph + interval.peak(), graph_bytes=graph + max(0, interval.left()))
        else:
            lead = interval.peak()
        known = {id(tensor) for tensor in self._inputs}
        self._inputs = tensors_in((request.args, request.kwargs))
        self._repeated_inputs = {_place(t) for t in self._inputs if id(t) in known}
        stashed, alive = self._stashed_bytes(), self._alive_bytes()
        self._note_crossing(len(calls))
        calls.append(CallMeasurement(request.layer))
        calls[-1].note(waiting=WaitingBytes(alive, stashed_too_bytes=stashed, after_forward_bytes=alive))
        calls[-1].note_forward(peak_bytes=lead - alive)

    def _stashed_bytes(self) -> int:
        """Return bytes of what calls have stashed and is alive for another reason: here, the stash is released at once."""
        return sum({s.storage.cdata: s.nbytes for s in self._stashed if not s.storage.expired()}.values())

    def _alive_bytes(self) -> int:
        """Return bytes of everything that is alive and that no call has stashed."""
        return max(0, self._interval.alive() - self._base - self._stashed_bytes())

    def _note_crossing(self, position: int) -> None:
        """Note which tensors might wait on the host before the call at `position`."""
        for value in self._values.crossing(self._inputs, self._passes.inter_layer, self._runtime.stash):
            memory = StorageWeakRef(value.whole.untyped_storage())
            known = next((one for one in self._crossing if one.is_in(memory) and one.last == position - 1), None)
            if known is None:
                self._crossing.append(_Crossing(memory, position, position, value.whole.nbytes))
            else:
                known.last = position

    def _run_call(self, request: Request, copy: DeviceCopy) -> Any:
        """Run the call, measured, and propagate through it at once."""
        call, interval, own = self._measured.calls[-1], self._interval, request.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            outputs = own(*args, **kwargs)
            # Read when the layer returns: before and after, other things are alive too.
            call.note_forward(graph_bytes=interval.left(), peak_bytes=interval.peak())
            return outputs

        head = self._open_head(request, copy)
        interval.begin()
        if head is not None:  # what it takes, the loss takes
            return head
        with RoutingWatch() as watch:
            events: Pairs = []
            with self._trace.recording(events):
                outputs, recorded = self._passes.record(replace(request, forward=forward), copy)
            call.note_forward_allocations(events, self._trace.numbers(tensors_in(outputs)))
        call.note_forward(peak_bytes=interval.peak())
        if self._flow is not None:
            self._flow.call(request, self._inputs, outputs)
        if request.grad:
            self._values.note(tensors_in(outputs))
        if recorded is not None:
            self._write_checks += [(request.layer, WriteCheck(tensor)) for tensor in recorded.on_device]
            self._note_recorded(call, recorded)
            self._check_recomputation(recorded, copy, tensors_in(outputs))
            if not self._surprises:
                self._propagate(call, recorded, copy, watch.seen)
        return outputs

    def _open_head(self, request: Request, copy: DeviceCopy) -> TokenTensor | None:
        """Return the output of a call that is computed in tiles of tokens with the loss; None: it runs now, whole."""
        tiles, device_copies = self._runtime.layer_calls.head_tiles, self._runtime.device_copies
        if tiles.size and request.layer not in tiles.heads and request.grad:
            tiles.heads[request.layer] = self._runtime.layer_calls.may_be_head(request, copy.leaves)
        head = self._passes.open_head(request, copy, partial(_gather, device_copies, copy))
        if head is None:
            return None
        if device_copies.accumulates_in_place:
            _gather_from_zero(copy)
        trained = [leaf for leaf in copy.leaves.values() if leaf.requires_grad]
        summed = [
            slab_bytes(leaf.numel(), leaf.element_size()) for leaf in trained if device_copies.accumulates_in_place
        ]
        self._measured.calls[-1].note(
            needs_backward=True, backward=BackwardBytes(summed_bytes=sum(summed)), runs_with_loss=True
        )
        self._measured.calls[-1].note_backward_allocations([], [], sums=_bytes_of_sums(trained, device_copies))
        return head

    def _check_last_call(self) -> None:
        """Raise UnseenError if a layer is called after one that was taken for the head."""
        tiles, calls = self._runtime.layer_calls.head_tiles, self._measured.calls
        if calls and calls[-1].cost.runs_with_loss:
            tiles.heads[calls[-1].layer] = False
            raise UnseenError(f"layer {self._layers[calls[-1].layer].name} is not the last one that is called.")

    def call_finished(self) -> None:
        """Begin to measure the code after the call."""
        self._interval.begin()
        self._trace.begin(self._measured.calls[-1].code)

    # ---- what was not known of the model

    def _check_surprises(self) -> None:
        """Raise UnseenError if the forward pass and the loss did what was not known of the model."""
        called = self._runtime.layer_calls.layers
        for layer in sorted({layer for layer, writes in self._write_checks if writes.happened}):
            called[layer].inputs_written_later = True
            self._surprises.append(f"inputs of layer {called[layer].name} are changed in place after its call.")
        unseen = (
            self._runtime.installation.buffers.find_unversioned_writes() if self._runtime.device.has_values else set()
        )
        for one in self._layers:
            if not unseen.isdisjoint(one.module.modules()) and called[one.index].replay_buffers():
                self._surprises.append(f"layer {one.name} changes a buffer by its .data.")
        self._surprises += [f"{name} is used outside its layer's calls." for name in self._runtime.installation.touched]
        if self._surprises:
            raise UnseenError(" ".join(self._surprises))

    def _check_recomputation(self, recorded: RecordedCall, copy: DeviceCopy, outputs: list[Tensor]) -> None:
        """Run a call again; it must give what its forward pass gave, and leave its parameters as they are."""
        calls = self._runtime.layer_calls
        layer = calls.layers[recorded.request.layer]
        has_values = self._runtime.device.has_values and not any(leaf.is_meta for leaf in copy.leaves.values())
        if self._surprises or recorded.slicing is not None or not has_values:
            return
        self._interval.begin()
        again = calls.recompute(recorded, copy.leaves, self._runtime.random.replay)
        recorded.graph = []
        self._passes.switch_to_own_random_numbers()
        self._check_unwritten(copy)
        if all(map(comparison(self._runtime.device.torch_device), outputs, again)):
            return
        if layer.replay_buffers():
            self._surprises.append(f"layer {layer.name} depends on buffers that it changes.")
            return
        raise ModelError(
            f"layer {layer.name} was run twice on the same arguments, parameters, buffers and random numbers, "
            "and gave different outputs: it goes on from something else that it changes (an attribute, an iterator, a "
            "generator of its own), so its forward pass cannot be recomputed. Keep such state in a buffer of the layer's, "
            "and draw from torch's, Python's or NumPy's global generators."
        )

    def _check_unwritten(self, copy: DeviceCopy) -> None:
        """Raise ModelError if values of `copy` have changed, or were written to, equal ones perhaps."""
        names = self._runtime.device_copies.modified_names(copy) if self._runtime.device.has_values else []
        names += [name for name, leaf in copy.leaves.items() if leaf._version]
        if names:
            kind = "buffer" if self._runtime.device_copies.is_buffer(names[0]) else "parameter"
            raise ModelError(
                f"forward writes into the {kind} {names[0]}, a copy on the device there: what is written would be lost. "
                "Change parameters between steps (engine.module.parameters()), or compute with a changed copy "
                "(self.weight.clamp(...))."
            )

    def _note_recorded(self, call: CallMeasurement, recorded: RecordedCall) -> None:
        # In a step these would be there until the call is propagated through.
        self._recorded.append(recorded)
        self._kept += [entry for entry in recorded.tensors if entry.stays]
        earlier = {stashed.storage.cdata for stashed in self._stashed if not stashed.storage.expired()}
        first = again = again_at_cut = 0
        bases: dict[int, int] = {}
        for entry in recorded.entries:
            assert entry.device_tensor is not None
            storage = entry.device_tensor.untyped_storage()
            memory = StorageWeakRef(storage)
            crossing = next((one for one in reversed(self._crossing) if one.is_in(memory)), None)
            if crossing is not None and entry.nbytes == crossing.nbytes:
                crossing.stashed.append(len(self._measured.calls) - 1)
            if memory.cdata not in earlier:  # a call just before that raised has stashed nothing
                first += entry.nbytes
                self._stashed.append(_StashedInput(memory, storage.nbytes(), recorded.number))
                bases[memory.cdata] = bases.get(memory.cdata, storage.nbytes()) - entry.nbytes
            elif _place(entry.device_tensor) in self._repeated_inputs:
                again_at_cut += entry.nbytes
            else:
                again += entry.nbytes
        call.note(
            stash=StashBytes(
                new_bytes=first,
                again_bytes=again,
                again_at_cut_bytes=again_at_cut,
                base_bytes=sum(max(0, nbytes) for nbytes in bases.values()),
                slice_bytes=recorded.slice_bytes,
            ),
            needs_backward=True,
        )
        call.made = [gradient for gradient in recorded.output_gradients if gradient is not None]
        call.taken = [target for target in recorded.targets if isinstance(target, (OutputGradient, InterLayerGradient))]
        stashed = self._trace.numbers(entry.device_tensor for entry in recorded.entries)
        call.allocations = replace(call.allocations, stashed=stashed)

    def _propagate(self, call: CallMeasurement, recorded: RecordedCall, copy: DeviceCopy, routes: bool) -> None:
        """Run backward with a made-up gradient; what reaches earlier calls is dropped.

        The plan counts sums of parameters' gradients by itself. Where they gather on the leaves, they are there before
        this begins, as they are for every micro-batch but the first.
        """
        if self._runtime.device_copies.accumulates_in_place:
            _gather_from_zero(copy)
            trained = [leaf for leaf in copy.leaves.values() if leaf.requires_grad]
            summed_bytes = sum(slab_bytes(leaf.numel(), leaf.element_size()) for leaf in trained)
            call.note(backward=replace(call.cost.backward, summed_bytes=summed_bytes))
        tensors = list(recorded.tensors)
        for inputs in extremes(recorded.on_device) if routes and self._runtime.device.has_values else ():
            recorded.tensors = [StashEntry(tensor, self._layers[call.layer].name) for tensor in inputs]
            try:
                self._backward(call, recorded, copy)
            except (RuntimeError, ValueError, IndexError, ModelError) as error:
                _logger.warning(
                    "layer %s makes tensors whose size depends on its input, and cannot be run with an input whose rows "
                    "are all alike (%s): how much memory other data takes is not known.",
                    self._layers[call.layer].name,
                    error,
                )
                break
        recorded.tensors = tensors
        self._backward(call, recorded, copy)
        copy.leaves.drop_gradients()

    def _backward(self, call: CallMeasurement, recorded: RecordedCall, copy: DeviceCopy) -> None:
        trace, device_copies = self._trace, self._runtime.device_copies
        gather = partial(_gather, device_copies, copy)
        recompute: Pairs = []
        propagate: Pairs = []
        graph_outputs: tuple[int, ...] = ()
        with trace.recording([]), self._passes.made_up_gradients(recorded) as reached:
            incoming = trace.numbers(t.gradient for t in recorded.output_gradients if t is not None)
            self._interval.begin()
            if recorded.slicing is None:
                with trace.recording(recompute):
                    replay = self._runtime.random.replay
                    again = self._runtime.layer_calls.recompute(recorded, copy.leaves, replay, as_in_steps=True)
                    graph_outputs = trace.numbers(again)
                    del again
                call.note_forward(kept_graph_bytes=self._interval.left())
            with trace.recording(propagate):
                self._runtime.layer_calls.backward(recorded, copy.leaves, self._runtime.random.replay, gather)
            call.backward = max(call.backward, self._interval.peak())
            outgoing = trace.numbers(target.gradient for target in recorded.targets if isinstance(target, GradientSum))
        trained = [leaf for leaf in copy.leaves.values() if leaf.requires_grad]
        call.note_backward_allocations(
            recompute,
            propagate,
            graph_outputs=graph_outputs,
            incoming=incoming,
            outgoing=outgoing,
            unsummed=() if device_copies.accumulates_in_place else trace.numbers(leaf.grad for leaf in trained),
            sums=_bytes_of_sums(trained, device_copies),
        )
        call.unlayered |= self._changed_unlayered_gradients()
        self._reached |= dict.fromkeys(one for one in reached if isinstance(one, InterLayerGradient))
        if not device_copies.accumulates_in_place:
            unsummed_bytes = sum(leaf.grad.nbytes for leaf in copy.leaves.values() if leaf.grad is not None)
            call.note(backward=replace(call.cost.backward, unsummed_bytes=unsummed_bytes))
        gather()

    # ---- the code between the calls

    def _settle_between_calls(self) -> None:
        """Run made-up gradients back through the code between calls, as a step does before the calls that made it run."""
        calls = self._measured.calls
        for number in (*reversed(range(len(calls))), -1):
            due = [target for target in self._reached if target.deadline == number]
            if not due:
                continue
            for target in due:
                self._passes.make_up(target)
            self._interval.begin()
            self._passes.inter_layer.propagate_due(number)
            place = self._measured.tail if number < 0 else calls[number]
            place.settle = self._interval.peak()
            place.settled = self._take_gradients()
            place.unlayered |= self._changed_unlayered_gradients()

    def _drop_recorded(self) -> int:
        """Release the recorded calls, the last one first, as a step does.

        Returns:
            The bytes that they alone held and that a step stashes, for no shorter than they hold them.
        """
        stashed = 0
        while self._recorded:
            number = self._recorded.pop().number
            stashed += sum(s.nbytes for s in self._pop_freed() if s.number <= number)
        return stashed

    def _pop_freed(self) -> list[_StashedInput]:
        """Return what was stashed and nothing holds any more; forget it."""
        freed = [s for s in self._stashed if s.storage.expired()]
        self._stashed = [s for s in self._stashed if not s.storage.expired()]
        return freed

    def _take_gradients(self) -> list[OutputGradient]:
        """Return the outputs whose gradients came into being since the last time; drop those."""
        return [gradient for call in self._measured.calls for gradient in call.made if gradient.pop() is not None]

    def _changed_unlayered_gradients(self) -> dict[str, int]:
        """Return bytes of the unlayered parameters whose gradients have changed since the last time."""
        given: dict[str, int] = {}
        for name, leaf in self._unlayered.leaves.items():
            if leaf.grad is not None and leaf.grad._version != self._versions.get(name, 0):
                self._versions[name] = leaf.grad._version
                given[name] = leaf.grad.nbytes
        return given

    def _consumers(self) -> dict[InterLayerGradient, tuple[int, int]]:
        """Return, for each tensor made between the calls, the first and the last call that takes it."""
        places: dict[InterLayerGradient, tuple[int, int]] = {}
        for position, call in enumerate(self._measured.calls):
            for target in call.taken:
                if isinstance(target, InterLayerGradient):
                    places[target] = (places.get(target, (position, position))[0], position)
        return places


@dataclass(frozen=True, slots=True)
class _BeforeLoss:
    """Bytes at the end of a forward pass, before the loss is made.

    Attributes:
        left_bytes: of what the code after the last call has left.
        alive_bytes: of everything that is alive and that no call has stashed.
    """

    left_bytes: int
    alive_bytes: int


@dataclass(frozen=True, slots=True)
class _StashedInput:
    """Memory of an input that calls stash, its bytes, and the number of the call that stashed it first."""

    storage: StorageWeakRef
    nbytes: int
    number: int


@dataclass(slots=True)
class _Crossing:
    """Memory that may wait on the host, and the calls before which it may; see `CrossingValue`."""

    storage: StorageWeakRef
    first: int
    last: int
    nbytes: int
    stashed: list[int] = field(default_factory=list)

    def is_in(self, memory: StorageWeakRef) -> bool:
        """Return whether the value is in `memory`, and still there."""
        return bool(self.storage.cdata == memory.cdata) and not self.storage.expired()

    def as_cost(self) -> CrossingValue:
        return CrossingValue(self.first, self.last, self.nbytes, tuple(dict.fromkeys(self.stashed)))


class MemoryInterval:
    """Bytes allocated between two points of a pass, beyond those that were alive at the first."""

    def __init__(self, probe: MemoryProbe) -> None:
        self._probe = probe
        self.alive = probe.allocated_bytes
        self.begin()

    def begin(self) -> None:
        """Begin the interval here."""
        self._probe.reset_peak()
        self._before = self.alive()

    def peak(self) -> int:
        """Return the most bytes alive at once since `begin`, less those alive then."""
        return self._probe.peak_bytes() - self._before

    def left(self) -> int:
        """Return the bytes alive now, less those alive at `begin`."""
        return self.alive() - self._before


def _gather(device_copies: DeviceCopies, copy: DeviceCopy) -> None:
    """Let gradients of another dtype than their sums leave the parameters."""
    if not device_copies.accumulates_in_place:
        copy.leaves.drop_gradients()


def _bytes_of_sums(trained: Sequence[Tensor], device_copies: DeviceCopies) -> tuple[int, ...]:
    """Return the bytes of the sum of each parameter's gradients."""
    return tuple(leaf.numel() * device_copies.accumulation_dtype.itemsize for leaf in trained)


def _gather_from_zero(copy: DeviceCopy) -> None:
    for leaf in copy.leaves.values():
        if leaf.requires_grad:
            leaf.grad = torch.zeros_like(leaf)


def _storage_bytes(tree: Any) -> int:
    """Return the bytes of the memory that the tensors of `tree` are in."""
    tensors = [tensor for tensor in tensors_in(tree) if not is_not_computed(tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
    return sum({StorageWeakRef(storage).cdata: storage.nbytes() for storage in storages}.values())


def _has_graph(outputs: Any) -> bool:
    """Return whether something computed among the model's outputs, such as a loss, may be propagated back from."""
    return any(tensor.requires_grad and not is_not_computed(tensor) for tensor in tensors_in(outputs))


def _place(tensor: Tensor) -> tuple[int, int]:
    """Return where `tensor` begins; on a device without memory, too."""
    return int(StorageWeakRef(tensor.untyped_storage()).cdata), int(tensor.storage_offset())
