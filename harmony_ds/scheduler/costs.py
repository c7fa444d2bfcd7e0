"""The result of measuring: bytes and times per layer call, for one micro-batch. Pure data.

The bytes of a call come in four parts, in the order in which a micro-batch meets them:

    waiting     what the micro-batch holds before the call, while other micro-batches run
    stash       which inputs of the call are kept for its backward pass
    forward     what running the call forward takes
    backward    what running it backward takes

`pack_bytes` adds them up to what one micro-batch takes in a pack, `memory` adds those up to what a device holds at each
task of a plan. tests/scheduler/test_memory.py adds up a whole plan by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

from harmony_ds.decomposer.graph import merge_calls, positions_of
from harmony_ds.scheduler.allocations import Allocations
from harmony_ds.scheduler.crossing import CrossingValue
from harmony_ds.scheduler.flow import Flow


@dataclass(frozen=True, slots=True)
class WaitingBytes:
    """Device memory that a micro-batch holds while it waits before a call.

    Attributes:
        alive_bytes: the call's inputs, and what the code between the layers keeps (masks, position ids). What earlier
            calls have stashed is not in it.
        stashed_too_bytes: what it keeps for such a reason and an earlier call has stashed, too. Where that stash stays on
            the device, this is the same memory and is not counted; where that stash goes to the host, this stays.
        after_forward_bytes: the part of `alive_bytes` that may still be there when the forward pass is over.
    """

    alive_bytes: int = 0
    stashed_too_bytes: int = 0
    after_forward_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StashBytes:
    """Inputs of a call that are kept for its backward pass.

    Attributes:
        new_bytes: inputs that no earlier call has stashed.
        again_bytes: inputs that an earlier call has stashed, too, but not the one just before. They take no more memory on
            the device; on the way to the host and back they move once more with this call's pack.
        again_at_cut_bytes: inputs that the call just before has stashed, too. They move once more only where a pack begins
            with this call: else both calls are in one pack, which moves them once.
        base_bytes: where stashed inputs are views, the rest of the memory that they are views of. It is there until
            the stash has been moved to the host.
        slice_bytes: what of all these inputs is on the device at once where slices of rows take theirs from the host.
    """

    new_bytes: int = 0
    again_bytes: int = 0
    again_at_cut_bytes: int = 0
    base_bytes: int = 0
    slice_bytes: int = 0

    @property
    def on_device_bytes(self) -> int:
        """What the stash of this call adds on the device, as long as it stays there: `new_bytes + base_bytes`."""
        return self.new_bytes + self.base_bytes

    @property
    def taken_bytes(self) -> int:
        """All inputs that the call is recomputed from, whatever other calls are."""
        return self.new_bytes + self.again_bytes + self.again_at_cut_bytes


@dataclass(frozen=True, slots=True)
class ForwardBytes:
    """Device memory that running a call forward takes, with the code between it and the next call.

    Attributes:
        peak_bytes: the most that it adds to what was alive before.
        graph_bytes: what is left of that with autograd on: the graph and the outputs, of the call and of that code. The
            fused pack holds this from the call's forward to its backward.
        kept_graph_bytes: the call's autograd graph alone, without inputs (they are in the stash) and outputs (they are in
            the waiting bytes of the next call). A pack whose graph is kept holds this from forward to backward.
    """

    peak_bytes: int = 0
    graph_bytes: int = 0
    kept_graph_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BackwardBytes:
    """Device memory that running a call backward takes, and the gradients that it leaves.

    Attributes:
        peak_bytes: the most that recomputing the call and propagating through it takes, with its graph and with the
            gradients that wait for it.
        code_peak_bytes: the most that propagating through the code after the call takes, before the call itself, with the
            gradients that wait for both.
        input_gradient_bytes: gradients that wait for earlier calls when this call and all after it are through.
        crossing_gradient_bytes: what of these may wait on the host, without what the allocator rounds up.
        crossing_fused_bytes: the same where a fused pack begins with this call.
        unsummed_bytes: gradients of its parameters that wait until the pack is through, because their sums have another
            dtype. 0 where gradients are added to their sums at once.
        summed_bytes: the sums of its parameters' gradients, where they have the parameters' dtype. 0 where they do not.
    """

    peak_bytes: int = 0
    code_peak_bytes: int = 0
    input_gradient_bytes: int = 0
    crossing_gradient_bytes: int = 0
    crossing_fused_bytes: int = 0
    unsummed_bytes: int = 0
    summed_bytes: int = 0


_BytesOfCall = TypeVar("_BytesOfCall", WaitingBytes, StashBytes, ForwardBytes, BackwardBytes)


def scale_bytes(part: _BytesOfCall, times: int) -> _BytesOfCall:
    """Return the part of a cost with every number of bytes multiplied."""
    return type(part)(*(times * getattr(part, f.name) for f in fields(part)))


def _larger(part: _BytesOfCall, other: _BytesOfCall) -> _BytesOfCall:
    """Return the part of a cost that has the larger of both in each field."""
    return type(part)(*(max(getattr(part, f.name), getattr(other, f.name)) for f in fields(part)))


@dataclass(frozen=True, slots=True)
class CallCost:
    """Device bytes and times of one layer call with one micro-batch.

    Weights and the sums of their gradients are not in it: a plan counts them once per pack.

    Attributes:
        waiting, stash, forward, backward: the bytes, see there.
        needs_backward: whether a gradient flows through this call at all.
        runs_with_loss: whether it runs in tiles of tokens with the loss, whose bytes and time are its own, too.
        keeps_graph: whether a fused pack that begins here keeps all its graphs until its backward is done, because
            the code before it and the code in it share theirs.
        forward_ms: running it forward, and the code between it and the next call.
        backward_ms: recomputing it and propagating backward.
        fused_ms: running it forward and propagating backward at once, as in the fused pack.
        propagate_ms: propagating backward through a graph that was kept.
    """

    waiting: WaitingBytes = field(default_factory=WaitingBytes)
    stash: StashBytes = field(default_factory=StashBytes)
    forward: ForwardBytes = field(default_factory=ForwardBytes)
    backward: BackwardBytes = field(default_factory=BackwardBytes)
    needs_backward: bool = False
    keeps_graph: bool = False
    runs_with_loss: bool = False
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    fused_ms: float = 0.0
    propagate_ms: float = 0.0

    @property
    def saved_ms(self) -> float:
        """The time that a kept graph saves: recomputing the call."""
        return self.backward_ms - self.propagate_ms

    def worst(self, other: CallCost) -> CallCost:
        """Return the larger of both costs in every respect."""
        return CallCost(
            waiting=_larger(self.waiting, other.waiting),
            stash=_larger(self.stash, other.stash),
            forward=_larger(self.forward, other.forward),
            backward=_larger(self.backward, other.backward),
            needs_backward=self.needs_backward or other.needs_backward,
            keeps_graph=self.keeps_graph or other.keeps_graph,
            runs_with_loss=self.runs_with_loss or other.runs_with_loss,
            forward_ms=max(self.forward_ms, other.forward_ms),
            backward_ms=max(self.backward_ms, other.backward_ms),
            fused_ms=max(self.fused_ms, other.fused_ms),
            propagate_ms=max(self.propagate_ms, other.propagate_ms),
        )

    def with_stash_on_host(self, begins_pack: bool) -> CallCost:
        """Return the cost where stashes go to the host: each pack moves all that its own calls take, and what a
        micro-batch keeps for another reason stays on the device beside it.
        """
        waiting, stash = self.waiting, self.stash
        at_cut_bytes = stash.again_at_cut_bytes if begins_pack else 0
        return replace(
            self,
            waiting=replace(
                waiting,
                alive_bytes=waiting.alive_bytes + waiting.stashed_too_bytes,
                after_forward_bytes=waiting.after_forward_bytes + waiting.stashed_too_bytes,
            ),
            stash=replace(stash, new_bytes=stash.new_bytes + stash.again_bytes + at_cut_bytes),
        )


@dataclass(frozen=True, slots=True)
class CostTable:
    """One `CallCost` per position of the call order, and the costs of the code around the calls.

    Attributes:
        calls: the layer called at each position.
        costs: one per position.
        tail_bytes: the most that the code after the last layer (the loss) adds, forward and backward.
        held_bytes: what a micro-batch keeps from the end of its forward pass to the end of its backward pass, without
            the stash: arguments that layers share, and the graph of the code between them.
        scalar_bytes: what a tensor of one number takes: a loss, and the grain of the device's allocator.
        margin_bytes: the most that a step has taken beyond its plan.
        held_and_stashed_bytes: what a micro-batch keeps like `held_bytes` and has stashed, too: not counted while that
            stash is on the device.
        head_ms: the code before the first layer.
        tail_ms: the code after the last layer (the loss), forward and backward.
        issue_share: of all times, the part that the host takes to issue them, where a device computes beside it.
        in_slices: whether layer calls are cut into slices of a micro-batch's rows, or take all of them from the host. The
            fused pack then keeps no graph: it runs forward and backward as any other pack does.
        flow: what is handed from layer to layer, where several devices are to run them.
        crossing: tensors that may wait on the host between two calls.
        output_bytes: what the model's outputs and the graph of the code after the last call hold until the loss is made;
            where the last call runs with a loss that is made later, its input in their place, until that is propagated.
        output_freed_bytes: the part of them that is freed before the loss is propagated back from: no graph needs it.
        making_bytes: the part of `tail_bytes` that comes before the loss is propagated back from.
        allocations: what a micro-batch allocates, request by request; None: not known.
        end_bytes: the part of `tail_bytes` that comes before the model's outputs are there.
        loss_bytes: the most that the micro-batch has, beside its stash, while its loss is made and propagated back from,
            model's outputs and held bytes included.
        rows: of the micro-batch; 0: not known.
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
    output_freed_bytes: int = 0
    making_bytes: int = 0
    crossing: tuple[CrossingValue, ...] = ()
    allocations: Allocations | None = None
    end_bytes: int = 0
    loss_bytes: int = 0
    rows: int = 0

    def crossing_gradient_bytes(self, position: int, fused: int) -> int:
        """Return the gradients that may wait on the host between the call at `position` and those before it.

        `fused`: the position at which the fused pack begins.
        """
        backward = self.costs[position].backward
        is_one_graph = position == fused and not self.in_slices
        return backward.crossing_fused_bytes if is_one_graph else backward.crossing_gradient_bytes

    @property
    def working_bytes(self) -> int:
        """The most that a micro-batch takes while it runs through a layer, or through the loss."""
        code = [cost.backward.code_peak_bytes for cost in self.costs]
        return max(self.tail_bytes, self.layer_bytes, *code)

    @property
    def layer_bytes(self) -> int:
        """The most that a micro-batch takes while it runs through a layer."""
        return max((max(cost.forward.peak_bytes, cost.backward.peak_bytes) for cost in self.costs), default=0)

    def worst(self, other: CostTable) -> CostTable:
        """Return a table that covers what both saw: every call of either, at the larger of both costs."""
        order = merge_calls(self.calls, other.calls)
        costs = [CallCost()] * len(order)
        for table in (self, other):
            for position, cost in zip(positions_of(table.calls, order), table.costs, strict=True):
                costs[position] = costs[position].worst(cost)
        rest = [
            f.name for f in fields(CostTable) if f.name not in ("calls", "costs", "flow", "crossing", "allocations")
        ]
        most = {name: max(getattr(self, name), getattr(other, name)) for name in rest}
        most["output_freed_bytes"] = min(self.output_freed_bytes, other.output_freed_bytes)
        larger = max(self, other, key=lambda table: sum(table.flow.nbytes))
        flow = larger.flow.at(positions_of(larger.calls, order))
        larger = max(self, other, key=lambda table: sum(value.nbytes for value in table.crossing))
        positions = positions_of(larger.calls, order)
        crossing = tuple(value.at(positions) for value in larger.crossing)
        larger = max(self, other, key=lambda table: table.working_bytes)
        allocations = larger.allocations if larger.calls == order else None
        return CostTable(order, tuple(costs), flow=flow, crossing=crossing, allocations=allocations, **most)

    def including(self, other: CostTable) -> CostTable:
        """Return this table and, at the costs of `other`, the calls that only `other` has."""
        order = merge_calls(self.calls, other.calls)
        theirs, own = positions_of(other.calls, order), positions_of(self.calls, order)
        known = dict(zip((*theirs, *own), (*other.costs, *self.costs), strict=True))
        costs = tuple(known.get(position, CallCost()) for position in range(len(order)))
        crossing = tuple(value.at(own) for value in self.crossing)
        allocations = self.allocations if order == self.calls else None
        return replace(
            self, calls=order, costs=costs, flow=self.flow.at(own), crossing=crossing, allocations=allocations
        )
