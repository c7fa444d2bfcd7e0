"""Layer calls of one micro-batch: forward with outputs cut, recomputed in backward, or attached to the caller's graph.

The forward pass builds an autograd graph even where it is discarded: whether gradients are required decides which kernels
run, and a recomputation must give the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import GradientEdge, get_gradient_edge

from harmony_ds.decomposer.find import Layer
from harmony_ds.device.base import PartsToRun
from harmony_ds.errors import ModelError, UnsupportedError
from harmony_ds.model.arguments import Arguments, CallOutputs, LayerInputs
from harmony_ds.model.buffers import Buffers, clone_buffers, substituted_buffers
from harmony_ds.model.caches import extract_caches, restore_caches, snapshot_caches
from harmony_ds.model.called_layer import CalledLayer, copy_with_gradient, cut_outputs, storage_of, storages_of
from harmony_ds.model.contract import UnseenError
from harmony_ds.model.device_transfers import DeviceTransfers
from harmony_ds.model.graph_cut import cut, propagate
from harmony_ds.model.head_tiles import HeadTiles
from harmony_ds.model.installed import Installation
from harmony_ds.model.inter_layer import InterLayerGraph
from harmony_ds.model.intercept import Request
from harmony_ds.model.layer_tiles import LayerTiles
from harmony_ds.model.own_settings import LaneSettings, in_force
from harmony_ds.model.random_streams import RandomState, states_differ
from harmony_ds.model.recorded_call import RecordedCall, RecordedHead, norms_of
from harmony_ds.model.slices import Piece, RowSlice, SliceAssembler, Slicing, slicing_of
from harmony_ds.model.targets import GradientSum, OutputGradient, Targets
from harmony_ds.model.token_expression import HeadCall, TiledWork, tensors_beside
from harmony_ds.model.token_proof import ModuleCall, TokenProof, prove
from harmony_ds.model.token_rules import TokenPlace, TokensMixedError
from harmony_ds.model.token_tensor import TokenTensor
from harmony_ds.model.trees import map_tensors, tensors_in
from harmony_ds.offload.device_copies import Leaves
from harmony_ds.offload.stash import Stash, StashEntry
from harmony_ds.scheduler.rows import WHOLE_CALLS, Rows

_logger = logging.getLogger(__name__)

ReadState = Callable[[], RandomState]
SetState = Callable[[RandomState], None]
_TOKENS_OF_A_PROOF = (257, 251)
"""Numbers of tokens for which a call is found to be one of a head, which treats each by itself. They are primes, so that no
other dimension is taken for theirs. The numbers that run are proved when they come (`_HeadInputs.may_run_in_tiles`)."""


class LayerCalls:
    """Runs the layer calls of one model.

    Attributes:
        layers: by index, with what has been seen of them.
        head_tiles: which heads are called in tiles of tokens, with the loss.
        layer_tiles: which calls inside layers run in tiles of tokens.
        checks_recomputation: outputs of a recomputation are compared with those of forward.
        slices_from_host: in backward, slices of rows take their inputs from the host, where these wait there.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        installation: Installation,
        stash: Stash,
        device_transfers: DeviceTransfers,
        parts_to_run: PartsToRun,
    ) -> None:
        self.head_tiles = HeadTiles()
        self.layer_tiles = LayerTiles(parts_to_run)
        self.layers = [
            CalledLayer(layer, installation.parameters_of(layer.module), self.layer_tiles) for layer in layers
        ]
        self._packed = [index for index, layer in enumerate(self.layers) if layer.parameters.has_packed]
        self._stash = stash
        self._parts_to_run = parts_to_run
        self._device_transfers = device_transfers
        self._open_heads: list[tuple[int, HeadCall]] = []
        # By a head's call and the tokens of a tile, whether it is proved:
        self._may_run_in_tiles: dict[object, bool] = {}
        self.checks_recomputation = False
        self.slices_from_host = False
        self._unseen: list[str] | None = None  # None: not collected

    @property
    def changing_buffers(self) -> frozenset[int]:
        """The layers that have been seen to change buffers."""
        return frozenset(index for index, layer in enumerate(self.layers) if layer.changes_buffers)

    def find_buffers(self) -> None:
        """Note the modules of layers that have buffers now."""
        for layer in self.layers:
            layer.find_buffers()

    def replay_buffers_of(self, modules: Set[nn.Module]) -> None:
        """Let recomputations of layers with `modules` start from their former buffers from now on."""
        for layer in self.layers:
            if not modules.isdisjoint(layer.buffered):
                layer.replay_buffers()

    @contextmanager
    def collecting_unseen(self) -> Iterator[list[str]]:
        """List what calls do that was not known of them, and note it, instead of raising UnseenError."""
        before, self._unseen = self._unseen, []
        try:
            yield self._unseen
        finally:
            self._unseen = before

    def place_buffers(self, devices: Mapping[int, Sequence[int]], unlayered: Iterable[str]) -> dict[nn.Module, int]:
        """Return the device of each module with buffers: the first of the `devices` that run its layer.

        Operands are aligned for layers that several devices run, or that use `unlayered` parameters, which are on HOME.
        """
        shared, places = set(unlayered), {}
        for index, numbers in devices.items():
            layer = self.layers[index]
            odd = not shared.isdisjoint(layer.names) or (len(set(numbers)) > 1 and layer.buffered)
            layer.alignment = self._device_transfers.between_layers if odd else None
            places.update(dict.fromkeys(layer.buffered, numbers[0]))
        return places

    def check_replayed(self, calls: Iterable[RecordedCall]) -> None:
        """Raise ModelError if one of `calls` ran before its layer was known to depend on buffers that it changes."""
        for call in calls:
            layer = self.layers[call.request.layer]
            if layer.replayed and call.buffers is None:
                raise ModelError(
                    f"layer {layer.name} was seen to change buffers that it reads (as normalization does in training and "
                    "evaluation mode in turn) after the forward pass of a micro-batch whose loss or outputs were read, "
                    "which cannot be run again. Nothing has been updated. Read losses after engine.step()."
                )

    def run_attached(self, request: Request, leaves: Leaves) -> Any:
        """Run the call as the model wrote it, on device copies of the layer's parameters: outputs keep their graph."""
        layer = self.layers[request.layer]
        if request.grad:
            values, caches = extract_caches(request)
        else:  # generation uses caches
            values, caches = [*request.args, *request.kwargs.values()], {}
        held = snapshot_caches(caches.values()) if caches else []
        values = self._device_transfers.values_to_current(values)
        kwargs = dict(zip(request.kwargs, values[len(request.args) :], strict=True))
        try:
            outputs = layer.call_forward(request, values[: len(request.args)], kwargs, leaves)
        finally:
            if held:  # after an error, too, which the model's code may catch
                restore_caches(held)
        self._device_transfers.check_input_copies(layer.name)
        own = layer.parameter_storages(leaves)
        if not own.isdisjoint(storages_of(tensors_in(outputs))):
            with torch.set_grad_enabled(request.grad):
                outputs = map_tensors(lambda t: copy_with_gradient(t) if storage_of(t) in own else t, outputs)
        self._device_transfers.mark(outputs)
        return outputs

    def attached_backward(self, layers: Container[int], leaves: Leaves) -> AbstractContextManager[object]:
        """Return a context for a backward pass through calls of `layers` that are parts of the micro-batch's graph."""
        packed = [index for index in self._packed if index in layers]
        return self._with_packed(packed, leaves) if packed else nullcontext()

    @contextmanager
    def _with_packed(self, layers: Sequence[int], leaves: Leaves) -> Iterator[None]:
        """Let the modules of `layers` hold their packed weights: HQQ's backward pass dequantizes them again."""
        with ExitStack() as stack:
            for index in layers:
                stack.enter_context(self.layers[index].parameters.installed(leaves))
            yield

    def open_head(
        self, request: Request, leaves: Leaves, gather: Callable[[], None] | None = None
    ) -> TokenTensor | None:
        """Return the output of a head's call, to be computed later in tiles of tokens; None: the call is to run now, whole.

        It is computed with what the model makes of it, until `close_heads`; `leaves` must stay on the device until then.

        Args:
            gather: called after each tile of the loss's backward pass: adds up the gradients that have reached `leaves`.
                None: for a forward pass that no gradient goes back through.
        """
        propagates = gather is not None
        if request.grad is not propagates:
            return None
        weights: Callable[[], AbstractContextManager[Any]] = partial(nullcontext, leaves)
        inputs = self._inputs_for_tiles(request, weights)
        if inputs is None:
            return None
        hidden = inputs.hidden if propagates else inputs.hidden.detach()
        head = HeadCall(hidden, inputs.run, self.head_tiles.size, weights, gather or _nothing, self._parts_to_run)
        output = _output_of(head, request)
        if output is not None:
            self._open_heads.append((request.layer, head))
        return output

    def open_recorded_head(
        self,
        request: Request,
        number: int,
        weights: Callable[[], AbstractContextManager[Leaves]],
        inter_layer: InterLayerGraph,
        record: Callable[[RecordedHead], None],
    ) -> TokenTensor | None:
        """Do what `open_head` does for a forward pass that runs by itself: its backward pass comes later, by records.

        Args:
            weights: makes a context with the head's weights on the device, as long as they do not change.
            record: takes each record of what the program has made of the output, for `backward`.
        """
        layer = self.layers[request.layer]
        inputs = self._inputs_for_tiles(request, weights) if request.grad and not layer.buffered else None
        if inputs is None:
            return None
        hidden, arguments = inputs.hidden, inputs.arguments
        target = inter_layer.target(hidden) if hidden.requires_grad else None
        cut_hidden = hidden.detach().requires_grad_(hidden.requires_grad)
        head = HeadCall(cut_hidden, inputs.run, self.head_tiles.size, weights, _nothing, self._parts_to_run)

        def recorded(work: TiledWork) -> list[Tensor]:
            made = work.compute(head.hidden)
            call = RecordedHead(request, number, arguments, [target], work=work, beside=tensors_beside(work.expression))
            call.tensors = [self._stash.put(hidden, layer.name)]
            gradients = [OutputGradient(number, one) if one.is_floating_point() else None for one in made]
            call.output_gradients = [*gradients]
            record(call)
            results = list(made)
            for place, gradient in enumerate(gradients):
                if gradient is not None:
                    (results[place],) = cut([made[place]], [gradient])
            return results

        head.record = recorded
        return _output_of(head, request)

    def close_heads(self) -> None:
        """Compute nothing of heads' outputs any more: their weights leave the device. Log what needed them whole, once."""
        for layer, head in self._open_heads:
            self.close_head(layer, head)
        self._open_heads.clear()

    def close_head(self, layer: int, head: HeadCall) -> None:
        """Compute nothing of the output of one head any more."""
        head.close()
        for function, shape in head.computed_whole_for.items():
            if self.head_tiles.is_new_use(layer, function):
                _logger.warning(
                    "what layer %s gives (%s) is computed for all tokens of a micro-batch at once: it is not known how %s "
                    "could run in tiles of tokens (docs/long_context.md).",
                    self.layers[layer].name,
                    " x ".join(map(str, shape)),
                    function,
                )

    def _inputs_for_tiles(
        self, request: Request, weights: Callable[[], AbstractContextManager[Any]]
    ) -> _HeadInputs | None:
        """Return what a head's call is given, on its device, if it may run in tiles, and has more tokens; else None."""
        inputs = self._inputs_of_head(request) if self.head_tiles.has_head(request.layer) else None
        if inputs is None or inputs.tokens <= self.head_tiles.size:
            return None
        called = self.layer_tiles.key_of(inputs.call_with(inputs.hidden))
        key = self.head_tiles.size, request.grad, request.autocast, request.around, called
        if key not in self._may_run_in_tiles:
            with weights() as leaves:
                self._may_run_in_tiles[key] = inputs.may_run_in_tiles(self.head_tiles.size, leaves)
        if not self._may_run_in_tiles[key]:
            return None
        (hidden,) = self._device_transfers.to_current([inputs.hidden])
        return replace(inputs, hidden=hidden)

    def _inputs_of_head(self, request: Request) -> _HeadInputs | None:
        """Return what a call is given, if that may be the hidden states of tokens alone; else None."""
        layer, inputs = self.layers[request.layer], LayerInputs.from_request(request)
        if len(inputs.tensors) != 1 or not layer.may_be_sliced(inputs.arguments):
            return None
        (hidden,) = inputs.tensors
        if not hidden.is_floating_point() or hidden.dim() < 2:
            return None
        return _HeadInputs(layer, request, inputs.arguments, hidden)

    def may_be_head(self, request: Request, leaves: Leaves) -> bool:
        """Return whether a call gives each token, by itself, more values than it has: if it is the last, it is a head."""
        inputs = self._inputs_of_head(request)
        if inputs is None or inputs.hidden.numel() == 0:
            return False
        rank, width = inputs.hidden.dim(), inputs.hidden.shape[-1]
        try:
            proof = inputs.prove(leaves)
        except TokensMixedError:
            return False
        output = proof.outputs[0]
        is_logits = output.place == TokenPlace(rank - 2) and len(output.shape) == rank and output.shape[-1] > width
        return is_logits and len(proof.outputs) == 1

    def _run_without_grad(self, request: Request, leaves: Leaves, rows: Rows) -> Any:
        """Run a call that no gradient goes through, in slices of its rows if `rows` says so; return its outputs."""
        if rows.cuts:
            inputs = LayerInputs.from_request(request)
            slicing = self._slicing(request.layer, inputs, rows)
            if slicing is not None:
                call = RecordedCall(request, 0, inputs.arguments, [None] * len(inputs.tensors), slicing)
                results = self._run_slices(call, slicing, inputs.tensors, leaves, RandomState)
                return inputs.deliver(results, results.leaves)
        return self.run_attached(request, leaves)

    def forward(
        self,
        request: Request,
        number: int,
        leaves: Leaves,
        inter_layer: InterLayerGraph,
        read_state: ReadState,
        rows: Rows = WHOLE_CALLS,
    ) -> tuple[Any, RecordedCall | None]:
        """Run call `number` of its micro-batch, and save its inputs: `backward` runs it again.

        `rows`: how calls are sliced. Returns the outputs, cut from the layer's graph, and the record for `backward`
        (None: no gradient goes through the call).
        """
        if not request.grad:
            return self._run_without_grad(request, leaves, rows), None
        layer = self.layers[request.layer]
        inputs, call = self._record(request, number, inter_layer)
        call.slicing = self._slicing(request.layer, inputs, rows)
        self._save_inputs(layer, call, inputs.tensors)
        detached = [tensor.detach() for tensor in inputs.tensors]
        try:
            if call.slicing is None:
                call.states.append(read_state())
                ends: Targets = [layer.reject_gradient if target else None for target in call.targets]
                if self.layer_tiles.size:
                    with self.layer_tiles.finding_unread(layer.module) as watch:
                        results = layer.run(call, detached, layer.guarded(leaves), ends)
                    call.unread = watch.unread(results.tensors)
                else:
                    results = layer.run(call, detached, layer.guarded(leaves), ends)
            else:
                results = self._run_slices(call, call.slicing, detached, leaves, read_state)
        except BaseException:
            self.discard(call)
            raise
        if self.checks_recomputation and call.slicing is None:
            call.norms = norms_of(results.tensors)
        outputs = self._cut_outputs(layer, call, inputs, results, leaves)
        self._check_seen(layer, call, results.wrote_inputs)
        return outputs, self._unless_without_gradient(call)

    def forward_with_graph(
        self, request: Request, number: int, leaves: Leaves, inter_layer: InterLayerGraph, read_state: ReadState
    ) -> tuple[Any, RecordedCall | None]:
        """Do what `forward` does, for `leaves` that stay until `backward`, and keep the layer's graph, if that stays valid.

        Such a call saves no inputs and is not run again.
        """
        layer = self.layers[request.layer]
        if not request.grad or not layer.may_keep_graphs:
            return self.forward(request, number, leaves, inter_layer, read_state)
        inputs, call = self._record(request, number, inter_layer)
        results = layer.run(call, [tensor.detach() for tensor in inputs.tensors], leaves, call.targets)
        call.states.append(read_state())  # after the call, as after a recomputation
        outputs = self._cut_outputs(layer, call, inputs, results, leaves)
        self._check_seen(layer, call, wrote_inputs=False)  # autograd itself checks inputs that a graph has saved
        call.keep_graph(results.tensors)
        return outputs, self._unless_without_gradient(call)

    def _record(self, request: Request, number: int, inter_layer: InterLayerGraph) -> tuple[LayerInputs, RecordedCall]:
        """Return the inputs of a call, on the current device, and a record without them that knows their targets."""
        inputs = LayerInputs.from_request(request)
        inputs.tensors = self._device_transfers.to_current(inputs.tensors)
        targets = [inter_layer.target(tensor) if tensor.requires_grad else None for tensor in inputs.tensors]
        request.args, request.kwargs = (), {}  # not kept
        return inputs, RecordedCall(request, number, inputs.arguments, targets)

    def _cut_outputs(
        self, layer: CalledLayer, call: RecordedCall, inputs: LayerInputs, results: CallOutputs, leaves: Leaves
    ) -> Any:
        """Return the outputs of a call for the model, cut from the layer's graph."""
        self._device_transfers.check_input_copies(layer.name)
        outputs = cut_outputs(call, results, inputs.tensors, layer.parameter_storages(leaves), layer.name)
        self._device_transfers.mark(outputs)  # including those in containers that the layer has written into
        return inputs.deliver(results, outputs)

    def _unless_without_gradient(self, call: RecordedCall) -> RecordedCall | None:
        """Return `call`; or, if none of its outputs requires a gradient, discard it and return None."""
        for target in call.output_gradients:
            if target is not None:
                return call
        self.discard(call)
        return None

    def _slicing(self, layer: int, inputs: LayerInputs, rows: Rows) -> Slicing | None:
        """Return how a call of `layer` is sliced; None: not at all."""
        called = self.layers[layer]
        if not (rows.cuts and called.may_be_sliced(inputs.arguments)):
            return None
        return slicing_of(rows, layer, inputs.arguments.kind, inputs.tensors, called.draws)

    def _save_inputs(self, layer: CalledLayer, call: RecordedCall, tensors: list[Tensor]) -> None:
        """Save the inputs of a call, and buffers that it depends on and changes, for its recomputation."""
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                raise UnsupportedError(
                    f"layer {layer.name} is given a tensor of layout {tensor.layout}, which the engine cannot keep for "
                    "backward. Give it a dense one, or indices and values of a sparse one, to be put together in the "
                    "layer's forward."
                )
        call.buffers = clone_buffers(layer.buffered) if layer.replayed else None
        saved = tensors
        if layer.writes_inputs or layer.inputs_written_later:
            saved = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        call.tensors = [self._stash.put(tensor, layer.name) for tensor in saved]

    def _check_seen(self, layer: CalledLayer, call: RecordedCall, wrote_inputs: bool) -> None:
        """Raise UnseenError if the call changed buffers or inputs, and the layer was not known to do so."""
        what = "a buffer" if layer.replayed and call.buffers is None else None
        if what is None and wrote_inputs and not layer.writes_inputs:
            layer.writes_inputs = True
            what = "its input in place"
        if what is not None:
            self._report_unseen(f"layer {layer.name} changes {what}, which was not seen when the model was measured.")

    def _report_unseen(self, what: str) -> None:
        if self._unseen is None:
            raise UnseenError(what)
        self._unseen.append(what)

    def backward(self, call: RecordedCall, leaves: Leaves, replay: SetState, gather: Callable[[], None]) -> None:
        """Recompute the call, unless its graph was kept, and propagate output gradients to its inputs and to `leaves`.

        Args:
            gather: called between the slices of a call: adds up the gradients that have reached `leaves`.
        """
        if self.layer_tiles.size:
            with self.layer_tiles.gathering(gather):
                self._propagate_through(call, leaves, replay, gather)
        else:
            self._propagate_through(call, leaves, replay, gather)
        self.discard(call)  # only now: no local variable holds the inputs any more

    def _propagate_through(
        self, call: RecordedCall, leaves: Leaves, replay: SetState, gather: Callable[[], None]
    ) -> None:
        gradients: list[Tensor | None] = []
        some_arrived = False
        for target in call.output_gradients:
            gradient = None if target is None else target.pop()
            some_arrived |= gradient is not None
            gradients.append(gradient)
        if not some_arrived:
            return
        layer = self.layers[call.request.layer]
        if isinstance(call, RecordedHead):
            self._propagate_through_head(call, gradients, leaves, gather)
        elif call.graph:
            replay(call.states[0])
            with in_force(call.request.lane_settings):
                _propagate(layer, call, leaves, gradients)
        else:
            with _isolated(layer, call):
                follow = partial(self._device_transfers.follow, targets=call.targets, gradients=gradients)
                pieces: Iterable[Piece]
                if call.slicing is None:
                    pieces = [follow(self._saved_inputs(layer, call))]
                else:
                    tensors, bring = self._inputs_to_cut(layer, call, call.slicing)
                    parts = self._slices_to_run(call.slicing, call.slicing.backward)
                    pieces = call.slicing.propagated(*follow(tensors), bring, parts)
                for number, (tensors, targets, arrived) in enumerate(pieces):
                    if number:
                        gather()
                    replay(call.states[min(number, len(call.states) - 1)])
                    if call.unread >= 0:
                        self._skip_unread(call)
                    _run_again(layer, call, tensors, leaves, targets)
                    _propagate(layer, call, leaves, arrived)

    def _skip_unread(self, call: RecordedCall) -> None:
        """Let the recomputation of `call` that follows leave out what nobody reads, unless its outputs are compared."""
        if not call.norms:
            self.layer_tiles.unread = call.unread

    def _propagate_through_head(
        self, call: RecordedHead, gradients: list[Tensor | None], leaves: Leaves, gather: Callable[[], None]
    ) -> None:
        assert call.work is not None
        saved = self._saved_inputs(self.layers[call.request.layer], call)
        (hidden,), (target,), gradients = self._device_transfers.follow(saved, call.targets, gradients)
        flat = hidden.detach().reshape(-1, hidden.shape[-1]).requires_grad_(target is not None)
        beside = {operand: operand.value for operand in call.beside}
        aligned = self._device_transfers.between_layers or nullcontext  # labels, a mask: they stay where they were
        with in_force(call.request.lane_settings), aligned(), call.work.head.using(leaves, gather):
            total, sums = call.work.propagate(flat, beside, gradients)
        if target is not None and total is not None:
            target.add(total.view(hidden.shape))
        known = [(get_gradient_edge(o.value), one) for o, one in zip(call.beside, sums, strict=True) if one is not None]
        if known:  # other heads, and the operations between layers, may lead to the same graph
            propagate([edge for edge, _ in known], [one for _, one in known], retain_graph=True)

    def recompute(
        self, call: RecordedCall, leaves: Leaves, replay: SetState, as_in_steps: bool = False
    ) -> list[Tensor]:
        """Recompute the whole call and keep its graph for `backward`; return its outputs, detached.

        Args:
            as_in_steps: outputs may lack values that no backward pass reads.
        """
        layer = self.layers[call.request.layer]
        with _isolated(layer, call):
            replay(call.states[0])
            if as_in_steps and call.unread >= 0:
                self._skip_unread(call)
            return [t.detach() for t in _run_again(layer, call, self._saved_inputs(layer, call), leaves, call.targets)]

    def _saved_inputs(self, layer: CalledLayer, call: RecordedCall) -> list[Tensor]:
        """Return the call's inputs, detached; raise ModelError if one was changed in place."""
        tensors = [self._stash.tensor(entry) for entry in call.tensors]
        return [t.clone() for t in tensors] if layer.writes_inputs else tensors

    def _inputs_to_cut(
        self, layer: CalledLayer, call: RecordedCall, slicing: Slicing
    ) -> tuple[list[Tensor], Callable[[list[Tensor]], list[Tensor]]]:
        """Return the call's inputs, detached, and what returns parts of them on the device."""
        if not self.slices_from_host:
            return self._saved_inputs(layer, call), lambda parts: parts
        stash, cut = self._stash, [dim is not None for dim in slicing.dims.inputs]
        tensors = [
            stash.tensor_to_cut(entry) if is_cut else stash.tensor(entry)
            for entry, is_cut in zip(call.tensors, cut, strict=True)
        ]

        def bring(parts: list[Tensor]) -> list[Tensor]:
            return [stash.copy_slice(entry, part) for entry, part in zip(call.tensors, parts, strict=True)]

        return tensors, bring

    def trial(self, request: Request, leaves: Leaves, slicing: Slicing | None) -> tuple[RecordedCall, list[Any]]:
        """Run a call with gradients, whole or sliced, to learn about its layer.

        Returns:
            Its record, and the leaves of its results, tensors detached.
        """
        layer = self.layers[request.layer]
        request = replace(request, context=request.context.copy())  # gets a collector of its own
        inputs = LayerInputs.from_request(request)
        targets: Targets = [GradientSum(t) if t.requires_grad else None for t in inputs.tensors]
        call = RecordedCall(request, 0, inputs.arguments, targets, slicing)
        detached = [t.detach() for t in inputs.tensors]
        if slicing is None:
            call.states.append(RandomState())
            ends: Targets = [layer.reject_gradient if target else None for target in targets]
            results = layer.run(call, detached, layer.guarded(leaves), ends)
        else:
            results = self._run_slices(call, slicing, detached, leaves, RandomState)
        call.output_gradients = [OutputGradient(0, t) if t.requires_grad else None for t in results.tensors]
        call.tensors = [StashEntry(t, layer.name) for t in inputs.tensors]
        return call, [one.detach() if isinstance(one, Tensor) else one for one in results.leaves]

    def propagate_trial(self, call: RecordedCall, leaves: Leaves) -> list[Tensor | None]:
        """Propagate gradients of the outputs of a trial to `leaves`, and to its inputs, whose gradients are returned."""
        self.backward(call, leaves, lambda state: None, lambda: None)
        return [None if target is None else target.pop() for target in call.targets]

    def _run_slices(
        self, call: RecordedCall, slicing: Slicing, tensors: list[Tensor], leaves: Leaves, read_state: ReadState
    ) -> CallOutputs:
        """Run the call's forward with detached `tensors`, slice by slice."""
        layer = self.layers[call.request.layer]
        ends: Targets = [layer.reject_gradient if target else None for target in call.targets]
        leaves = layer.guarded(leaves)
        call.states.append(read_state())
        whole = SliceAssembler(slicing, tensors)
        first: CallOutputs | None = None
        for part in self._slices_to_run(slicing, slicing.forward):
            if slicing.draws and not part.is_first:
                call.states.append(read_state())
            results = layer.run(call, slicing.inputs_of(part, tensors), leaves, ends)
            whole.add(part, results.inputs, results.leaves)
            first = first or CallOutputs(tensors, whole.leaves, results.shape, results.written, [])
            first.wrote_inputs |= results.wrote_inputs
            del results
        assert first is not None
        if not slicing.draws and states_differ(call.states[0], read_state()):
            layer.draws = True
            self._report_unseen(f"layer {layer.name} draws random numbers, which measuring had not seen.")
        return first

    def _slices_to_run(self, slicing: Slicing, size: int) -> Iterator[RowSlice]:
        """Yield the slices of `size` rows that the device has to run: all of them, where tensors have contents."""
        slices = [*slicing.slices(size)]
        for number in self._parts_to_run([part.end - part.begin for part in slices]):
            yield slices[number]

    def discard(self, call: RecordedCall) -> None:
        """Release what is kept of `call`, which is not propagated through any more."""
        for entry in call.entries:
            self._stash.release(entry)
        call.tensors = []
        call.graph = []


def _nothing() -> None:
    """Gather no gradients: there are none without records."""


def _output_of(head: HeadCall, request: Request) -> TokenTensor | None:
    with torch.set_grad_enabled(request.grad):
        output = TokenTensor.of_head(head)
    if output is not None:
        request.args, request.kwargs = (), {}  # not kept
    return output


@dataclass(frozen=True, slots=True)
class _HeadInputs:
    """The inputs of a call that may be a head's: the hidden states of tokens, and no other tensor."""

    layer: CalledLayer
    request: Request
    arguments: Arguments
    hidden: Tensor

    @property
    def tokens(self) -> int:
        return self.hidden.shape[:-1].numel()

    def run(self, hidden: Tensor, leaves: Leaves) -> Any:
        """Run the layer's forward on other hidden states, and on `leaves` of its parameters."""
        other = self.arguments.request_with(self.request, [hidden])
        return self.layer.call_forward(self.request, other.args, other.kwargs, leaves)

    def prove(self, leaves: Leaves) -> TokenProof:
        """Prove that the layer's forward treats each token of a row by itself; they lie in the last dimension but one.

        Raises:
            TokensMixedError: that cannot be shown.
        """
        whole, part = _TOKENS_OF_A_PROOF
        rows = [1] * (self.hidden.dim() - 2)
        return self._prove((*rows, whole, self.hidden.shape[-1]), len(rows), [part], leaves)

    def may_run_in_tiles(self, tile: int, leaves: Leaves) -> bool:
        """Return whether the layer computes the same for tiles of `tile` tokens as for all tokens at once.

        Tiles are cut from the tokens of all rows, laid out one row after the other. For torch's own linear layer the answer
        is known. For any other it is proved in two steps, with the numbers of rows and tokens that run, since `forward` may
        compute with these numbers: first for fewer tokens of all rows, then, with so many tokens, for single rows.
        """
        own_forward = getattr(self.request.forward, "__func__", None)
        if type(self.layer.module) is nn.Linear and own_forward is nn.Linear.forward:
            return True
        *rows, _, width = self.hidden.shape
        tiles = [tile, self.tokens % tile] if self.tokens % tile else [tile]
        try:
            self._prove(tuple(self.hidden.shape), len(rows), tiles, leaves)
            for dim, count in enumerate(rows):
                if count > 1:
                    for tokens in tiles:
                        self._prove((*rows, tokens, width), dim, [1], leaves)
        except TokensMixedError:
            return False
        return True

    def _prove(self, shape: tuple[int, ...], dim: int, tiles: list[int], leaves: Leaves) -> TokenProof:
        with FakeTensorMode():  # of any number of tokens, without memory
            hidden = torch.empty(shape, dtype=self.hidden.dtype, device=self.hidden.device, requires_grad=True)
        with self.layer.parameters.installed(leaves), self.request.callers_modes():
            return prove(self.call_with(hidden), dim, tiles)

    def call_with(self, hidden: Tensor) -> ModuleCall:
        """Return the call with other hidden states."""
        other = self.arguments.request_with(self.request, [hidden])
        return ModuleCall.taken_apart(self.layer.module, self.request.forward, other.args, other.kwargs)


def _isolated(layer: CalledLayer, call: RecordedCall) -> AbstractContextManager[None]:
    """Return a context in which a layer runs again: with the settings of its caller, and with copies of its buffers.

    Statistics must not be updated twice.
    """
    buffers = call.buffers
    if buffers is None and layer.changes_buffers:
        buffers = clone_buffers(layer.buffered)
    if not buffers:
        return in_force(call.request.lane_settings)
    if call.request.lane_settings is None:
        return substituted_buffers(buffers)
    return _with_settings(call.request.lane_settings, buffers)


@contextmanager
def _with_settings(own: LaneSettings, buffers: Buffers) -> Iterator[None]:
    """Set a caller's own settings, and put `buffers` in the place of the layer's, while open."""
    with own.in_force(), substituted_buffers(buffers):
        yield


def _run_again(
    layer: CalledLayer, call: RecordedCall, tensors: list[Tensor], leaves: Leaves, targets: Targets
) -> list[Tensor]:
    """Run the call (or a slice of it) again, keep its graph, and return the outputs."""
    outputs = layer.run(call, tensors, leaves, targets).tensors
    call.check(outputs, layer.name)
    call.keep_graph(outputs)
    return outputs


def _propagate(layer: CalledLayer, call: RecordedCall, leaves: Leaves, gradients: Sequence[Tensor | None]) -> None:
    """Propagate the `gradients` of the outputs of a call, as far as there are any, through its graph."""
    edges: list[GradientEdge] = []
    arrived: list[Tensor | None] = []
    for edge, gradient in zip(call.graph, gradients, strict=True):
        if edge is not None and gradient is not None:
            edges.append(edge)
            arrived.append(gradient)
    if layer.parameters.has_packed:  # HQQ's backward pass dequantizes weights of its module again
        with layer.parameters.installed(leaves):
            propagate(edges, arrived)
    else:
        propagate(edges, arrived)
