"""Runs one layer for one micro-batch: forward and cut, again in backward, or attached to the micro-batch's own graph.

The forward pass builds an autograd graph and throws it away: kernels are chosen by whether a gradient is required, and
the recomputation must give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.decomposer.find import Layer
from harmony_ds.errors import ModelError
from harmony_ds.offload.stash import Stash, StashEntry
from harmony_ds.runtime.arguments import (
    Arguments,
    collecting,
    forget_collected,
    give_back,
    is_plain,
    take_tensors,
    without_cache,
    writes_of,
)
from harmony_ds.runtime.boundary import Glue, Sink, Slot, cut, sinks_of
from harmony_ds.runtime.intercept import Autocast, Request
from harmony_ds.runtime.lending import Lending, changes_buffers_unseen
from harmony_ds.runtime.pieces import Assembled, Cut, PieceSinks, Rows
from harmony_ds.runtime.random_streams import State
from harmony_ds.runtime.trees import Shape, flatten, map_tensors, tensors_in, unflatten


class _Nowhere:
    """Takes the gradients of a graph that nobody propagates through."""

    def add(self, gradient: Tensor) -> None:
        return None

    def take(self) -> Tensor | None:
        return None


_NOWHERE = _Nowhere()


@dataclass(slots=True, eq=False)
class RecordedCall:
    """What it takes to run a layer call again and to propagate through it.

    Attributes:
        request: the call as the model made it, without its arguments.
        number: place among the calls of its micro-batch.
        leaves: its flattened arguments; tensors are replaced by their index into `entries`.
        tensors: per tensor argument: its stash entry, or what was kept of it where that is not worth stashing.
        sinks: per tensor argument: where its gradient goes, or None.
        states: random state before the call, or before each of its pieces if it draws random numbers.
        cut: how the call is cut into pieces; None: not at all.
        slots: per tensor output: the sum of its gradients, or None where none flows.
    """

    request: Request
    number: int
    arguments: Arguments
    tensors: list[StashEntry | Kept]
    sinks: list[Sink | None]
    states: list[State]
    cut: Cut | None = None
    slots: list[Slot | None] = field(default_factory=list)

    @property
    def entries(self) -> list[StashEntry]:
        return [t for t in self.tensors if isinstance(t, StashEntry)]


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A tensor argument that stays where it is, and its version when the layer was called."""

    tensor: Tensor
    version: int


@dataclass(slots=True, eq=False)
class Outcome:
    """What a run of a layer left: its output leaves, and how to give them back."""

    inputs: list[Tensor]
    leaves: list[Any]
    shape: Shape


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """Tensors that a call takes and gives, and whether anything speaks against cutting it."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    may_be_cut: bool


class LayerCalls:
    """Runs the layer calls of one model."""

    def __init__(self, layers: tuple[Layer, ...], lending: Lending, stash: Stash) -> None:
        self._layers = layers
        self._slots = [lending.slots(layer.module) for layer in layers]
        self._stash = stash
        self.rows = Rows()
        self._changes_inputs: set[int] = set()
        self._changes_buffers: set[int] = set()
        self._buffered = [[m for m in layer.module.modules() if m._buffers] for layer in layers]

    # ---- attached: part of the caller's own graph, or of none

    def attached(self, request: Request, copies: Mapping[str, Tensor]) -> Any:
        """Runs the call as the model wrote it, on device copies of the layer's parameters."""
        if request.grad:
            request = without_cache(request)
        with self._slots[request.layer].filled(copies), _caller_state(request):
            outputs = request.context.run(request.forward, *request.args, **request.kwargs)
            lent = _memory_of(copies.values())
            if not lent.isdisjoint(_memory_of(tensors_in(outputs))):
                outputs = map_tensors(lambda t: _taken_apart(t) if _memory(t) in lent else t, outputs)
            return outputs

    def unrecorded(self, request: Request, copies: Mapping[str, Tensor]) -> Any:
        """As `attached`, for a call without gradients, in pieces where it can be cut."""
        if not self.rows.cuts:
            return self.attached(request, copies)
        without = without_cache(request)
        arguments, tensors = take_tensors(without)
        cut = self.rows.cut(request.layer, tensors)
        if cut is None or not self._may_cut(request.layer, arguments):
            return self.attached(request, copies)
        call = RecordedCall(without, 0, arguments, [], [None] * len(tensors), [], cut)
        outcome = self._run_pieces(call, tensors, copies, lambda: ())
        result, collected, writes = unflatten(outcome.leaves, outcome.shape)
        give_back(call.request, call.arguments, collected, writes)
        return result

    # ---- cut: forward now, backward later

    def forward(
        self, request: Request, number: int, copies: Mapping[str, Tensor], glue: Glue, state: Callable[[], State]
    ) -> tuple[Any, RecordedCall | None]:
        """Runs the call and cuts its outputs from its graph.

        Returns:
            The outputs for the model, and the record for `backward`; None where no gradient can flow.
        """
        if not request.grad:
            return self.unrecorded(request, copies), None
        request = without_cache(request)
        arguments, tensors = take_tensors(request)
        call = RecordedCall(
            request=Request(request.layer, request.forward, (), {}, request.context, True, request.autocast),
            number=number,
            arguments=arguments,
            tensors=[],
            sinks=[glue.sink(t) if t.requires_grad else None for t in tensors],
            states=[],
            cut=self.rows.cut(request.layer, tensors) if self._may_cut(request.layer, arguments) else None,
        )
        given = tensors
        if request.layer in self._changes_inputs:
            given = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        name = self._layers[request.layer].name
        call.tensors = [self._keep(tensor, name) for tensor in given]
        versions = [t._version for t in tensors]
        outcome = self._run_pieces(call, [t.detach() for t in tensors], copies, state)
        outputs = self._cut_outputs(call, outcome, tensors, _memory_of(copies.values()))
        forget_collected(request)
        arguments.empty_mappings()
        if [t._version for t in tensors] != versions and request.layer not in self._changes_inputs:
            self._changes_inputs.add(request.layer)
            raise InputChangedError(
                f"layer {name} changes its input in place, which was not seen when the model was measured."
            )
        if not any(call.slots):
            self.forget(call)
            return outputs, None
        return outputs, call

    def backward(
        self,
        call: RecordedCall,
        copies: Mapping[str, Tensor],
        replay: Callable[[State], None],
        gather: Callable[[], None],
    ) -> bool:
        """Runs the call again and propagates the gradients of its outputs to its inputs and to `copies`.

        Args:
            gather: called between the pieces of a call that is cut: adds up what has reached `copies`.

        Returns:
            Whether there was anything to propagate.
        """
        gradients = [slot.take() if slot is not None else None for slot in call.slots]
        if all(gradient is None for gradient in gradients):
            self.forget(call)
            return False
        tensors = [self._tensor(call, kept) for kept in call.tensors]
        if call.request.layer in self._changes_inputs:
            tensors = [t.clone() for t in tensors]
        with self._buffers_kept(call.request.layer):
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
        if len(outputs) != len(gradients):
            raise ModelError(
                f"layer {self._layers[call.request.layer].name} returned {len(gradients)} tensors in forward and "
                f"{len(outputs)} when it was recomputed: its outputs must depend on its inputs and on torch's "
                "random numbers alone."
            )
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        del outcome, outputs
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])

    def trial(self, request: Request, copies: Mapping[str, Tensor], cut: Cut | None = None) -> Trial:
        """What a call takes and gives, whole or cut. For a request with gradients; nothing is kept for a backward pass."""
        arguments, tensors = take_tensors(without_cache(request))
        sinks: list[Sink | None] = [_NOWHERE if t.requires_grad else None for t in tensors]
        call = RecordedCall(request, 0, arguments, [], sinks, [], cut)
        outcome = self._run_pieces(call, [t.detach() for t in tensors], copies, lambda: ())
        outputs = [leaf for leaf in outcome.leaves if isinstance(leaf, Tensor)]
        return Trial(tensors, outputs, self._may_cut(request.layer, arguments))

    def _may_cut(self, layer: int, arguments: Arguments) -> bool:
        """Objects that a layer may write into, inputs and statistics that it changes, are of all rows at once."""
        changes = layer in self._changes_inputs or layer in self._changes_buffers
        return not changes and not arguments.mappings and all(map(is_plain, arguments.leaves))

    def _run_pieces(
        self, call: RecordedCall, tensors: list[Tensor], copies: Mapping[str, Tensor], state: Callable[[], State]
    ) -> Outcome:
        """The call over detached `tensors`, forward, piece by piece if it is cut."""
        sinks = [_NOWHERE if sink else None for sink in call.sinks]
        call.states.append(state())
        if call.cut is None:
            return self._run(call, tensors, copies, sinks)
        layer, whole = call.request.layer, Assembled(call.cut, tensors)
        shape = None
        for piece in call.cut.pieces(call.cut.forward):
            if piece.first and layer in self.rows.drawing:
                call.states.append(state())
            outcome = self._run(call, call.cut.inputs_of(piece, tensors), copies, sinks)
            shape = shape or outcome.shape
            whole.add(piece, outcome.inputs, outcome.leaves)
            del outcome
        assert shape is not None
        if layer not in self.rows.drawing and differ(call.states[0], state()):
            self.rows.drawing.add(layer)
            raise InputChangedError(
                f"layer {self._layers[layer].name} draws random numbers, which was not seen when the model was measured."
            )
        return Outcome(tensors, whole.leaves, shape)

    def _keep(self, tensor: Tensor, name: str) -> StashEntry | Kept:
        # What a layer made is large and this micro-batch's alone; what glue made (masks, position ids, rotary tables)
        # is small and taken by every layer.
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
        args, kwargs, mappings = call.arguments.filled(inputs)
        buffered = self._buffered[request.layer]
        versions = _buffer_versions(buffered)
        with self._slots[request.layer].filled(copies), _caller_state(request), collecting(request) as collected:
            result = request.context.run(request.forward, *args, **kwargs)
        if buffered and request.layer not in self._changes_buffers and self._have_changed(buffered, versions):
            self._changes_buffers.add(request.layer)
        writes = [
            writes_of(before, after) for (_, before), after in zip(call.arguments.mappings, mappings, strict=True)
        ]
        leaves, shape = flatten((result, collected, writes))
        return Outcome(inputs, leaves, shape)

    @staticmethod
    def _have_changed(modules: list[nn.Module], versions: list[int]) -> bool:
        return any(map(changes_buffers_unseen, modules)) or versions != _buffer_versions(modules)

    def _cut_outputs(self, call: RecordedCall, outcome: Outcome, sources: list[Tensor], lent: set[int | None]) -> Any:
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
                slot = Slot(call.number, leaf)
                slots.append(slot)
                cut_places.append(place)
            if id(leaf) not in source_of:
                leaves[place] = _apart(leaf.detach()) if _memory(leaf) in lent else leaf.detach()
            call.slots.append(slot)
        for place, tensor in zip(cut_places, cut([leaves[p] for p in cut_places], slots), strict=True):
            leaves[place] = tensor
        result, collected, writes = unflatten(leaves, outcome.shape)
        give_back(call.request, call.arguments, collected, writes)
        return result

    @contextmanager
    def _buffers_kept(self, layer: int) -> Iterator[None]:
        """A recomputation must not update running statistics a second time."""
        if layer not in self._changes_buffers:
            yield
            return
        buffers = list(self._layers[layer].module.buffers())
        before = [b.clone() for b in buffers]
        yield
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)


class InputChangedError(ModelError):
    """A layer turned out to change its input in place; it is remembered, and the step can be run again."""


@contextmanager
def _caller_state(request: Request) -> Iterator[None]:
    with torch.set_grad_enabled(request.grad), Autocast.entered(request.autocast):
        yield


class _Apart(torch.autograd.Function):
    """A tensor in memory of its own, as it was laid out: the kernels that read it are chosen by its strides."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return _apart(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _taken_apart(tensor: Tensor) -> Tensor:
    copy: Tensor = _Apart.apply(tensor)  # type: ignore[no-untyped-call]
    return copy


def _apart(tensor: Tensor) -> Tensor:
    places = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((n - 1) * stride for n, stride in places) if tensor.numel() else 0
    memory = tensor.as_strided((extent,), (1,)).clone()
    return torch.empty_like(memory).set_(memory.untyped_storage(), 0, tensor.shape, tensor.stride())


def _memory(tensor: Tensor) -> int | None:
    """Which memory a tensor lies in; None for what has none (a phantom)."""
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else None


def _memory_of(tensors: Iterable[Tensor]) -> set[int | None]:
    return {memory for tensor in tensors if (memory := _memory(tensor)) is not None}


def differ(a: State, b: State) -> bool:
    """Whether random numbers were drawn between two states."""
    return any(not torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _buffer_versions(modules: list[nn.Module]) -> list[int]:
    return [b._version for m in modules for b in m._buffers.values() if b is not None]
