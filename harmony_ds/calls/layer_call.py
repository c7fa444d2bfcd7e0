"""Runs one layer for one micro-batch: forward and cut, again in backward, or attached to the micro-batch's own graph.

The forward pass builds an autograd graph and throws it away, or keeps it: kernels are chosen by whether a gradient is
required, and the recomputation must give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.calls.arguments import Given, Outcome
from harmony_ds.calls.boundary import propagate
from harmony_ds.calls.buffers import buffers_apart, copied_buffers
from harmony_ds.calls.caches import held_by, restore, take_caches
from harmony_ds.calls.called_layer import CalledLayer
from harmony_ds.calls.contract import UnseenError
from harmony_ds.calls.crossing import Crossings
from harmony_ds.calls.installed import Installation
from harmony_ds.calls.inter_layer import InterLayerGraph
from harmony_ds.calls.intercept import Request
from harmony_ds.calls.keeping import Keeping, Kept
from harmony_ds.calls.outputs import cut_outputs
from harmony_ds.calls.own_memory import memory, memory_of, taken_apart
from harmony_ds.calls.random_streams import State, differ
from harmony_ds.calls.recorded_call import RecordedCall, Trial, norms_of
from harmony_ds.calls.slices import Assembled, Cut, Piece, cut_of
from harmony_ds.calls.targets import GradientTarget
from harmony_ds.calls.trees import map_tensors, tensors_in
from harmony_ds.decomposer.find import Layer
from harmony_ds.errors import ModelError
from harmony_ds.offload.residency import Leaves
from harmony_ds.offload.stash import Stash
from harmony_ds.profiler.rows import WHOLE_CALLS, Rows


class LayerCalls:
    """Runs the layer calls of one model.

    Attributes:
        proving: what calls give is compared with what their recomputations give.
    """

    def __init__(
        self, layers: tuple[Layer, ...], installation: Installation, stash: Stash, crossings: Crossings
    ) -> None:
        self._layers = [CalledLayer(layer, installation.parameters_of(layer.module)) for layer in layers]
        self._keeping = Keeping(stash)
        self._crossings = crossings
        self.proving = True
        self._surprises: list[str] | None = None  # while they are gathered

    @property
    def changing_buffers(self) -> frozenset[int]:
        """Layers that have been seen to change buffers."""
        return frozenset(index for index, layer in enumerate(self._layers) if layer.changes_buffers)

    @contextmanager
    def gathering_surprises(self) -> Iterator[list[str]]:
        """While open, what calls do that was not known of them is gathered in the list, and known from then on; elsewhere
        it is an error at once.
        """
        before, self._surprises = self._surprises, []
        try:
            yield self._surprises
        finally:
            self._surprises = before

    def replay_buffers(self, layer: int) -> bool:
        """From now on, a recomputation of `layer` begins with what its buffers were. False if it did already."""
        new = not self._layers[layer].replayed
        self._layers[layer].replayed = self._layers[layer].changes_buffers = True
        return new

    def spread(self, devices: Mapping[int, Sequence[int]], unlayered: Iterable[str]) -> dict[nn.Module, int]:
        """Where the modules of layers have their buffers: on the first of the `devices` that run the layer.

        A layer that several run, or that uses `unlayered` parameters, which are on HOME, has its operands aligned.
        """
        shared, places, aligned = set(unlayered), {}, self._crossings.between_layers
        for index, numbers in devices.items():
            layer = self._layers[index]
            odd = not shared.isdisjoint(layer.names) or (len(set(numbers)) > 1 and layer.buffered)
            layer.aligned = aligned if odd and aligned is not None else nullcontext
            places.update(dict.fromkeys(layer.buffered, numbers[0]))
        return places

    def copy_inputs(self, layer: int) -> None:
        """From now on, what is kept of calls of `layer` is a copy of what they were given."""
        self._layers[layer].inputs_change = True

    def check_replayed(self, calls: Iterable[RecordedCall]) -> None:
        """Raises ModelError if one of `calls` ran before its layer was known to depend on buffers that it changes."""
        for call in calls:
            layer = self._layers[call.request.layer]
            if layer.replayed and call.buffers is None:
                raise ModelError(
                    f"layer {layer.name} was seen to change buffers that it reads (as normalization does in training and "
                    "evaluation mode in turn) after the forward pass of a micro-batch whose loss or outputs were looked "
                    "at, which cannot be run again as it was. Nothing has been updated. Look at losses behind "
                    "engine.step()."
                )

    def name_of(self, layer: int) -> str:
        """The name of `layer` in the model."""
        return self._layers[layer].name

    def may_be_joined(self, layer: int) -> bool:
        """Whether rows of several micro-batches may go through `layer` at once, as far as it has been seen."""
        return self._layers[layer].treats_rows_alike

    def may_keep_graphs(self, layer: int) -> bool:
        """Whether graphs of `layer` can be kept while other micro-batches go through it."""
        return self._layers[layer].may_keep_graphs

    # ---- attached: part of the caller's own graph, or of none

    def attached(self, request: Request, copies: Leaves) -> Any:
        """Runs the call as the model wrote it, on device copies of the layer's parameters."""
        layer = self._layers[request.layer]
        if request.grad:
            values, caches = take_caches(request)
        else:  # generation fills them
            values, caches = [*request.args, *request.kwargs.values()], {}
        held = held_by(caches.values())
        values = self._crossings.values_here(values)
        kwargs = dict(zip(request.kwargs, values[len(request.args) :], strict=True))
        with layer.parameters.installed(copies), layer.aligned():
            outputs = request.run(values[: len(request.args)], kwargs)
        restore(held)
        self._crossings.check_lent(layer.name)
        own = layer.memory(copies)
        if not own.isdisjoint(memory_of(tensors_in(outputs))):
            with torch.set_grad_enabled(request.grad):
                outputs = map_tensors(lambda t: taken_apart(t) if memory(t) in own else t, outputs)
        self._crossings.made(outputs)
        return outputs

    def _unrecorded(self, request: Request, copies: Leaves, rows: Rows) -> Any:
        """As `attached`, for a call without gradients, in slices where it can be cut."""
        if rows.cuts:
            given = Given.of(request)
            cut = self._cut(request.layer, given, rows)
            if cut is not None:
                call = RecordedCall(request, 0, given.arguments, [None] * len(given.tensors), cut)
                outcome = self._run_slices(call, given.tensors, copies, State)
                return given.hand_over(outcome, outcome.leaves)
        return self.attached(request, copies)

    # ---- cut: forward now, backward later

    def forward(
        self,
        request: Request,
        number: int,
        copies: Leaves,
        inter_layer: InterLayerGraph,
        state: Callable[[], State],
        rows: Rows | None,
    ) -> tuple[Any, RecordedCall | None]:
        """Runs the call and cuts its outputs from its graph: those, and the record for `backward` (None where no gradient
        can flow).

        Args:
            number: place among the calls of its micro-batch.
            state: where the generators stand.
            rows: how calls are cut into slices; None: `copies` will be there until `backward`, so that the graph is kept
                and nothing is stashed, if the layer's graphs can be kept.
        """
        if not request.grad:
            return self._unrecorded(request, copies, rows or WHOLE_CALLS), None
        layer, given = self._layers[request.layer], Given.of(request)
        given.tensors = self._crossings.here(given.tensors)
        targets = [inter_layer.target(t) if t.requires_grad else None for t in given.tensors]
        call = RecordedCall(request.without_arguments(), number, given.arguments, targets)
        before = [t._version for t in given.tensors]
        keeps_graph = rows is None and layer.may_keep_graphs
        if keeps_graph:
            outcome = layer.run(call, [t.detach() for t in given.tensors], copies, targets)
            call.states.append(state())  # after it, as after a recomputation
        else:
            call.cut = self._cut(request.layer, given, rows or WHOLE_CALLS)
            outcome = self._run_to_recompute(layer, call, given.tensors, copies, state)
        self._crossings.check_lent(layer.name)
        leaves = cut_outputs(call, outcome, given.tensors, layer.memory(copies), layer.name)
        self._crossings.made(leaves)  # those in containers that the layer writes into, too
        outputs = given.hand_over(outcome, leaves)
        self._check_seen(layer, call, not keeps_graph and before != [t._version for t in given.tensors])
        if keeps_graph:
            call.keep_graph(outcome.tensors)
        if any(call.output_gradients):
            return outputs, call
        self.forget(call)
        return outputs, None

    def _cut(self, layer: int, given: Given, rows: Rows) -> Cut | None:
        """How a call is cut into slices; None: not at all."""
        called = self._layers[layer]
        may_be_cut = rows.cuts and called.may_be_cut(given.arguments)
        return cut_of(rows, layer, given.tensors, called.draws) if may_be_cut else None

    def _run_to_recompute(
        self, layer: CalledLayer, call: RecordedCall, tensors: list[Tensor], copies: Leaves, state: Callable[[], State]
    ) -> Outcome:
        """The call over `tensors`, which are kept."""
        call.buffers = copied_buffers(layer.buffered) if layer.replayed else None
        if layer.inputs_may_change:
            copied = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
            call.tensors = [self._keeping.keep(tensor, layer.name) for tensor in copied]
            inputs = [t.detach() for t in tensors]
        else:
            call.tensors = [self._keeping.keep(tensor, layer.name) for tensor in tensors]
            inputs = [k.tensor if type(k) is Kept else t.detach() for k, t in zip(call.tensors, tensors, strict=True)]
        try:
            outcome = self._run_slices(call, inputs, copies, state)
        except BaseException:
            self.forget(call)
            raise
        if self.proving and call.cut is None:
            call.norms = norms_of(outcome.tensors)
        return outcome

    def _check_seen(self, layer: CalledLayer, call: RecordedCall, inputs_changed: bool) -> None:
        """Raises UnseenError if the call has changed what no call of the layer was known to change."""
        what = "a buffer" if layer.replayed and call.buffers is None else None
        if what is None and inputs_changed and not layer.changes_inputs:
            layer.changes_inputs = True
            what = "its input in place"
        if what is not None:
            self._surprise(f"layer {layer.name} changes {what}, which was not seen when the model was measured.")

    def _surprise(self, what: str) -> None:
        if self._surprises is None:
            raise UnseenError(what)
        self._surprises.append(what)

    def backward(
        self, call: RecordedCall, copies: Leaves, replay: Callable[[State], None], gather: Callable[[], None]
    ) -> None:
        """Runs the call again, unless its graph was kept, and propagates the gradients of its outputs to its inputs and to
        `copies`.

        Args:
            gather: called between the slices of a call that is cut: adds up what has reached `copies`.
        """
        gradients = [None if gradient is None else gradient.take() for gradient in call.output_gradients]
        if [gradient for gradient in gradients if gradient is not None]:
            if call.graph:
                replay(call.states[0])
                _propagate(call, gradients)
            else:
                self._run_back(call, copies, gradients, replay, gather)
        self.forget(call)

    def _run_back(
        self,
        call: RecordedCall,
        copies: Leaves,
        gradients: list[Tensor | None],
        replay: Callable[[State], None],
        gather: Callable[[], None],
    ) -> None:
        layer = self._layers[call.request.layer]
        with _apart(layer, call):
            tensors = self._keeping.tensors(call.tensors, apart=layer.changes_inputs)
            pieces: Iterable[Piece] = [(tensors, call.targets, gradients)]
            if call.cut is not None:
                pieces = call.cut.propagated(tensors, call.targets, gradients)
            for number, (own, targets, given) in enumerate(pieces):
                if number:
                    gather()
                replay(call.states[min(number, len(call.states) - 1)])
                _run_again(layer, call, own, copies, targets)
                _propagate(call, given)

    def recompute(self, call: RecordedCall, copies: Leaves, replay: Callable[[State], None]) -> list[Tensor]:
        """Runs the call again, whole, and keeps its graph for `backward`; the values that it gives."""
        layer = self._layers[call.request.layer]
        with _apart(layer, call):
            replay(call.states[0])
            tensors = self._keeping.tensors(call.tensors, apart=layer.changes_inputs)
            return [t.detach() for t in _run_again(layer, call, tensors, copies, call.targets)]

    def trial(self, request: Request, copies: Leaves, cut: Cut | None = None) -> Trial:
        """What a call takes and gives, whole or cut. For a request with gradients; nothing is kept for a backward pass,
        and nothing is handed back.
        """
        request = replace(request, context=request.context.copy())  # in which the run collects
        layer, given = self._layers[request.layer], Given.of(request)
        targets: list[GradientTarget | None] = [layer.dead_end if t.requires_grad else None for t in given.tensors]
        call = RecordedCall(request, 0, given.arguments, targets, cut)
        outcome = self._run_slices(call, [t.detach() for t in given.tensors], copies, State)
        places = tuple(places[0] for places in given.arguments.places)
        return Trial(given.tensors, outcome.tensors, places, layer.may_be_cut(given.arguments))

    def _run_slices(
        self, call: RecordedCall, tensors: list[Tensor], copies: Leaves, state: Callable[[], State]
    ) -> Outcome:
        """The call over detached `tensors`, forward, slice by slice if it is cut."""
        layer = self._layers[call.request.layer]
        targets: list[GradientTarget | None] = [layer.dead_end if target else None for target in call.targets]
        copies = layer.guarded(copies)
        call.states.append(state())
        if call.cut is None:
            return layer.run(call, tensors, copies, targets)
        whole = Assembled(call.cut, tensors)
        first: Outcome | None = None
        for part in call.cut.slices(call.cut.forward):
            if part.first and call.cut.draws:
                call.states.append(state())
            outcome = layer.run(call, call.cut.inputs_of(part, tensors), copies, targets)
            whole.add(part, outcome.inputs, outcome.leaves)
            first = first or Outcome(tensors, whole.leaves, outcome.shape, outcome.written, [])
            del outcome
        assert first is not None
        if not call.cut.draws and differ(call.states[0], state()):
            layer.draws = True
            self._surprise(f"layer {layer.name} draws random numbers, which was not seen when the model was measured.")
        return first

    # ---- what is kept of a call

    def forget(self, call: RecordedCall) -> None:
        """Gives up what is kept of `call`: nobody will propagate through it."""
        for entry in call.entries:
            self._keeping.release(entry)
        call.tensors = []
        call.graph = []


def _apart(layer: CalledLayer, call: RecordedCall) -> AbstractContextManager[None]:
    """While open, the layer has buffers that nobody reads: statistics must not be gathered twice."""
    buffers = call.buffers
    if buffers is None and layer.changes_buffers:
        buffers = copied_buffers(layer.buffered)
    return buffers_apart(buffers) if buffers else _NOTHING


_NOTHING: AbstractContextManager[None] = nullcontext()


def _run_again(
    layer: CalledLayer, call: RecordedCall, tensors: list[Tensor], copies: Leaves, targets: list[GradientTarget | None]
) -> list[Tensor]:
    """Runs the call (or one piece of it) again, and keeps its graph; the outputs."""
    outputs = layer.run(call, tensors, copies, targets).tensors
    call.check(outputs, layer.name)
    call.keep_graph(outputs)
    return outputs


def _propagate(call: RecordedCall, gradients: Sequence[Tensor | None]) -> None:
    """Through the graph that was kept, from the gradients of its outputs."""
    edges, arrived = [], []
    for edge, gradient in zip(call.graph, gradients, strict=True):
        if edge is not None and gradient is not None:
            edges.append(edge)
            arrived.append(gradient)
    propagate(edges, arrived)
