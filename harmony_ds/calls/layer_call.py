"""Runs one layer for one micro-batch: forward and cut, again in backward, or attached to the micro-batch's own graph.

The forward pass builds an autograd graph and throws it away: kernels are chosen by whether a gradient is required, and
the recomputation must give the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from harmony_ds.calls.arguments import (
    Arguments,
    collecting,
    forget_collected,
    give_back,
    take_tensors,
)
from harmony_ds.calls.attributes import Place, Places, held, write_all
from harmony_ds.calls.boundary import InterLayerGraph, Sink, Slot, cut, sinks_of
from harmony_ds.calls.caches import emptied, empty_caches, without_unknown
from harmony_ds.calls.dead_end import DeadEnd
from harmony_ds.calls.intercept import Request
from harmony_ds.calls.layer_buffers import Buffers, buffers_apart, versions
from harmony_ds.calls.lending import Lending, changes_buffers_unseen
from harmony_ds.calls.own_memory import LentMemory, apart, memory, memory_of, taken_apart
from harmony_ds.calls.pieces import WHOLE_CALLS, Assembled, Cut, PieceSinks, Rows
from harmony_ds.calls.random_streams import State, differ
from harmony_ds.calls.recorded_call import InputChangedError, Kept, Outcome, RecordedCall, Trial
from harmony_ds.calls.trees import changed, flatten, map_tensors, tensors_in, unflatten
from harmony_ds.decomposer.find import Layer
from harmony_ds.errors import ModelError
from harmony_ds.offload.stash import Stash, StashEntry


class LayerCalls:
    """Runs the layer calls of one model.

    Attributes:
        replayed: layers that depend on buffers which they change: a recomputation begins with what they were.
        outputs_hooked: forward puts hooks on tensors, maybe on outputs that the next call has taken already.
    """

    def __init__(self, layers: tuple[Layer, ...], lending: Lending, stash: Stash) -> None:
        self._layers = layers
        self._slots = [lending.slots(layer.module) for layer in layers]
        self._dead_ends = [DeadEnd(layer.name) for layer in layers]
        self._stash = stash
        self._lent = [LentMemory(layer.parameters) for layer in layers]
        self._changes_inputs: set[int] = set()
        self._changes_buffers: set[int] = set()
        self._draws: set[int] = set()  # beside those of which that is known by how they are cut
        self.replayed: set[int] = set()
        self.outputs_hooked = False
        self._attributes: dict[int, Places] = {}
        self._buffered = [[m for m in layer.module.modules() if m._buffers] for layer in layers]

    @property
    def changing_buffers(self) -> frozenset[int]:
        """Layers that have been seen to change buffers."""
        return frozenset(self._changes_buffers)

    def watch(self, layer: int, places: Iterable[Place]) -> bool:
        """From now on, `places` are part of what calls of `layer` take and give. False if they were already."""
        known = self._attributes.get(layer, ())
        new = [place for place in places if place not in known]
        if new:
            self._attributes[layer] = (*known, *new)
        return bool(new)

    def _watched(self, layer: int) -> Places:
        return self._attributes.get(layer, ())

    def _sinks(self, request: Request, tensors: list[Tensor], inter_layer: InterLayerGraph) -> list[Sink | None]:
        """Where gradients of what a call takes go. Attributes may still hold what an earlier micro-batch left there."""
        sinks: list[Sink | None] = []
        for tensor in tensors:
            try:
                sinks.append(inter_layer.sink(tensor, self.outputs_hooked) if tensor.requires_grad else None)
            except ModelError:
                if any(tensor is given for given in tensors_in((request.args, request.kwargs))):
                    raise
                sinks.append(self._dead_ends[request.layer])
        return sinks

    def _take(self, request: Request) -> tuple[Arguments, list[Tensor]]:
        return take_tensors(request, [place.read() for place in self._watched(request.layer)])

    # ---- attached: part of the caller's own graph, or of none

    def attached(self, request: Request, copies: Mapping[str, Tensor]) -> Any:
        """Runs the call as the model wrote it, on device copies of the layer's parameters."""
        if request.grad:
            request = without_unknown(request)
        caches = empty_caches(request) if request.grad else []  # generation fills them
        with self._slots[request.layer].filled(copies), request.callers_state(), emptied(caches):
            outputs = request.context.run(request.forward, *request.args, **request.kwargs)
            lent = self._lent[request.layer].of(copies)
            if not lent.isdisjoint(memory_of(tensors_in(outputs))):
                outputs = map_tensors(lambda t: taken_apart(t) if memory(t) in lent else t, outputs)
            return outputs

    def _own(self, layer: int, copies: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those that are the layer's: a pack may hold many layers."""
        return {name: copies[name] for name in self._layers[layer].parameters if name in copies}

    def unrecorded(self, request: Request, copies: Mapping[str, Tensor], rows: Rows) -> Any:
        """As `attached`, for a call without gradients, in pieces where it can be cut."""
        if not rows.cuts:
            return self.attached(request, copies)
        without = without_unknown(request)
        arguments, tensors = self._take(without)
        cut = self._cut(rows, request.layer, arguments, tensors)
        if cut is None:
            return self.attached(request, copies)
        call = RecordedCall(without, 0, arguments, [], [None] * len(tensors), [], cut)
        outcome = self._run_pieces(call, tensors, copies, State)
        return self._hand_over(call, outcome, outcome.leaves, tensors)

    # ---- cut: forward now, backward later

    def forward(
        self,
        request: Request,
        number: int,
        copies: Mapping[str, Tensor],
        inter_layer: InterLayerGraph,
        state: Callable[[], State],
        rows: Rows = WHOLE_CALLS,
    ) -> tuple[Any, RecordedCall | None]:
        """Runs the call and cuts its outputs from its graph.

        Args:
            number: place among the calls of its micro-batch.
            state: where the generators stand.
            rows: how calls are cut into pieces.

        Returns:
            The outputs for the model, and the record for `backward`; None where no gradient can flow.
        """
        if not request.grad:
            return self.unrecorded(request, copies, rows), None
        inter_layer.origin.model = id(self)
        request = without_unknown(request)
        arguments, tensors = self._take(request)
        cut = self._cut(rows, request.layer, arguments, tensors)
        call = self._record(request, number, arguments, self._sinks(request, tensors, inter_layer), cut)
        given = tensors
        if request.layer in self._changes_inputs:
            given = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        name = self._layers[request.layer].name
        call.tensors = [self._keep(tensor, name) for tensor in given]
        before = [t._version for t in tensors]
        outcome = self._run_pieces(call, [t.detach() for t in tensors], copies, state)
        outputs = self._cut_outputs(call, outcome, tensors, self._lent[request.layer].of(copies), inter_layer)
        forget_collected(request)
        arguments.shape.forget_originals()
        if request.layer in self.replayed and call.buffers is None:
            raise InputChangedError(f"layer {name} changes a buffer, which was not seen when the model was measured.")
        if [t._version for t in tensors] != before and request.layer not in self._changes_inputs:
            self._changes_inputs.add(request.layer)
            raise InputChangedError(
                f"layer {name} changes its input in place, which was not seen when the model was measured."
            )
        if not any(call.slots):
            self.forget(call)
            return outputs, None
        return outputs, call

    def _record(
        self, request: Request, number: int, arguments: Arguments, sinks: list[Sink | None], cut: Cut | None
    ) -> RecordedCall:
        layer = request.layer
        return RecordedCall(
            request=replace(request, args=(), kwargs={}),
            number=number,
            arguments=arguments,
            tensors=[],
            sinks=sinks,
            states=[],
            cut=cut,
            buffers=self.copied_buffers(layer) if layer in self.replayed else None,
        )

    def backward(
        self,
        call: RecordedCall,
        copies: Mapping[str, Tensor],
        replay: Callable[[State], None],
        gather: Callable[[], None],
    ) -> bool:
        """Runs the call again and propagates the gradients of its outputs to its inputs and to `copies`; whether there was
        anything to propagate.

        Args:
            gather: called between the pieces of a call that is cut: adds up what has reached `copies`.
        """
        gradients = [slot.take() if slot is not None else None for slot in call.slots]
        if all(gradient is None for gradient in gradients):
            self.forget(call)
            return False
        tensors = [self._tensor(call, kept) for kept in call.tensors]
        if call.request.layer in self._changes_inputs:
            tensors = [t.clone() for t in tensors]
        layer, buffers = call.request.layer, call.buffers
        if buffers is None and layer in self._changes_buffers:
            buffers = self.copied_buffers(layer)  # nobody reads them; statistics must not be gathered twice
        with buffers_apart(buffers or []):
            if call.cut is None:
                replay(call.states[0])
                self._propagate(call, tensors, gradients, copies, call.sinks)
            else:
                sinks = PieceSinks(call.cut, call.sinks, tensors)
                for number, piece in enumerate(call.cut.pieces(call.cut.backward)):
                    if number:
                        gather()
                    replay(call.states[min(number, len(call.states) - 1)])
                    sinks.begin(piece)
                    own, given = call.cut.inputs_of(piece, tensors), call.cut.gradients_of(piece, gradients)
                    self._propagate(call, own, given, copies, sinks.sinks)
                sinks.finish()
        self.forget(call)
        return True

    def _propagate(
        self,
        call: RecordedCall,
        tensors: list[Tensor],
        gradients: list[Tensor | None],
        copies: Mapping[str, Tensor],
        sinks: list[Sink | None],
    ) -> None:
        outcome = self._run(call, tensors, copies, sinks)
        outputs = [leaf for leaf in outcome.leaves if isinstance(leaf, Tensor)]
        call.check(outputs, self._layers[call.request.layer].name)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        retained = [(outputs[place], handed) for place, handed in call.retained]
        del outcome, outputs
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        for output, reference in retained:
            handed = reference()
            if handed is not None:
                handed.grad = output.grad

    def trial(self, request: Request, copies: Mapping[str, Tensor], cut: Cut | None = None) -> Trial:
        """What a call takes and gives, whole or cut. For a request with gradients; nothing is kept for a backward pass,
        and nothing is handed back.
        """
        request = without_unknown(request)
        arguments, tensors = self._take(request)
        sinks: list[Sink | None] = [self._dead_ends[request.layer] if t.requires_grad else None for t in tensors]
        call = RecordedCall(request, 0, arguments, [], sinks, [], cut)
        outcome = self._run_pieces(call, [t.detach() for t in tensors], copies, State)
        outputs = [leaf for leaf in outcome.leaves if isinstance(leaf, Tensor)]
        return Trial(tensors, outputs, self._may_cut(request.layer, arguments))

    def _may_cut(self, layer: int, arguments: Arguments) -> bool:
        """Objects that a layer may write into, inputs and statistics that it changes, are of all rows at once."""
        changes = layer in self._changes_inputs or layer in self._changes_buffers or layer in self._attributes
        return not changes and arguments.may_be_cut

    def _cut(self, rows: Rows, layer: int, arguments: Arguments, tensors: list[Tensor]) -> Cut | None:
        return rows.cut(layer, tensors, layer in self._draws) if self._may_cut(layer, arguments) else None

    def _run_pieces(
        self, call: RecordedCall, tensors: list[Tensor], copies: Mapping[str, Tensor], state: Callable[[], State]
    ) -> Outcome:
        """The call over detached `tensors`, forward, piece by piece if it is cut."""
        dead_end = self._dead_ends[call.request.layer]
        sinks = [dead_end if sink else None for sink in call.sinks]
        copies = dead_end.guarded(self._own(call.request.layer, copies))
        call.states.append(state())
        if call.cut is None:
            return self._run(call, tensors, copies, sinks)
        layer, whole = call.request.layer, Assembled(call.cut, tensors)
        first: Outcome | None = None
        for piece in call.cut.pieces(call.cut.forward):
            if piece.first and call.cut.draws:
                call.states.append(state())
            outcome = self._run(call, call.cut.inputs_of(piece, tensors), copies, sinks)
            whole.add(piece, outcome.inputs, outcome.leaves)
            first = first or Outcome(tensors, whole.leaves, outcome.shape, outcome.written, [])
            del outcome
        assert first is not None
        if not call.cut.draws and differ(call.states[0], state()):
            self._draws.add(layer)
            raise InputChangedError(
                f"layer {self._layers[layer].name} draws random numbers, which was not seen when the model was measured."
            )
        return first

    def _keep(self, tensor: Tensor, name: str) -> StashEntry | Kept:
        # What a layer made is large and this micro-batch's alone; what inter-layer operations made (masks,
        # position ids, rotary tables) is small and taken by every layer.
        if sinks_of(tensor.grad_fn) is not None or tensor.requires_grad:
            return self._stash.put(tensor, name)
        return Kept(tensor.detach(), tensor._version)

    def _tensor(self, call: RecordedCall, kept: StashEntry | Kept) -> Tensor:
        if isinstance(kept, StashEntry):
            return self._stash.tensor(kept).detach()
        if kept.tensor._version != kept.version:
            raise ModelError(
                f"an argument of layer {self._layers[call.request.layer].name} was changed in place after the layer "
                "was called, so the layer cannot be recomputed. Make the operation out of place."
            )
        return kept.tensor

    def forget(self, call: RecordedCall) -> None:
        """Gives up what is kept of `call`: nobody will propagate through it."""
        for entry in call.entries:
            self._stash.release(entry)
        call.tensors = []

    def _run(
        self, call: RecordedCall, tensors: list[Tensor], copies: Mapping[str, Tensor], sinks: list[Any]
    ) -> Outcome:
        request = call.request
        ends = [place for place, sink in enumerate(sinks) if sink is not None]
        inputs = list(tensors)
        for place, tensor in zip(ends, cut([tensors[p] for p in ends], [sinks[p] for p in ends]), strict=True):
            inputs[place] = tensor
        args, kwargs, attributes, made = call.arguments.filled(inputs)
        nodes = [tensor.grad_fn for tensor in inputs]
        buffered, places = self._buffered[request.layer], self._watched(request.layer)
        before = versions(buffered)
        with (
            self._slots[request.layer].filled(copies),
            request.callers_state(),
            held(places, attributes) as left,
            collecting(request) as collected,
            emptied(call.arguments.caches),
        ):
            result = request.context.run(request.forward, *args, **kwargs)
        if buffered:
            self._look_at_buffers(request.layer, before)
        written = list(changed(made))
        same = {id(one.value): one.branch.original for one in made}
        altered = [p for p, t in enumerate(inputs) if t.requires_grad and t.grad_fn is not nodes[p]]
        # Views: the tensors themselves may be among the results, as what the caller gave.
        views = [inputs[p].view_as(inputs[p]) for p in altered]
        leaves, shape = flatten((result, collected, [children for _, children in written], left, views), same)
        return Outcome(inputs, leaves, shape, [into for into, _ in written], altered)

    def _look_at_buffers(self, layer: int, before: list[tuple[Tensor, int]]) -> None:
        """Notes whether a call has changed buffers of its layer."""
        if layer in self._changes_buffers and layer in self.replayed:
            return
        after = versions(self._buffered[layer])
        seen = len(after) != len(before) or any(
            a is not b or v != w for (a, v), (b, w) in zip(after, before, strict=True)
        )
        if seen:
            self.replayed.add(layer)
        if seen or any(map(changes_buffers_unseen, self._buffered[layer])):
            self._changes_buffers.add(layer)

    def _hand_over(self, call: RecordedCall, outcome: Outcome, leaves: list[Any], sources: list[Tensor]) -> Any:
        """The result; what was written elsewhere goes where the layer put it."""
        result, collected, values, left, views = unflatten(leaves, outcome.shape)
        for place, view in zip(outcome.altered, views, strict=True):
            sources[place].copy_(view)  # its memory holds that already: now its graph does, too
        give_back(call.request, collected, outcome.written, values)
        write_all(self._watched(call.request.layer), left)
        return result

    def _cut_outputs(
        self,
        call: RecordedCall,
        outcome: Outcome,
        sources: list[Tensor],
        lent: set[int | None],
        inter_layer: InterLayerGraph,
    ) -> Any:
        """The outputs for the model: inputs that came back are the model's own, the rest is cut.

        Args:
            lent: memory of the parameters, which will be evicted: outputs that lie in it are copied.
        """
        source_of = {id(tensor): source for tensor, source in zip(outcome.inputs, sources, strict=True)}
        leaves = list(outcome.leaves)
        cut_places: list[int] = []
        slots: list[Slot] = []
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            slot = None
            if id(leaf) in source_of:
                leaves[place] = source_of[id(leaf)]
            elif leaf.requires_grad:
                slot = Slot(call.number, leaf, inter_layer.origin)
                slots.append(slot)
                cut_places.append(place)
            if id(leaf) not in source_of:
                leaves[place] = apart(leaf.detach()) if memory(leaf) in lent else leaf.detach()
            call.slots.append(slot)
        for place, tensor in zip(cut_places, cut([leaves[p] for p in cut_places], slots), strict=True):
            leaves[place] = tensor
            if outcome.leaves[place].retains_grad:
                number = sum(isinstance(leaf, Tensor) for leaf in leaves[:place])
                call.retained.append((number, weakref.ref(tensor)))
        return self._hand_over(call, outcome, leaves, sources)

    def copied_buffers(self, layer: int) -> Buffers:
        """What the buffers of a layer hold, for `buffers_apart`."""
        return [
            (module, {key: None if b is None else b.clone() for key, b in module._buffers.items()})
            for module in self._buffered[layer]
        ]
