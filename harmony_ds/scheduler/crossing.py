"""What a micro-batch holds while it waits between two packs and may hold on the host meanwhile: tensors, and their bytes.

Where boundaries go to the host (`Policy.boundaries_on_host`), a micro-batch's tensors leave the device when it has passed
a pack, and come back before it passes the next one. They are its `CrossingValue`s on the way forward (outputs of layer
calls that later calls, or the code between them, take), and on the way back the gradients that wait for earlier calls.

A value leaves once, in whichever way comes first: with the first boundary that it crosses, or with the stash of a pack
that recomputes a call from it. The copy on the host serves every later boundary and every later pack's stash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harmony_ds.scheduler.plan import Pack, Packing, Policy


@dataclass(frozen=True, slots=True)
class CrossingValue:
    """A tensor of a micro-batch's forward pass that may go to the host while the micro-batch waits.

    Attributes:
        first, last: positions of the first and the last call before which the tensor is there.
        nbytes: its size.
        stashed: positions of the calls that are recomputed from it, in order.
    """

    first: int
    last: int
    nbytes: int
    stashed: tuple[int, ...] = ()

    @staticmethod
    def from_dict(data: dict[str, Any]) -> CrossingValue:
        """Return the value that `dataclasses.asdict` made `data` of, before JSON made lists of its tuples."""
        return CrossingValue(**{**data, "stashed": tuple(data["stashed"])})

    def at(self, positions: Sequence[int]) -> CrossingValue:
        """Return the same value, with the call at each position at the one that `positions` has for it."""
        stashed = tuple(positions[position] for position in self.stashed)
        return CrossingValue(positions[self.first], positions[self.last], self.nbytes, stashed)


def waiting_bytes(values: Sequence[CrossingValue], position: int) -> int:
    """Return the bytes of a micro-batch's values that are there before the call at `position`."""
    return sum(value.nbytes for value in values if value.first <= position <= value.last)


def boundaries_go(packing: Packing, policy: Policy) -> bool:
    """Return whether what waits between packs goes to the host: where the policy says so, and all of the stash goes, too.

    While a stash stays on the device, one pack's takes as much as a boundary, and moving that is cheaper. Of several
    devices that one process drives, a micro-batch goes on to the next device instead.
    """
    all_stash_goes = 0 < len(packing.forward) <= policy.stash_on_host
    return policy.boundaries_on_host and all_stash_goes and policy.pipeline == 1 and policy.grouping


class Crossings:
    """The bytes that one micro-batch copies at the boundaries of given packs, and at their stash."""

    def __init__(self, packing: Packing, values: Sequence[CrossingValue]) -> None:
        self._values = values
        packs = packing.packs
        forward = [packs[index].positions[0] for index in packing.forward]
        self._boundaries = [*forward[1:], packing.fused.positions[0]] if forward else []

    def out_bytes(self, boundary: int) -> int:
        """Return the bytes that are copied to the host at the boundary before the call at position `boundary`."""
        total = 0
        for value in self._values:
            if value.first <= boundary <= value.last and not self._left_before(value, boundary):
                total += value.nbytes
        return total

    def in_bytes(self, boundary: int) -> int:
        """Return the bytes that come back at the boundary before the call at position `boundary`."""
        return waiting_bytes(self._values, boundary)

    def copied_before_bytes(self, pack: Pack) -> int:
        """Return how much of a pack's stash is on the host before the stash leaves, so that it needs no copy."""
        total = 0
        first = pack.positions[0]
        for value in self._values:
            if not any(boundary <= first for boundary in self._crossed(value)):
                continue
            if value.stashed and value.stashed[0] in pack.positions:
                total += value.nbytes
        return total

    def unstashed_bytes(self, packing: Packing) -> int:
        """Return the most bytes of a micro-batch that wait on the host at a boundary and are part of no stash there."""
        stashing = {position for index in packing.forward for position in packing.packs[index].positions}
        unstashed = [value for value in self._values if stashing.isdisjoint(value.stashed)]
        return max((waiting_bytes(unstashed, boundary) for boundary in self._boundaries), default=0)

    def _crossed(self, value: CrossingValue) -> list[int]:
        return [boundary for boundary in self._boundaries if value.first <= boundary <= value.last]

    def _left_before(self, value: CrossingValue, boundary: int) -> bool:
        """Return whether the value has been copied to the host before a boundary."""
        crossed = self._crossed(value)
        return any(earlier < boundary for earlier in (*crossed[:1], *value.stashed[:1]))
