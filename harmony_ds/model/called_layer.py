"""One layer, run on device copies of its parameters: what calls change is found out, and outputs are cut from its graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.decomposer.find import Layer
from harmony_ds.model.arguments import Arguments, CallOutputs, collect, contents, has_changed
from harmony_ds.model.buffers import reads_statistics, updates_statistics, versions
from harmony_ds.model.caches import restore_caches, snapshot_caches
from harmony_ds.model.graph_cut import cut, targets_of
from harmony_ds.model.installed import LayerParameters
from harmony_ds.model.intercept import ContextFactory, Request
from harmony_ds.model.layer_tiles import LayerRun, LayerTiles
from harmony_ds.model.own_settings import in_force
from harmony_ds.model.patching import patched
from harmony_ds.model.recorded_call import AliasedOutput, RecordedCall
from harmony_ds.model.targets import OutputGradient, RejectGradient, Targets
from harmony_ds.model.trees import flatten_all
from harmony_ds.offload.device_copies import Leaves, leaf_over


class CalledLayer:
    """Runs one layer, and records what its calls change.

    Attributes:
        writes_inputs, changes_buffers: a call was seen to do so.
        inputs_written_later: code between layers was seen to write into an input after the call, so that copies are saved.
        draws: a call was seen to draw random numbers that measuring had not found.
        replayed: it depends on buffers that it changes, so that a recomputation starts from their former values.
        alignment: makes a context that moves operands to one device, where layers run on several; None: not needed.
    """

    def __init__(self, layer: Layer, parameters: LayerParameters, tiles: LayerTiles) -> None:
        self.name = layer.name
        self.module = layer.module
        self._tiles = tiles
        self.parameters = parameters
        self.reject_gradient = RejectGradient(layer.name)
        self.find_buffers()
        self.writes_inputs = False
        self.inputs_written_later = False
        self.changes_buffers = False
        self.replayed = False
        self.draws = False
        self.alignment: ContextFactory | None = None
        self._gathering: set[nn.Module] = set()  # normalization modules seen to update running statistics
        self._reading: set[nn.Module] = set()  # and those seen to read them
        self.names = layer.parameters

    def find_buffers(self) -> None:
        """Note the modules that have buffers now."""
        self.buffered = [module for module in self.module.modules() if module._buffers]

    @property
    def may_keep_graphs(self) -> bool:
        """Whether graphs stay valid while other micro-batches pass: buffers that calls read, and inputs, stay."""
        return not (self.replayed or self.inputs_written_later)

    def replay_buffers(self) -> bool:
        """Let recomputations start from its former buffers from now on; return False if they do already."""
        new, self.replayed, self.changes_buffers = not self.replayed, True, True
        return new

    def may_be_sliced(self, arguments: Arguments) -> bool:
        """Return whether a call with `arguments` can be run in slices of its rows."""
        return self.treats_rows_alike and arguments.may_be_sliced

    @property
    def treats_rows_alike(self) -> bool:
        """Whether it was not seen to change inputs or buffers, which belong to all rows at once."""
        return not (self.writes_inputs or self.changes_buffers)

    def parameter_storages(self, leaves: Leaves) -> set[int]:
        """Return the storages of the layer's parameters among `leaves`."""
        found: set[int] | None = leaves.cache.get(self)
        if found is None:
            found = leaves.cache[self] = storages_of(leaves[name] for name in self.names if name in leaves)
        return found

    def guarded(self, leaves: Leaves) -> Leaves:
        """Return aliases of the layer's `leaves` (a pack may hold more) that refuse gradients, for discarded graphs."""
        found: Leaves | None = leaves.cache.get(self.reject_gradient)
        if found is None:
            found = leaves.cache[self.reject_gradient] = Leaves({}, leaves.attributes, leaves.buffers)
            for name in self.names:
                if name in leaves:
                    one = leaves[name]
                    # What is frozen gets no gradient, and a packed tensor is more than its memory.
                    found[name] = leaf_over(one.detach(), one) if type(one) is nn.Parameter else one
            for alias in found.values():
                if alias.requires_grad:
                    alias.register_hook(self.reject_gradient.add)
        return found

    def run(self, call: RecordedCall, tensors: list[Tensor], leaves: Leaves, targets: Targets) -> CallOutputs:
        """Run the call with `tensors`, whose gradients go to `targets`."""
        request, arguments = call.request, call.arguments
        inputs = list(tensors)
        ends = [place for place, target in enumerate(targets) if target is not None]
        cut_inputs = cut([tensors[place] for place in ends], [target for target in targets if target is not None])
        for place, tensor in zip(ends, cut_inputs, strict=True):
            inputs[place] = tensor
        values = arguments.rebuild(inputs)
        held = [contents(values[place]) for place in arguments.containers] if arguments.containers else []
        collected = collect(request, arguments.collected) if arguments.collected else {}
        caches = snapshot_caches(arguments.caches.values()) if arguments.caches else []
        before = versions(self.buffered) if self.buffered else []
        tracked = inputs if request.grad else []  # tensors of inference mode have no versions
        written_to = [tensor._version for tensor in tracked]
        kwargs = dict(zip(arguments.keywords, values[arguments.positional :], strict=True))
        result = self.call_forward(request, values[: arguments.positional], kwargs, leaves)
        for key in collected:
            del collected[key][: arguments.collected[key]]
        if caches:
            restore_caches(caches)
        if self.buffered:
            self._look_at_buffers(before)
        altered, written = [], []
        wrote_inputs = written_to != [tensor._version for tensor in tracked]
        if wrote_inputs:
            altered = [place for place, tensor in enumerate(inputs) if _leads_into_layer(tensor)]
        if held:
            written = [p for p, one in zip(arguments.containers, held, strict=True) if has_changed(values[p], one)]
        if altered or written or (collected and any(collected.values())):
            # Views, since the tensors themselves may be among the results.
            views = [inputs[place].view_as(inputs[place]) for place in altered]
            result_leaves, shape = flatten_all((result, collected, [values[place] for place in written], views))
            for collection in collected.values():
                collection.clear()  # the call's context is kept
        else:  # the common case
            result_leaves, shape = flatten_all((result,))
        return CallOutputs(inputs, result_leaves, shape, written, altered, wrote_inputs)

    def call_forward(self, request: Request, args: Sequence[Any], kwargs: Mapping[str, Any], leaves: Leaves) -> Any:
        """Call the layer's own forward: with these arguments, on `leaves`, in the modes and context of the caller.

        What it raises is noted in `request.raised`.
        """
        installed, forward = self.parameters.installed(leaves), request.forward
        # Compiled code is one whole: what stands for a module's forward would break it up.
        if self._tiles.size and not hasattr(forward, "_torchdynamo_orig_callable"):
            run = LayerRun(partial(self._restored, request, leaves), self.parameters.are_hooked)
            installed = patched([*installed.items, *self._tiles.items(self.module, run)])
            forward = self._tiles.wrapped(self.module, forward, run)
        with installed:
            try:
                if request.finds_its_modes and self.alignment is None:
                    return request.context.run(forward, *args, **kwargs)
                with request.callers_modes(), nullcontext() if self.alignment is None else self.alignment():
                    return request.context.run(forward, *args, **kwargs)
            except BaseException as error:
                request.raised.append(id(error))
                raise

    @contextmanager
    def _restored(self, request: Request, leaves: Leaves) -> Iterator[None]:
        """Set all that a part of the layer, run again in the backward pass, finds in the layer's call."""
        alignment = nullcontext() if self.alignment is None else self.alignment()
        with self.parameters.installed(leaves), in_force(request.lane_settings), request.callers_modes(), alignment:
            yield

    def _look_at_buffers(self, before: list[tuple[Tensor, int]]) -> None:
        """Note whether a call has changed buffers; `before`: their versions before it."""
        if self.changes_buffers and self.replayed:
            return
        self._gathering.update(filter(updates_statistics, self.buffered))
        self._reading.update(filter(reads_statistics, self.buffered))
        after = versions(self.buffered)
        pairs = zip(after, before, strict=False)
        seen = len(after) != len(before) or any(a is not b or v != w for (a, v), (b, w) in pairs)
        self.replayed |= seen or not self._gathering.isdisjoint(self._reading)
        self.changes_buffers |= seen or bool(self._gathering)


def _leads_into_layer(tensor: Tensor) -> bool:
    """Return whether an input, where the layer's graph began, now has a graph of the layer's own operations."""
    return tensor.grad_fn is not None and targets_of(tensor.grad_fn) is None


def cut_outputs(call: RecordedCall, results: CallOutputs, inputs: list[Tensor], own: set[int], name: str) -> list[Any]:
    """Return the output leaves for the model: inputs that were returned are its own tensors, others are cut once.

    Sets the output gradients and views of `call`. Outputs in storages `own`, which will be evicted, are copied.
    """
    # What the model gets, by the id of what the layer has returned.
    made = dict(zip(map(id, results.inputs), inputs, strict=True))
    tensors = results.tensors
    gradients: dict[int, OutputGradient] = {}
    memories: dict[int, int | None] = {}
    for leaf in tensors:
        key = id(leaf)
        if key in made:
            continue
        memory = storage_of(leaf)
        made[key] = copy_strided(leaf.detach()) if memory in own else leaf.detach()
        if leaf.requires_grad:
            gradients[key] = OutputGradient(call.number, leaf)
            memories[key] = None if memory in own else memory
    made |= zip(gradients, cut([made[key] for key in gradients], [*gradients.values()]), strict=True)
    call.output_gradients = [gradients.get(id(leaf)) for leaf in tensors]
    if memories:
        aliased = _aliased([*memories.values()], results)
        if aliased:
            call.views = [AliasedOutput(name, made[key]) for key, memory in memories.items() if memory in aliased]
    return [made[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in results.leaves]


def _aliased(memories: list[int | None], results: CallOutputs) -> set[int | None]:
    """Return the storages of several outputs, or of outputs and unchanged inputs.

    When such a tensor is written to in place, the graphs of the others do not know of it.
    """
    of_inputs = storages_of([tensor for place, tensor in enumerate(results.inputs) if place not in results.altered])
    if len(set(memories)) == len(memories) and of_inputs.isdisjoint(memories):  # the common case
        return set()
    return {own for own in memories if own is not None and (own in of_inputs or memories.count(own) > 1)}


class _CopyStrided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return copy_strided(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def copy_with_gradient(tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` with the same strides, and a graph that leads to `tensor`."""
    copy: Tensor = _CopyStrided.apply(tensor)  # type: ignore[no-untyped-call]
    return copy


def copy_strided(tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` with the same strides, by which kernels that read it are chosen."""
    places = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((n - 1) * stride for n, stride in places) if tensor.numel() else 0
    flat = tensor.as_strided((extent,), (1,)).clone()
    return torch.empty_like(flat).set_(flat.untyped_storage(), 0, tensor.shape, tensor.stride())


def storage_of(tensor: Tensor) -> int | None:
    """Return the id of a tensor's storage; None: it has none (a phantom, a sparse tensor)."""
    has_any = tensor.layout is torch.strided and torch._C._has_storage(tensor)
    own: int | None = tensor.untyped_storage()._cdata if has_any else None
    return own


def storages_of(tensors: Iterable[Tensor]) -> set[int]:
    """Return the ids of the storages of `tensors`, of those that have any."""
    return {t.untyped_storage()._cdata for t in tensors if t.layout is torch.strided and torch._C._has_storage(t)}
