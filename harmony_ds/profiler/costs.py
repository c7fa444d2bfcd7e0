"""What the profiler hands on: bytes and times per layer call, for one micro-batch. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, fields

from harmony_ds.decomposer.graph import merge_calls, positions_of


@dataclass(frozen=True, slots=True)
class CallCost:
    """Device bytes and times of one layer call with one micro-batch; weights, which the plan counts itself, are not in it.

    Attributes:
        alive_bytes: what a micro-batch holds while it waits before this call: this call's inputs, and whatever the
            code between the layers keeps (masks, position ids). The stash of earlier calls is not in it.
        stash_bytes: inputs of this call that an earlier layer produced, and that no earlier call took.
        shared_bytes: gradients of outputs of earlier calls that this or a later call takes.
        forward_bytes: the most that running it forward adds, its outputs included.
        graph_bytes: what its autograd graph and its outputs hold after it ran.
        backward_bytes: the most that recomputing it and propagating backward adds, beyond the sums of its parameters'
            gradients.
        needs_backward: whether a gradient flows through this call at all.
        forward_ms: running it forward, and the code between it and the next call.
        backward_ms: recomputing it and propagating backward.
        fused_ms: running it forward and propagating backward at once, as in the fused pack.
    """

    alive_bytes: int = 0
    stash_bytes: int = 0
    shared_bytes: int = 0
    forward_bytes: int = 0
    graph_bytes: int = 0
    backward_bytes: int = 0
    needs_backward: bool = False
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    fused_ms: float = 0.0

    def worst(self, other: CallCost) -> CallCost:
        return CallCost(*(max(getattr(self, f.name), getattr(other, f.name)) for f in fields(CallCost)))


@dataclass(frozen=True, slots=True)
class CostTable:
    """One `CallCost` per position of the call order, and what comes after the last call.

    Attributes:
        calls: the layer called at each position.
        costs: one per position.
        tail_bytes: the most that the code after the last layer (the loss) adds, forward and backward.
        held_bytes: what a micro-batch keeps from the end of its forward pass to the end of its backward pass, beside
            the stash: arguments that layers share, and the graph of the code between them.
        head_ms: the code before the first layer.
        tail_ms: the code after the last layer (the loss), forward and backward.
    """

    calls: tuple[int, ...]
    costs: tuple[CallCost, ...]
    tail_bytes: int
    held_bytes: int = 0
    head_ms: float = 0.0
    tail_ms: float = 0.0

    def worst(self, other: CostTable) -> CostTable:
        """A table that covers what both saw: every call of either, at the larger of both costs."""
        order = merge_calls(self.calls, other.calls)
        costs = [CallCost()] * len(order)
        for table in (self, other):
            for position, cost in zip(positions_of(table.calls, order), table.costs, strict=True):
                costs[position] = costs[position].worst(cost)
        return CostTable(
            order,
            tuple(costs),
            max(self.tail_bytes, other.tail_bytes),
            max(self.held_bytes, other.held_bytes),
            max(self.head_ms, other.head_ms),
            max(self.tail_ms, other.tail_ms),
        )
