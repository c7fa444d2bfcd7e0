"""What a model gets of a layer call: tensors that are cut from its graph, and where those lie."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from harmony_ds.calls.boundary import cut
from harmony_ds.calls.own_memory import apart, may_overlap, memory, memory_of
from harmony_ds.calls.recorded_call import Outcome, RecordedCall
from harmony_ds.calls.targets import OutputGradient


def cut_outputs(
    call: RecordedCall, outcome: Outcome, sources: list[Tensor], own: set[int]
) -> tuple[list[Any], dict[int, int | None]]:
    """Output leaves for the model: inputs that came back are the model's own, the rest is cut, each tensor once.

    Args:
        own: memory of the parameters, which will be evicted: outputs that lie in it are copied.

    Returns:
        The leaves, and the memory that each of those lies in that was cut, by place.
    """
    leaves = list(outcome.leaves)
    lie_in: dict[int, int | None] = {}
    output_gradients: list[OutputGradient] = []
    first_of: dict[int, int] = {}
    again: list[tuple[int, int]] = []
    for place, leaf in enumerate(outcome.leaves):
        if not isinstance(leaf, Tensor):
            continue
        output_gradient = None
        source = _source_of(leaf, outcome.inputs, sources)
        if source is not None:
            leaves[place] = source
        elif first_of.setdefault(id(leaf), place) != place:
            again.append((place, first_of[id(leaf)]))
        else:
            lies_in = memory(leaf)
            leaves[place] = leaf.detach() if lies_in not in own else apart(leaf.detach())
            if leaf.requires_grad:
                output_gradient = OutputGradient(call.number, leaf)
                output_gradients.append(output_gradient)
                lie_in[place] = lies_in if lies_in not in own else None
        call.output_gradients.append(output_gradient)
    for place, tensor in zip(lie_in, cut([leaves[p] for p in lie_in], output_gradients), strict=True):
        leaves[place] = tensor
    for place, first in again:
        leaves[place] = leaves[first]
    return leaves, lie_in


def lie_elsewhere_too(outcome: Outcome, leaves: list[Any], lie_in: dict[int, int | None]) -> list[Tensor]:
    """Those of the outputs `leaves`, which lie in memory of their own unless `lie_in` says where, that share elements with
    another, or memory with an input: the graph is cut behind each, and where one is written to in place the other's
    gradient does not know of it. Inputs that the layer has written to are no longer what they were.
    """
    memories = list(lie_in.values())
    if not memories:
        return []
    of_inputs = memory_of([tensor for place, tensor in enumerate(outcome.inputs) if place not in outcome.altered])
    if len(set(memories)) == len(memories) and of_inputs.isdisjoint(memories):  # as most are
        return []
    return [
        leaves[place]
        for place, own in lie_in.items()
        if own in of_inputs
        or any(
            own is not None and other == own and o != place and may_overlap(leaves[o], leaves[place])
            for o, other in lie_in.items()
        )
    ]


def _source_of(leaf: Tensor, inputs: list[Tensor], sources: list[Tensor]) -> Tensor | None:
    """What the model gave for `leaf`, if that is an input."""
    for place, tensor in enumerate(inputs):
        if tensor is leaf:
            return sources[place]
    return None
