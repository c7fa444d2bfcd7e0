"""What a micro-batch holds while it waits between two packs and may hold on the host meanwhile: tensors, and their bytes.

These are its crossing tensors: `CrossingValue`s on the way forward (outputs of layer calls that later calls, or the code
between them, take), and on the way back the gradients that wait for earlier calls. Where they go to the host
(`Policy.crossing_on_host`), they leave the device when the micro-batch has passed a pack, and come back before it passes
the next one.

A value leaves once, in whichever way comes first: between the first two packs that it crosses, or with the stash of a pack
that recomputes a call from it. The copy on the host serves between all later packs, and every later pack's stash.
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


def crossing_moves(packing: Packing, policy: Policy) -> bool:
    """Return whether what waits between packs goes to the host: where the policy says so, and all of the stash goes, too.

    While a stash stays on the device, one pack's takes as much as what crosses to the next one, and moving that is cheaper.
    Of several devices that one process drives, a micro-batch goes on to the next device instead.
    """
    all_stash_goes = 0 < len(packing.forward) <= policy.stash_on_host
    return policy.crossing_on_host and all_stash_goes and policy.pipeline == 1 and policy.grouping


class CrossingBytes:
    """The bytes that one micro-batch copies between given packs, and with their stash."""

    def __init__(self, packing: Packing, values: Sequence[CrossingValue]) -> None:
        self._values = values
        packs = packing.packs
        forward = [packs[index].positions[0] for index in packing.forward]
        self._pack_begins = [*forward[1:], packing.fused.positions[0]] if forward else []

    def out_bytes(self, position: int) -> int:
        """Return the bytes that are copied to the host before the call at `position`, with which a pack begins."""
        total = 0
        for value in self._values:
            if value.first <= position <= value.last and not self._left_before(value, position):
                total += value.nbytes
        return total

    def in_bytes(self, position: int) -> int:
        """Return the bytes that come back before the call at `position`, with which a pack begins."""
        return waiting_bytes(self._values, position)

    def copied_before_bytes(self, pack: Pack) -> int:
        """Return how much of a pack's stash is on the host before the stash leaves, so that it needs no copy."""
        total = 0
        first = pack.positions[0]
        for value in self._values:
            if not any(position <= first for position in self._crossed(value)):
                continue
            if value.stashed and value.stashed[0] in pack.positions:
                total += value.nbytes
        return total

    def unstashed_bytes(self, packing: Packing) -> int:
        """Return the most bytes of a micro-batch that wait on the host between two packs and are part of no stash there."""
        stashing = {position for index in packing.forward for position in packing.packs[index].positions}
        unstashed = [value for value in self._values if stashing.isdisjoint(value.stashed)]
        return max((waiting_bytes(unstashed, position) for position in self._pack_begins), default=0)

    def _crossed(self, value: CrossingValue) -> list[int]:
        return [position for position in self._pack_begins if value.first <= position <= value.last]

    def _left_before(self, value: CrossingValue, position: int) -> bool:
        """Return whether the value has been copied to the host before the one that begins at `position`."""
        crossed = self._crossed(value)
        return any(earlier < position for earlier in (*crossed[:1], *value.stashed[:1]))
