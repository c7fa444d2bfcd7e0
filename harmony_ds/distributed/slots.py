"""Shared host memory in which processes leave gradients for each other, to be added up on the host.

Every process has a few slots of its own. Exchange n uses slot n modulo their number:

    engine's thread   begin: when all have read exchange n - slots, copy gradients into the slot
    update thread     all_slots(n): post that they are there, wait for all processes', read this one's pieces of all
                      end(n): post that they are read

Exchanges have the same numbers in all processes, and update threads run them in order: there is no deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harmony_ds.device.base import Device
from harmony_ds.distributed.board import FILLED, READ, Board
from harmony_ds.distributed.shared_memory import SharedMemory


class GradientSlots:
    """One process's view of the slots."""

    def __init__(self, board: Board, memory: SharedMemory, device: Device) -> None:
        self._board = board
        self._memory = memory
        self._device = device
        self._slots: list[list[Tensor]] = [[] for _ in range(board.size)]  # by rank
        self._taken = 0

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self._slots[self._board.rank])

    def fits(self, count: int, nbytes: int) -> bool:
        own = self._slots[self._board.rank]
        return len(own) == count and min((slot.nbytes for slot in own), default=0) >= nbytes

    def make(self, count: int, nbytes: int) -> None:
        """Replace all slots by `count` of `nbytes` each; called by all processes, when no exchange is under way."""
        self.unlock()
        for slot in (slot for slots in self._slots for slot in slots):
            self._memory.free(slot)
        empty = self._memory.empty
        self._slots = [[empty((nbytes,), torch.uint8) for _ in range(count)] for _ in range(self._board.size)]
        for slot in self._slots[self._board.rank]:
            self._device.host_lock(slot)

    def unlock(self) -> None:
        """Unlock this process's slots, when it copies no gradients there any more."""
        for slot in self._slots[self._board.rank]:
            self._device.host_free(slot)

    # ---- on the engine's thread

    def begin(self, check: Callable[[], None]) -> Tensor:
        """Return this process's slot of the next exchange, when all have read its last one.

        `check` raises the error that has ended this process's update thread, if any: waiting would never end.
        """
        own = self._slots[self._board.rank]
        before = self._taken + 1 - len(own)

        def has_read(other: int) -> bool:
            if other == self._board.rank:
                check()
            return self._board.posted(other, READ) >= before

        self._board.wait(has_read, "added up gradients", among=range(self._board.size))
        return own[self._taken % len(own)]

    def take(self) -> int:
        """Return the number of the exchange that has begun; all processes take part in it."""
        self._taken += 1
        return self._taken

    # ---- on the update thread

    def all_slots(self, number: int) -> list[Tensor]:
        """Wait until all have filled their slots of exchange `number`, as this process has; return them by rank."""
        self._board.post(FILLED, number)
        self._board.wait(lambda other: self._board.posted(other, FILLED) >= number, "left its gradients on the host")
        return [slots[(number - 1) % len(slots)] for slots in self._slots]

    def end(self, number: int) -> None:
        """Post that this process has read exchange `number`."""
        self._board.post(READ, number)


@dataclass(frozen=True, slots=True)
class HostSum:
    """Sum of the gradients that all processes have left in an exchange."""

    pieces: Mapping[str, int]  # elements of this process's piece, for parameters that any process has a gradient of
    _slots: GradientSlots
    _number: int
    _ranks: Mapping[str, Sequence[int]]  # that have a gradient
    _elements: Mapping[str, slice]  # of a slot

    def write(self, means: Mapping[str, Tensor]) -> None:
        """Fill the flat `means` with this process's pieces, added up by rank; after its own gradients have arrived."""
        slots = self._slots.all_slots(self._number)
        for name, mean in means.items():
            first, *more = (slots[rank].view(mean.dtype)[self._elements[name]] for rank in self._ranks[name])
            mean.copy_(first)
            for part in more:
                mean.add_(part)
            mean.div_(len(slots))
        self._slots.end(self._number)
