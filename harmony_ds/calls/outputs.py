"""What a model gets of a layer call: tensors that are cut from its graph."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from harmony_ds.calls.arguments import CallOutputs
from harmony_ds.calls.boundary import cut
from harmony_ds.calls.recorded_call import RecordedCall, SharedOutput
from harmony_ds.calls.storages import copy_strided, storage_of, storages_of
from harmony_ds.calls.targets import OutputGradient


def cut_outputs(
    call: RecordedCall, outcome: CallOutputs, sources: list[Tensor], own: set[int], layer: str
) -> list[Any]:
    """Output leaves for the model: inputs that came back are the model's own, the rest is cut, each tensor once.

    `call` gets to know their gradients, and which of them share their memory with others.

    Args:
        own: memory of the parameters, which will be evicted: outputs that lie in it are copied.
    """
    leaves = list(outcome.leaves)
    returned = dict(zip(map(id, outcome.inputs), sources, strict=True))
    places: list[int] = []  # of what is cut
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
        call.views = [
            SharedOutput(layer, leaves[p]) for p, lies_in in zip(places, memories, strict=True) if lies_in in shared
        ]
    return leaves


def _shared(memories: list[int | None], outcome: CallOutputs) -> set[int | None]:
    """Those that several outputs lie in, or inputs, other than such that the layer has changed: where one is written to in
    place, the graph of the others does not know of it.
    """
    of_inputs = storages_of([tensor for place, tensor in enumerate(outcome.inputs) if place not in outcome.altered])
    if len(set(memories)) == len(memories) and of_inputs.isdisjoint(memories):  # as most are
        return set()
    return {own for own in memories if own is not None and (own in of_inputs or memories.count(own) > 1)}
