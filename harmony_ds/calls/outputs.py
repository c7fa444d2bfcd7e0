"""Outputs of layer calls, cut from the layer's graph before the model gets them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from harmony_ds.calls.arguments import CallOutputs
from harmony_ds.calls.boundary import cut
from harmony_ds.calls.recorded_call import RecordedCall, SharedOutput
from harmony_ds.calls.targets import OutputGradient


def cut_outputs(call: RecordedCall, outcome: CallOutputs, inputs: list[Tensor], own: set[int], name: str) -> list[Any]:
    """Return the output leaves for the model: inputs that were returned are its own tensors, others are cut once.

    Sets the output gradients and views of `call`. Outputs in storages `own`, which will be evicted, are copied.
    """
    leaves = list(outcome.leaves)
    returned = dict(zip(map(id, outcome.inputs), inputs, strict=True))
    places: list[int] = []  # of leaves that are cut
    memories: list[int | None] = []
    gradients: list[OutputGradient] = []
    first_of: dict[int, int] = {}
    for place, leaf in enumerate(outcome.leaves):
        if not isinstance(leaf, Tensor):
            continue
        gradient = None
        if id(leaf) in returned:
            leaves[place] = returned[id(leaf)]
        elif first_of.setdefault(id(leaf), place) == place:
            lies_in = storage_of(leaf)
            leaves[place] = leaf.detach() if lies_in not in own else copy_strided(leaf.detach())
            if leaf.requires_grad:
                gradient = OutputGradient(call.number, leaf)
                gradients.append(gradient)
                places.append(place)
                memories.append(lies_in if lies_in not in own else None)
        call.output_gradients.append(gradient)
    for place, tensor in zip(places, cut([leaves[p] for p in places], gradients), strict=True):
        leaves[place] = tensor
    for place, leaf in enumerate(outcome.leaves):
        if (first := first_of.get(id(leaf), place)) != place:
            leaves[place] = leaves[first]
    if memories:
        shared = _shared(memories, outcome)
        call.views = [SharedOutput(name, leaves[p]) for p, one in zip(places, memories, strict=True) if one in shared]
    return leaves


def _shared(memories: list[int | None], outcome: CallOutputs) -> set[int | None]:
    """Return the storages of several outputs, or of outputs and unchanged inputs.

    When such a tensor is written to in place, the graphs of the others do not know of it.
    """
    of_inputs = storages_of([tensor for place, tensor in enumerate(outcome.inputs) if place not in outcome.altered])
    if len(set(memories)) == len(memories) and of_inputs.isdisjoint(memories):  # the common case
        return set()
    return {own for own in memories if own is not None and (own in of_inputs or memories.count(own) > 1)}


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return copy_strided(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def copy_with_gradient(tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` with the same strides, and a graph that leads to `tensor`."""
    copy: Tensor = _Copy.apply(tensor)  # type: ignore[no-untyped-call]
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
