"""Runs one layer for one micro-batch: forward and cut, again in backward, or attached to the micro-batch's own graph.

The forward pass builds an autograd graph and throws it away, or keeps it: kernels are chosen by whether a gradient is
required, and the recomputation must give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from harmony_ds.calls.arguments import forget_collected
from harmony_ds.calls.boundary import propagate
from harmony_ds.calls.buffers import buffers_apart, copied_buffers
from harmony_ds.calls.caches import emptied, empty_caches, without_unknown
from harmony_ds.calls.called_layer import CalledLayer
from harmony_ds.calls.installed import Installation
from harmony_ds.calls.inter_layer import InterLayerGraph
from harmony_ds.calls.intercept import Request
from harmony_ds.calls.keeping import Keeping
from harmony_ds.calls.outputs import cut_outputs, lie_elsewhere_too
from harmony_ds.calls.own_memory import memory, memory_of, taken_apart
from harmony_ds.calls.random_streams import State, differ
from harmony_ds.calls.recorded_call import Outcome, RecordedCall, Trial, View, norms_of
from harmony_ds.calls.slices import Assembled, Cut, cut_of
from harmony_ds.calls.taking import Given
from harmony_ds.calls.targets import GradientTarget
from harmony_ds.calls.trees import map_tensors, tensors_in
from harmony_ds.calls.unseen import UnseenError
from harmony_ds.decomposer.find import Layer
from harmony_ds.errors import CallChangedError
from harmony_ds.offload.residency import Leaves
from harmony_ds.offload.stash import Stash
from harmony_ds.profiler.rows import WHOLE_CALLS, Rows


class LayerCalls:
    """Runs the layer calls of one model.

    Attributes:
        propagating: a backward pass that is under way is that of one layer.
        proving: what calls give is compared with what their recomputations give.
    """

    def __init__(self, layers: tuple[Layer, ...], installation: Installation, stash: Stash) -> None:
        self._layers = [CalledLayer(layer, installation.parameters_of(layer.module)) for layer in layers]
        self._keeping = Keeping(stash)
        self.propagating = False
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

    def copy_inputs(self, layer: int) -> None:
        """From now on, what is kept of calls of `layer` is a copy of what they were given."""
        self._layers[layer].inputs_change = True

    def check_replayed(self, calls: Iterable[RecordedCall]) -> None:
        """Raises CallChangedError if one of `calls` ran before its layer was known to depend on buffers that it changes."""
        for call in calls:
            layer = self._layers[call.request.layer]
            if layer.replayed and call.buffers is None:
                raise CallChangedError(
                    f"layer {layer.name} was seen to change buffers that it reads (as normalization does in training and "
                    "evaluation mode in turn) after the forward pass of a micro-batch whose loss or outputs were looked "
                    "at, which cannot be run again as it was. Nothing has been updated. Look at losses behind "
                    "engine.step()."
                )

    def may_keep_graphs(self, layer: int) -> bool:
        """Whether graphs of `layer` can be kept while other micro-batches go through it."""
        return self._layers[layer].may_keep_graphs

    # ---- attached: part of the caller's own graph, or of none

    def attached(self, request: Request, copies: Leaves) -> Any:
        """Runs the call as the model wrote it, on device copies of the layer's parameters."""
        layer = self._layers[request.layer]
        caches: list[Any] = []
        if request.grad:  # generation fills them
            known = without_unknown(request)
            if known is not request:
                request, caches = known, empty_caches(known)
        with layer.parameters.installed(copies), emptied(caches):
            outputs = request.run(request.args, request.kwargs)
        own = layer.memory.of(copies)
        if not own.isdisjoint(memory_of(tensors_in(outputs))):
            with torch.set_grad_enabled(request.grad):
                outputs = map_tensors(lambda t: taken_apart(t) if memory(t) in own else t, outputs)
        return outputs

    def _unrecorded(self, request: Request, copies: Leaves, rows: Rows) -> Any:
        """As `attached`, for a call without gradients, in slices where it can be cut."""
        if not rows.cuts:
            return self.attached(request, copies)
        without, layer = without_unknown(request), self._layers[request.layer]
        arguments, tensors = layer.take(without)
        cut = cut_of(rows, request.layer, tensors, layer.draws) if layer.may_be_cut(arguments) else None
        if cut is None:
            return self.attached(request, copies)
        call = RecordedCall(without, 0, arguments, [None] * len(tensors), cut)
        outcome = self._run_slices(call, tensors, copies, State)
        return layer.hand_over(call, outcome, outcome.leaves, tensors)

    # ---- cut: forward now, backward later

    def forward(
        self,
        request: Request,
        number: int,
        copies: Leaves,
        inter_layer: InterLayerGraph,
        state: Callable[[], State],
        rows: Rows = WHOLE_CALLS,
    ) -> tuple[Any, RecordedCall | None]:
        """Runs the call and cuts its outputs from its graph.

        Args:
            number: place among the calls of its micro-batch.
            state: where the generators stand.
            rows: how calls are cut into slices.

        Returns:
            The outputs for the model, and the record for `backward`; None where no gradient can flow.
        """
        if not request.grad:
            return self._unrecorded(request, copies, rows), None
        call, given = self._recorded(request, number, inter_layer, rows)
        tensors, layer = given.tensors, self._layers[request.layer]
        if layer.inputs_may_change:
            copied = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
            call.tensors = [self._keeping.keep(tensor, layer.name) for tensor in copied]
            inputs = [t.detach() for t in tensors]
        else:
            call.tensors, inputs = self._keeping.keep_all(tensors, given.kept, layer.name)
        before = [t._version for t in tensors]
        try:
            outcome = self._run_slices(call, inputs, copies, state)
        except BaseException:
            self.forget(call)
            raise
        if self.proving and call.cut is None:
            call.norms = norms_of(outcome.tensors)
        outputs = self._hand_over(call, outcome, tensors, copies)
        self._check_seen(layer, call, [t._version for t in tensors] != before)
        if (wanted := self._wanted(call)) is not None and not layer.inputs_may_change:
            inter_layer.taking.remember(request, given, call.tensors)
        return outputs, wanted

    def forward_for_graph(
        self,
        request: Request,
        number: int,
        copies: Leaves,
        inter_layer: InterLayerGraph,
        state: Callable[[], State],
    ) -> tuple[Any, RecordedCall | None]:
        """The same, of a call whose `copies` will be there until `backward`: its graph is kept, and nothing is stashed, if
        the layer's graphs can be.
        """
        layer = self._layers[request.layer]
        if not request.grad or not layer.may_keep_graphs:
            return self.forward(request, number, copies, inter_layer, state)
        call, given = self._recorded(request, number, inter_layer, WHOLE_CALLS)
        tensors = given.tensors
        targets = [t and layer.dead_end.unless(lambda: self.propagating, t) for t in call.targets]
        outcome = layer.run(call, [t.detach() for t in tensors], copies, targets)
        call.states.append(state())  # behind it, as behind a recomputation
        outputs = self._hand_over(call, outcome, tensors, copies)
        self._check_seen(layer, call, inputs_changed=False)
        call.keep_graph(outcome.tensors)
        return outputs, self._wanted(call)

    def _hand_over(self, call: RecordedCall, outcome: Outcome, tensors: list[Tensor], copies: Leaves) -> Any:
        """What the model gets of a call that has run."""
        layer = self._layers[call.request.layer]
        leaves, lie_in = cut_outputs(call, outcome, tensors, layer.memory.of(copies))
        call.views = [View(layer.name, leaf) for leaf in lie_elsewhere_too(outcome, leaves, lie_in)]
        outputs = layer.hand_over(call, outcome, leaves, tensors)
        if call.arguments.collects:
            forget_collected(call.request)
        call.arguments.shape.forget_originals()
        return outputs

    def _wanted(self, call: RecordedCall) -> RecordedCall | None:
        """`call`, if any gradient can flow."""
        if any(call.output_gradients):
            return call
        self.forget(call)
        return None

    def _recorded(
        self, request: Request, number: int, inter_layer: InterLayerGraph, rows: Rows
    ) -> tuple[RecordedCall, Given]:
        """A call that is about to run, and what it takes."""
        layer = self._layers[request.layer]
        given = inter_layer.taking.take(request)
        call = RecordedCall(
            request=request.without_arguments(),
            number=number,
            arguments=given.arguments,
            targets=[inter_layer.target(t) if t.requires_grad else None for t in given.tensors],
            cut=cut_of(rows, request.layer, given.tensors, layer.draws)
            if rows.cuts and layer.may_be_cut(given.arguments)
            else None,
            buffers=copied_buffers(layer.buffered) if layer.replayed else None,
        )
        return call, given

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
        self,
        call: RecordedCall,
        copies: Leaves,
        replay: Callable[[State], None],
        gather: Callable[[], None],
    ) -> bool:
        """Runs the call again, unless its graph was kept, and propagates the gradients of its outputs to its inputs and to
        `copies`; whether there was anything to propagate.

        Args:
            gather: called between the slices of a call that is cut: adds up what has reached `copies`.
        """
        gradients = [None if gradient is None else gradient.take() for gradient in call.output_gradients]
        if not [gradient for gradient in gradients if gradient is not None]:
            self.forget(call)
            return False
        layer = self._layers[call.request.layer]
        self.propagating = True
        try:
            self._run_back(layer, call, copies, gradients, replay, gather)
        finally:
            self.propagating = False
        self.forget(call)
        return True

    def _run_back(
        self,
        layer: CalledLayer,
        call: RecordedCall,
        copies: Leaves,
        gradients: list[Tensor | None],
        replay: Callable[[State], None],
        gather: Callable[[], None],
    ) -> None:
        """Those `gradients` of the outputs of `call`, which is run again unless its graph was kept."""
        if call.graph:
            replay(call.states[0])
            _propagate(call, gradients)
            return
        with _apart(layer, call):
            if call.cut is not None:
                slices = call.cut.propagated(self._inputs(layer, call), call.targets, gradients)
                for number, (own, targets, given) in enumerate(slices):
                    if number:
                        gather()
                    replay(call.states[min(number, len(call.states) - 1)])
                    _run_again(layer, call, own, copies, targets)
                    _propagate(call, given)
                return
            replay(call.states[0])
            _run_again(layer, call, self._inputs(layer, call), copies, call.targets)
            _propagate(call, gradients)

    def _inputs(self, layer: CalledLayer, call: RecordedCall) -> list[Tensor]:
        """What the call is run again over."""
        return self._keeping.tensors(call.tensors, apart=layer.changes_inputs)

    def recompute(self, call: RecordedCall, copies: Leaves, replay: Callable[[State], None]) -> list[Tensor]:
        """Runs the call again, whole, and keeps its graph for `backward`; the values that it gives."""
        layer = self._layers[call.request.layer]
        with _apart(layer, call):
            replay(call.states[0])
            return [t.detach() for t in _run_again(layer, call, self._inputs(layer, call), copies, call.targets)]

    def trial(self, request: Request, copies: Leaves, cut: Cut | None = None) -> Trial:
        """What a call takes and gives, whole or cut. For a request with gradients; nothing is kept for a backward pass,
        and nothing is handed back.
        """
        request, layer = without_unknown(request), self._layers[request.layer]
        arguments, tensors = layer.take(request)
        targets: list[GradientTarget | None] = [layer.dead_end if t.requires_grad else None for t in tensors]
        call = RecordedCall(request, 0, arguments, targets, cut)
        outcome = self._run_slices(call, [t.detach() for t in tensors], copies, State)
        return Trial(tensors, outcome.tensors, layer.may_be_cut(arguments))

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
    layer: CalledLayer,
    call: RecordedCall,
    tensors: list[Tensor],
    copies: Leaves,
    targets: list[GradientTarget | None],
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
