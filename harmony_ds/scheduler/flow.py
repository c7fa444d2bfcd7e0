"""Which tensors a micro-batch hands from layer to layer, and what of that crosses where layers lie on several devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

HOME = 0
"""The device of inputs, buffers and unlayered parameters, as in `harmony_ds.device.base`: plans know no torch."""


class Kind(IntEnum):
    """The makers of tensors: a layer's call, an operation between layers, one that changes its first operand."""

    CALL = 0
    OPERATION = 1
    WRITE = 2


Event = tuple[Kind, int, tuple[int, ...], tuple[int, ...]]
"""What it is; the position of the call, or of the last one before the operation (-1: none); tensors in; tensors out."""


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
    """The tensors of one micro-batch's forward pass, numbered, and what makes them.

    Attributes:
        nbytes, returns: by number: the size, and whether it requires a gradient.
        events: in the order of the forward pass.
        lasting: the numbers of parameters, which all micro-batches share.
        own: of a set of micro-batches whose calls are joined, those that each of its `members` has for itself between
            layers, and of which a call takes one: they do not grow with the rows.
    """

    nbytes: tuple[int, ...] = ()
    returns: tuple[bool, ...] = ()
    events: tuple[Event, ...] = ()
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
        """Return the same where the call at each position is at another one."""
        moved = ((kind, p if p < 0 else positions[p], took, gave) for kind, p, took, gave in self.events)
        return replace(self, events=tuple(moved))

    def moves(self, devices: Sequence[int]) -> tuple[Move, ...]:
        """Return what crosses where the call at each position runs on the device that `devices` says.

        As `harmony_ds.model.device_transfers` does it: once to each device, and anew after a tensor was changed in place.
        What a call returns as it came is what has crossed for it, from then on.
        """
        where: dict[int, int] = {}
        copies: defaultdict[int, dict[int, int]] = defaultdict(dict)  # by device, how many members' are there
        moves: list[Move] = []
        for kind, position, took, gave in self.events:
            here = devices[position] if position >= 0 else HOME
            places = {where.get(tensor, HOME) for tensor in took}
            if kind is not Kind.CALL and len(places) < 2:
                here = min(places, default=here)
            elif kind is Kind.WRITE:
                here = where.get(took[0], HOME)
            for tensor in took:
                source = where.get(tensor, HOME)
                wanted = self.members if tensor in self.own and kind is not Kind.CALL else 1
                if source != here and (more := wanted - copies[tensor].get(here, 0)) > 0:
                    copies[tensor][here] = wanted
                    nbytes, returns = more * self.nbytes[tensor], self.returns[tensor]
                    moves.append(Move(position, source, here, nbytes, returns, tensor in self.lasting))
            if kind is Kind.WRITE:
                copies[took[0]].clear()
            for tensor in gave:
                if kind is Kind.CALL and where.get(tensor, here) != here:
                    copies[tensor].clear()
                    where[tensor] = here
                where.setdefault(tensor, here)
        return tuple(moves)

    @staticmethod
    def of(data: dict[str, Any]) -> Flow:
        """From what `dataclasses.asdict` made of it and JSON has kept."""
        events = tuple((Kind(kind), p, tuple(took), tuple(gave)) for kind, p, took, gave in data["events"])
        own, members = tuple(data.get("own", ())), data.get("members", 1)
        return Flow(tuple(data["nbytes"]), tuple(data["returns"]), events, tuple(data["lasting"]), own, members)
