"""Which tensors a micro-batch hands from layer to layer, and what of that crosses where layers lie on several devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple

HOME = 0
"""The device of inputs, buffers and unlayered parameters, as in `harmony_ds.device.base`: plans know no torch."""


class FlowKind(IntEnum):
    """What makes a tensor: the call of a layer, an operation between layers, or one that changes its first input."""

    CALL = 0
    OPERATION = 1
    WRITE = 2


class FlowEvent(NamedTuple):
    """One thing that made tensors in the forward pass of a micro-batch.

    Attributes:
        kind: what made them.
        position: of the call, or of the last call before the operation (-1: there is none).
        inputs: the numbers of the tensors that it took; the first one of a write is the one that is changed.
        outputs: the numbers of the tensors that it gave.
    """

    kind: FlowKind
    position: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """One tensor that goes from device to device, for the call at `position` or the code after it.

    Attributes:
        returns: whether a gradient of as many bytes comes back.
        is_lasting: whether it is all micro-batches', for which it goes once; gradients come back of each.
    """

    position: int
    source: int
    target: int
    nbytes: int
    returns: bool
    is_lasting: bool = False


@dataclass(frozen=True, slots=True)
class Flow:
    """The tensors of one micro-batch's forward pass, each with a number, and what makes them.

    Attributes:
        nbytes, returns: by number: the size, and whether it requires a gradient.
        events: in the order of the forward pass.
        lasting: the numbers of parameters, which all micro-batches share.
        own: of a set of micro-batches whose calls are joined, those that each of its `members` has for itself between
            layers, and of which a call takes one: they do not grow with the rows.
    """

    nbytes: tuple[int, ...] = ()
    returns: tuple[bool, ...] = ()
    events: tuple[FlowEvent, ...] = ()
    lasting: tuple[int, ...] = ()
    own: tuple[int, ...] = ()
    members: int = 1

    def of_set(self, alone: Flow, members: int) -> Flow:
        """Return the same flow as that of a set of `members`, given the flow of one `alone`."""
        if len(self.nbytes) != len(alone.nbytes):
            return self
        sizes = enumerate(zip(self.nbytes, alone.nbytes, strict=True))
        own = tuple(number for number, (all_bytes, one) in sizes if all_bytes == one and number not in self.lasting)
        return replace(self, own=own, members=members)

    def at(self, positions: Sequence[int]) -> Flow:
        """Return the same flow, with the call at each position at the one that `positions` has for it."""
        moved: list[FlowEvent] = []
        for event in self.events:
            position = event.position if event.position < 0 else positions[event.position]
            moved.append(event._replace(position=position))
        return replace(self, events=tuple(moved))

    def moves(self, devices: Sequence[int]) -> tuple[Move, ...]:
        """Return what crosses where the call at each position runs on the device that `devices` says.

        `harmony_ds.model.device_transfers` moves tensors by these rules: a tensor goes once to each device that needs it,
        and again after it was changed in place. If a call returns one of its inputs, its copy is that tensor from then on.
        """
        device_of: dict[int, int] = {}  # by tensor: where it was made
        copies: defaultdict[int, dict[int, int]] = defaultdict(dict)  # by tensor and device: of how many members
        moves: list[Move] = []
        for event in self.events:
            is_call = event.kind is FlowKind.CALL
            here = _device_of_event(event, devices, device_of)
            for tensor in event.inputs:
                source = device_of.get(tensor, HOME)
                wanted = self.members if tensor in self.own and not is_call else 1
                missing = wanted - copies[tensor].get(here, 0)
                if source != here and missing > 0:
                    copies[tensor][here] = wanted
                    nbytes, is_lasting = missing * self.nbytes[tensor], tensor in self.lasting
                    moves.append(Move(event.position, source, here, nbytes, self.returns[tensor], is_lasting))
            if event.kind is FlowKind.WRITE:
                copies[event.inputs[0]].clear()
            for tensor in event.outputs:
                if is_call and device_of.get(tensor, here) != here:
                    copies[tensor].clear()
                    device_of[tensor] = here
                device_of.setdefault(tensor, here)
        return tuple(moves)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Flow:
        """Return the flow that `dataclasses.asdict` made `data` of, before JSON made lists of its tuples."""
        return Flow(
            nbytes=tuple(data["nbytes"]),
            returns=tuple(data["returns"]),
            events=tuple(
                FlowEvent(FlowKind(kind), position, tuple(inputs), tuple(outputs))
                for kind, position, inputs, outputs in data["events"]
            ),
            lasting=tuple(data["lasting"]),
            own=tuple(data.get("own", ())),
            members=data.get("members", 1),
        )


def _device_of_event(event: FlowEvent, devices: Sequence[int], device_of: dict[int, int]) -> int:
    """Return where an event happens: a call on its own device, an operation where its inputs are, if that is one device."""
    here = devices[event.position] if event.position >= 0 else HOME
    if event.kind is FlowKind.CALL:
        return here
    places = {device_of.get(tensor, HOME) for tensor in event.inputs}
    if len(places) < 2:
        return min(places, default=here)
    if event.kind is FlowKind.WRITE:
        return device_of.get(event.inputs[0], HOME)
    return here
