"""What `Measurement` notes of each layer call, and the `CostTable` that follows from all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harmony_ds.model.targets import InterLayerGradient, OutputGradient
from harmony_ds.scheduler.allocations import Allocations, CallAllocations, Event, Events
from harmony_ds.scheduler.costs import CallCost, CostTable, ForwardBytes
from harmony_ds.scheduler.crossing import CrossingValue
from harmony_ds.scheduler.flow import Flow

_Gradient = OutputGradient | InterLayerGradient
_NOTHING_KNOWN = CallCost()
_NOTHING_RECORDED = CallAllocations()
Pairs = list[tuple[int, int]]
"""Allocations as they are recorded: see `AllocationTrace`."""


def _events(pairs: Pairs) -> Events:
    return tuple(Event(*pair) for pair in pairs)


@dataclass(slots=True, eq=False)
class CallMeasurement:
    """Bytes of one layer call, or of the code after the last one, as differences to the bytes alive when it began.

    Attributes:
        layer: index of the layer that was called.
        cost: what is known of the call's `CallCost` without the other calls.
        backward: the most while the call was recomputed and propagated through, its outputs' gradients not counted.
        settle: the most while gradients ran back through the code after the call; gradients that waited there not counted.
        unlayered: by name, bytes of the unlayered parameters that the call gave a gradient to.
        made: gradients of the call's outputs.
        taken: gradients that propagating through the call yields.
        settled: gradients that propagating through the code after the call yields.
        allocations: what it allocates, but for the code after it.
        code: what the code after it allocates.
    """

    layer: int = -1
    cost: CallCost = _NOTHING_KNOWN
    backward: int = 0
    settle: int = 0
    unlayered: dict[str, int] = field(default_factory=dict)
    made: list[OutputGradient] = field(default_factory=list)
    taken: list[_Gradient] = field(default_factory=list)
    settled: list[OutputGradient] = field(default_factory=list)
    allocations: CallAllocations = _NOTHING_RECORDED
    code: Pairs = field(default_factory=list)

    def note(self, **known: Any) -> None:
        """Replace fields of `cost`."""
        self.cost = replace(self.cost, **known)

    def note_forward_allocations(self, forward: Pairs, outputs: tuple[int, ...]) -> None:
        """Note what the call's forward pass has allocated; see `CallAllocations`."""
        self.allocations = replace(self.allocations, forward=_events(forward), outputs=outputs)

    def note_backward_allocations(self, recompute: Pairs, propagate: Pairs, **known: Any) -> None:
        """Note what running the call again and backward has allocated; `known`: other fields of `CallAllocations`."""
        self.allocations = replace(
            self.allocations, recompute=_events(recompute), propagate=_events(propagate), **known
        )

    def note_forward(self, peak_bytes: int = 0, graph_bytes: int = 0, kept_graph_bytes: int = 0) -> None:
        """Raise what the forward pass of the call takes to at least these bytes."""
        known = self.cost.forward
        self.note(
            forward=ForwardBytes(
                peak_bytes=max(known.peak_bytes, peak_bytes),
                graph_bytes=max(known.graph_bytes, graph_bytes),
                kept_graph_bytes=max(known.kept_graph_bytes, kept_graph_bytes),
            )
        )


@dataclass(slots=True, eq=False)
class MicroBatchMeasurement:
    """Bytes of all calls of a micro-batch, and of the code around them; `table` returns the costs that follow.

    Attributes:
        calls: in order.
        tail: what comes after the last call; `cost.forward.peak_bytes` is the most of it, `taken` what it propagates to.
        held, held_and_stashed: see `CostTable`.
        scalar, grain: what a number takes on the device, and what a byte does.
        spans: places that share inter-layer operations, see `InterLayerGraph.spans`.
        flow: what is handed from layer to layer, where several devices are to run them.
        outputs: bytes of the model's outputs, or of a head's input that waits for the loss in their place, and of the graph
            of the code after the last call.
        freed_outputs, making: see `CostTable.output_freed_bytes` and `making_bytes`.
        crossing: tensors that may wait on the host between two calls.
        end, loss_phase: see `CostTable.end_bytes` and `loss_bytes`.
        in_slices, rows: see `CostTable`.
        lead, loss, propagate, incoming: see `Allocations`.
    """

    calls: list[CallMeasurement] = field(default_factory=list)
    tail: CallMeasurement = field(default_factory=CallMeasurement)
    held: int = 0
    held_and_stashed: int = 0
    scalar: int = 0
    grain: int = 1
    spans: set[tuple[int, int]] = field(default_factory=set)
    flow: Flow = field(default_factory=Flow)
    outputs: int = 0
    freed_outputs: int = 0
    making: int = 0
    crossing: tuple[CrossingValue, ...] = ()
    end: int = 0
    loss_phase: int = 0
    in_slices: bool = False
    rows: int = 0
    lead: Pairs = field(default_factory=list)
    loss: Pairs = field(default_factory=list)
    propagate: Pairs = field(default_factory=list)
    incoming: tuple[int, ...] = ()

    def allocations(self) -> Allocations:
        """Return what the micro-batch has allocated, as far as that was recorded."""
        calls = tuple(replace(call.allocations, code=_events(call.code)) for call in self.calls)
        return Allocations(_events(self.lead), calls, _events(self.loss), _events(self.propagate), self.incoming)

    def table(self) -> CostTable:
        """Return the costs of every call."""
        costs = tuple(self._cost(position) for position in range(len(self.calls)))
        return CostTable(
            tuple(call.layer for call in self.calls),
            costs,
            self.tail.cost.forward.peak_bytes,
            self.held,
            scalar_bytes=self.scalar,
            held_and_stashed_bytes=self.held_and_stashed,
            flow=self.flow,
            output_bytes=self.outputs,
            output_freed_bytes=self.freed_outputs,
            making_bytes=self.making,
            crossing=self.crossing,
            end_bytes=self.end,
            loss_bytes=self.loss_phase,
            in_slices=self.in_slices,
            rows=self.rows,
        )

    def _cost(self, position: int) -> CallCost:
        call = self.calls[position]
        later = self._later(position + 1)
        settle = 0
        if call.settle:
            settle = self._waiting(later, position + 1) + call.settle + self._largest_sum(call.settled, later)
        others = [*later, *call.settled]  # all that there are while it is propagated through
        backward = self._waiting(others, position) + self._nbytes(call.made) + call.backward
        backward += self._largest_sum(call.taken, others) + self._unlayered_sums(position)
        waiting = self._waiting(self._later(position), position)
        if position == 0:
            backward = max(backward, waiting + self.tail.settle)  # the code before the first call comes last
        return replace(
            call.cost,
            backward=replace(
                call.cost.backward,
                peak_bytes=backward if call.cost.needs_backward or position == 0 else 0,
                code_peak_bytes=settle,
                input_gradient_bytes=waiting,
                crossing_gradient_bytes=self._crossing_gradients(position, is_fused=False),
                crossing_fused_bytes=self._crossing_gradients(position, is_fused=True),
            ),
            keeps_graph=any(first < position <= last for first, last in self.spans),
        )

    def _later(self, position: int) -> list[_Gradient]:
        """Return all gradients that exist when everything from `position` on has been propagated through."""
        later = self.calls[position:]
        return [*self.tail.taken, *(g for call in later for g in (*call.taken, *call.settled))]

    def _waiting(self, gradients: list[_Gradient], position: int) -> int:
        """Return bytes of those of `gradients` that wait for calls before `position`, or for the code between those.

        The gradient of a tensor that such code computed waits at that tensor, until every call that takes the tensor has
        been propagated through. Where those calls were run in one graph with the code, it is propagated through that at
        once, and waits at the outputs that the tensor was computed from. With several calls there may be both. In slices
        no calls are run in one graph.
        """
        # Code after the call before whose propagation one is needed is propagated through then, too.
        ends_at = [(g.call if isinstance(g, OutputGradient) else g.deadline, g) for g in gradients]
        due = {id(g): g for number, g in ends_at if number < position}
        total = self._nbytes(g for g in due.values() if isinstance(g, OutputGradient))
        ends: dict[int, list[InterLayerGradient]] = {}
        for gradient in due.values():
            if isinstance(gradient, InterLayerGradient):
                ends.setdefault(gradient.deadline, []).append(gradient)
        for deadline, targets in ends.items():
            call = self.calls[deadline] if deadline >= 0 else self.tail
            at_tensors, at_outputs = self._nbytes(targets), self._nbytes(g for g in call.settled if id(g) not in due)
            if self.in_slices:
                at_outputs = 0
            ending = [
                [g for g in c.taken if isinstance(g, InterLayerGradient) and g.deadline == deadline] for c in self.calls
            ]
            users = sum(map(bool, ending))
            total += at_tensors + at_outputs if users > 1 else max(at_tensors, at_outputs)
        return total

    def _crossing_gradients(self, position: int, is_fused: bool) -> int:
        """Return the bytes, not rounded up, of gradients that wait for calls before `position` between two packs.

        `is_fused`: the calls from there on were run in one graph with the code before them (see `_waiting`).
        """
        crossing: dict[int, _Gradient] = {}
        for gradient in self._later(position):
            if isinstance(gradient, OutputGradient):
                if gradient.call < position:
                    crossing[id(gradient)] = gradient
            elif gradient.deadline < position:
                settling = self.calls[gradient.deadline] if gradient.deadline >= 0 else self.tail
                waiting: Sequence[_Gradient] = settling.settled if is_fused else [gradient]
                crossing |= {id(one): one for one in waiting}
        return sum(gradient.nbytes for gradient in crossing.values())

    def _unlayered_sums(self, position: int) -> int:
        """Return bytes of unlayered parameters' gradients of later calls that wait for those of calls up to here."""
        later = {k: v for call in (*self.calls[position + 1 :], self.tail) for k, v in call.unlayered.items()}
        earlier = {name for call in self.calls[: position + 1] for name in call.unlayered}
        return sum(nbytes for name, nbytes in later.items() if name in earlier)

    def _largest_sum(self, new: Iterable[_Gradient], known: Iterable[_Gradient]) -> int:
        """Return the most that a sum takes: of one of `new` and the same one among `known`, which are dropped after it."""
        waiting = {id(g) for g in known}
        return max((self._rounded(g.nbytes) for g in new if id(g) in waiting), default=0)

    def _nbytes(self, gradients: Iterable[_Gradient]) -> int:
        return sum(self._rounded(g.nbytes) for g in {id(g): g for g in gradients}.values())

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.grain) * self.grain
