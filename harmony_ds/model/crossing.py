"""Tensors that a micro-batch holds while it waits between two packs, and that may leave the device meanwhile.

They are outputs of layer calls, or computed from such between layers, which require a gradient: no other micro-batch uses
them. Their memory must be theirs alone: not that of another tensor (a detached one, a saved result of an operation), which
would stay on the device and would not follow writes. Such memory is found by the number of its references.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from weakref import ref

import torch
from torch import Tensor

from harmony_ds.model.graph_cut import targets_of
from harmony_ds.model.inter_layer import InterLayerGraph
from harmony_ds.model.slices import parts_over, whole_over
from harmony_ds.offload.crossing_tensors import CrossingMemory, is_dense
from harmony_ds.offload.stash import Stash


class WaitingValues:
    """The outputs of one micro-batch's layer calls, of which those that are alive when it is suspended wait with it."""

    def __init__(self) -> None:
        self._outputs: list[ref[Tensor]] = []

    def note(self, outputs: Iterable[Tensor]) -> None:
        """Note the outputs of a layer call that ran with gradients."""
        self._outputs += [ref(output) for output in outputs if output.requires_grad]

    def crossing(
        self, arguments: Sequence[Tensor], inter_layer: InterLayerGraph, stash: Stash
    ) -> Iterator[CrossingMemory]:
        """Yield what may leave the device while the micro-batch waits at a layer call.

        Args:
            arguments: the tensors that the call is given.
            inter_layer: the code between layers of this micro-batch.
            stash: may hold the same memory on the device.
        """
        self._outputs = [output for output in self._outputs if output() is not None]
        own = [tensor for output in self._outputs if (tensor := output()) is not None]
        own += [tensor for tensor in arguments if tensor.requires_grad and _is_own(tensor, inter_layer)]
        by_memory: dict[int, dict[int, Tensor]] = {}
        for tensor in own:
            if tensor.layout is torch.strided and type(tensor) is Tensor:
                several = by_memory.setdefault(tensor.untyped_storage()._cdata, {})
                for one in (tensor, *whole_over(tensor)):
                    several[id(one)] = one
                    several |= {id(part): part for part in parts_over(one)}
        for several in by_memory.values():
            value = _value_of([*several.values()], stash)
            if value is not None:
                yield value


def _is_own(tensor: Tensor, inter_layer: InterLayerGraph) -> bool:
    """Return whether an argument comes from a layer call of the micro-batch."""
    node = tensor.grad_fn
    return node is not None and (targets_of(node) is not None or inter_layer.newest_call_before(node) >= 0)


def _value_of(tensors: list[Tensor], stash: Stash) -> CrossingMemory | None:
    """Return the value of which `tensors` are all that there is; None: there is more, or the stash needs its memory."""
    storage = tensors[0].untyped_storage()
    whole = next((one for one in tensors if one.nbytes == storage.nbytes() and is_dense(one)), None)
    if whole is None or not storage.nbytes() or stash.holds_on_device(whole):
        return None
    references: int = torch._C._storage_Use_Count(storage._cdata)
    known = len(tensors) + stash.copies_leaving(storage) + 1  # and `storage`
    return CrossingMemory(whole, [one for one in tensors if one is not whole]) if references == known else None
