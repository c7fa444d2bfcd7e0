"""What a micro-batch allocates on the device while it runs through each layer call, in order and with sizes. Pure data.

Bytes that are alive at once are in the `CostTable`; these are the requests behind them, of which the model of the device's
allocator works out what has to be reserved (`replay`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Event(NamedTuple):
    """A request for `nbytes`, or, where these are 0, the end of the one of this `number`."""

    number: int
    nbytes: int


Events = tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class CallAllocations:
    """Of one layer call. Numbers are of allocations of the micro-batch.

    Attributes:
        forward: while the call runs forward, without a graph.
        code: while the code after it runs, up to the next call.
        recompute: while the call runs again, with its graph.
        propagate: while gradients are propagated through that.
        outputs: what the call returns, in `forward`; in the same order as in `recompute`.
        graph_outputs: the same, in `recompute`.
        stashed: inputs that are kept for `recompute`, and may wait on the host.
        incoming: gradients of its outputs, which are there before `recompute`.
        outgoing: gradients of its inputs, which `propagate` leaves.
        unsummed: gradients of its parameters, which `propagate` leaves where their sums are other tensors.
        sums: bytes of the sums of its parameters' gradients.
    """

    forward: Events = ()
    code: Events = ()
    recompute: Events = ()
    propagate: Events = ()
    outputs: tuple[int, ...] = ()
    graph_outputs: tuple[int, ...] = ()
    stashed: tuple[int, ...] = ()
    incoming: tuple[int, ...] = ()
    outgoing: tuple[int, ...] = ()
    unsummed: tuple[int, ...] = ()
    sums: tuple[int, ...] = ()

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> CallAllocations:
        return CallAllocations(**{name: _tuples(value) for name, value in data.items()})


@dataclass(frozen=True, slots=True)
class Allocations:
    """Of one micro-batch.

    Attributes:
        lead: before the first call.
        calls: one per position of the call order.
        loss: while the loss is made of the model's outputs, which are dropped then.
        propagate: while it is propagated through the code after the last call.
        incoming: gradients that `propagate` leaves for layer calls.
        uploads: those of `lead` that are copies of inputs, which another stream makes, in a pool of its own.
    """

    lead: Events = ()
    calls: tuple[CallAllocations, ...] = ()
    loss: Events = ()
    propagate: Events = ()
    incoming: tuple[int, ...] = ()
    uploads: tuple[int, ...] = ()

    @property
    def upload_bytes(self) -> int:
        """The bytes of a micro-batch's inputs."""
        return sum(nbytes for number, nbytes in self.lead if number in self.uploads)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Allocations:
        calls = tuple(CallAllocations.from_dict(call) for call in data["calls"])
        return Allocations(**{name: _tuples(value) for name, value in data.items() if name != "calls"}, calls=calls)


def _tuples(values: Any) -> Any:
    """Return numbers, or events, as JSON has them, as tuples."""
    return tuple(Event(*value) if isinstance(value, (list, tuple)) else value for value in values)
