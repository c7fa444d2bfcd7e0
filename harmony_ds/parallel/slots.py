"""Host memory in which processes leave gradients for each other: where they are added up on the host.

Every process has a few slots of its own, in memory that all see. Exchange n takes slot n modulo their number:

    its owner       begin(n): when all are through with exchange n - slots, copies its gradients in
    its thread of   others(n): says that they are there, waits until everybody's are, and reads its pieces of all
    the updates     end(n): says that it is through with them

Exchanges have the same numbers in all processes, and each process's thread takes them in their order: nobody waits for
somebody who waits for him.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harmony_ds.device.base import Device
from harmony_ds.parallel.board import Board
from harmony_ds.parallel.shared_memory import SharedMemory


class GradientSlots:
    """One process's view of them."""

    def __init__(self, board: Board, memory: SharedMemory, device: Device) -> None:
        self._board = board
        self._memory = memory
        self._device = device
        self._slots: list[list[Tensor]] = [[] for _ in range(board.size)]  # by rank
        self._taken = 0

    @property
    def nbytes(self) -> int:
        """Of this process's own."""
        return sum(slot.nbytes for slot in self._slots[self._board.rank])

    def fits(self, count: int, nbytes: int) -> bool:
        """Whether there are `count` slots of `nbytes`."""
        own = self._slots[self._board.rank]
        return len(own) == count and min((slot.nbytes for slot in own), default=0) >= nbytes

    def make(self, count: int, nbytes: int) -> None:
        """Exactly so many, of so many bytes; by all processes at the same time, when no exchange is under way."""
        self.unlock()
        for slot in (slot for slots in self._slots for slot in slots):
            self._memory.free(slot)
        self._slots = [
            [self._memory.empty((nbytes,), torch.uint8) for _ in range(count)] for _ in range(self._board.size)
        ]
        for slot in self._slots[self._board.rank]:
            self._device.host_lock(slot)

    def unlock(self) -> None:
        """This process copies no gradients there any more."""
        for slot in self._slots[self._board.rank]:
            self._device.host_free(slot)

    # ---- on the engine's thread

    def begin(self, check: Callable[[], None]) -> Tensor:
        """This process's slot of the next exchange, when everybody is through with what was in it.

        `check` raises what has ended this process's thread of the updates, for which it would be waited for ever.
        """
        own = self._slots[self._board.rank]
        before = self._taken + 1 - len(own)

        def through(other: int) -> bool:
            if other == self._board.rank:
                check()
            return self._board.read_of(other) >= before

        self._board.wait(through, "added up gradients", among=range(self._board.size))
        return own[self._taken % len(own)]

    def take(self) -> int:
        """The number of the exchange that has begun: all processes take part in it."""
        self._taken += 1
        return self._taken

    # ---- on the thread of the updates

    def others(self, number: int) -> list[Tensor]:
        """Everybody's slot of exchange `number`, by rank, when they are filled. This process's own is."""
        self._board.post_filled(number)
        self._board.wait(lambda other: self._board.filled_of(other) >= number, "left its gradients on the host")
        return [slots[(number - 1) % len(slots)] for slots in self._slots]

    def end(self, number: int) -> None:
        """This process has read all that it wants of exchange `number`."""
        self._board.post_read(number)


@dataclass(frozen=True, slots=True)
class HostSum:
    """The gradients that all processes have left in an exchange.

    Attributes:
        pieces: elements of this process's piece of each parameter that any has a gradient of.
    """

    pieces: Mapping[str, int]
    _slots: GradientSlots
    _number: int
    _ranks: Mapping[str, Sequence[int]]  # who has a gradient
    _elements: Mapping[str, slice]  # of a slot

    def write(self, means: Mapping[str, Tensor]) -> None:
        """Fills `means`, one dimensional, with this process's pieces; on the thread of the updates, behind the arrival of
        this process's own gradients. They are added up in the order of the ranks.
        """
        slots = self._slots.others(self._number)
        for name, mean in means.items():
            first, *more = (slots[rank].view(mean.dtype)[self._elements[name]] for rank in self._ranks[name])
            mean.copy_(first)
            for part in more:
                mean.add_(part)
            mean.div_(len(slots))
        self._slots.end(self._number)
