"""The result of measuring: bytes and times per layer call, for one micro-batch. Pure data.

A micro-batch's bytes in the three ways a call is run, `p` being its position:

    forward    alive[p] + forward[p], and the stash of the calls before it
    fused      alive[first] + graph[first] + ... + graph[p-1] + forward[p] on the way there, + backward[p] on the way back
    backward   what it holds between its passes + the stash up to p + backward[p]
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from harmony_ds.decomposer.graph import merge_calls, positions_of
from harmony_ds.scheduler.flow import Flow


@dataclass(frozen=True, slots=True)
class CallCost:
    """Device bytes and times of one layer call with one micro-batch; weights, which the plan counts itself, are not in
    it, nor are the sums of their gradients.

    Attributes:
        alive_bytes: what a micro-batch holds while it waits before this call: this call's inputs, and whatever the
            code between the layers keeps (masks, position ids). The stash of earlier calls is not in it.
        alive_and_stashed_bytes: what it holds beside that and an earlier call has stashed as well: it stays on the device
            when the stash goes to the host.
        alive_after_forward_bytes: what of alive_bytes may still be there when the forward pass is over.
        stash_bytes: inputs of this call that an earlier layer produced and no earlier call took.
        stash_again_bytes: those that an earlier call took too: they go to the host and back with this pack once more.
        stash_again_at_cut_bytes: those that the call before it took too, which do so only where a pack begins here.
        stash_base_bytes: memory that stashed inputs keep beside their own, being views of it, until they have been moved.
        shared_bytes: gradients that wait for earlier calls once this one and all after it have been propagated.
        forward_bytes: the most that running it, and the code up to the next call, adds to what was alive.
        graph_bytes: what its autograd graph, its outputs and that of the code up to the next call hold.
        kept_bytes: what its autograd graph alone holds, where it is kept from forward to backward; its inputs are counted
            as stashed, its outputs by who takes them.
        settle_bytes: the most that propagating through the code after it takes, gradients of later calls included.
        backward_bytes: the most that recomputing it and propagating back takes, its graph and the gradients of later
            calls included.
        leaf_bytes: gradients of its parameters that wait to be added to sums of another dtype.
        gradient_bytes: sums of its parameters' gradients, where they are of the parameters' dtype.
        needs_backward: whether a gradient flows through this call at all.
        keeps_graph: whether a fused pack that begins here keeps all its graphs until its backward is done, because
            the code before it and the code in it share theirs.
        forward_ms: running it forward, and the code between it and the next call.
        backward_ms: recomputing it and propagating backward.
        fused_ms: running it forward and propagating backward at once, as in the fused pack.
        propagate_ms: propagating backward through a graph that was kept.
    """

    alive_bytes: int = 0
    alive_and_stashed_bytes: int = 0
    alive_after_forward_bytes: int = 0
    stash_bytes: int = 0
    stash_again_bytes: int = 0
    stash_again_at_cut_bytes: int = 0
    stash_base_bytes: int = 0
    shared_bytes: int = 0
    forward_bytes: int = 0
    graph_bytes: int = 0
    kept_bytes: int = 0
    settle_bytes: int = 0
    backward_bytes: int = 0
    leaf_bytes: int = 0
    gradient_bytes: int = 0
    needs_backward: bool = False
    keeps_graph: bool = False
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    fused_ms: float = 0.0
    propagate_ms: float = 0.0

    @property
    def saved_ms(self) -> float:
        """The time that a kept graph saves: recomputing it."""
        return self.backward_ms - self.propagate_ms

    @property
    def stashed_bytes(self) -> int:
        """The bytes that stashing its inputs keeps on the device."""
        return self.stash_bytes + self.stash_base_bytes

    def worst(self, other: CallCost) -> CallCost:
        """At least as much of everything as either."""
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
        held_and_stashed_bytes: what it keeps beside that and has stashed as well, no longer than it stays stashed.
        issue_share: of all times, what the host takes to issue them, where a device computes beside it.
        in_slices: whether layer calls are cut into slices of a micro-batch's rows. The fused pack then keeps no graph:
            it runs forward and backward as any other does.
        scalar_bytes: what a tensor of one number takes: a loss, and the grain of the device's allocator.
        flow: what is handed from layer to layer, where several devices are to run them.
        margin_bytes: the most that a step has taken beyond its plan.
        output_bytes: what the model's outputs and the graph of the code after the last call hold until the loss is made.
    """

    calls: tuple[int, ...]
    costs: tuple[CallCost, ...]
    tail_bytes: int
    held_bytes: int = 0
    scalar_bytes: int = 0
    margin_bytes: int = 0
    held_and_stashed_bytes: int = 0
    head_ms: float = 0.0
    tail_ms: float = 0.0
    issue_share: float = 0.0
    in_slices: bool = False
    flow: Flow = field(default_factory=Flow)
    output_bytes: int = 0

    def worst(self, other: CostTable) -> CostTable:
        """Return a table that covers what both saw: every call of either, at the larger of both costs."""
        order = merge_calls(self.calls, other.calls)
        costs = [CallCost()] * len(order)
        for table in (self, other):
            for position, cost in zip(positions_of(table.calls, order), table.costs, strict=True):
                costs[position] = costs[position].worst(cost)
        rest = [f.name for f in fields(CostTable) if f.name not in ("calls", "costs", "flow")]
        most = {name: max(getattr(self, name), getattr(other, name)) for name in rest}
        larger = max(self, other, key=lambda table: sum(table.flow.nbytes))
        flow = larger.flow.at(positions_of(larger.calls, order))
        return CostTable(order, tuple(costs), flow=flow, **most)

    def including(self, other: CostTable) -> CostTable:
        """Return this table and, at the costs of `other`, the calls that only `other` has."""
        order = merge_calls(self.calls, other.calls)
        theirs, own = positions_of(other.calls, order), positions_of(self.calls, order)
        known = dict(zip((*theirs, *own), (*other.costs, *self.costs), strict=True))
        costs = tuple(known.get(position, CallCost()) for position in range(len(order)))
        return replace(self, calls=order, costs=costs, flow=self.flow.at(own))
