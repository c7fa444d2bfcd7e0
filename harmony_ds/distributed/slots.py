"""Slots: shared host memory in which processes leave gradients for each other, which are then added up on the host.

On a GPU a pack's gradients are swapped out anyway. When they are reduced on the host, each process swaps all of its own
out into one of its slots, and then each process's update thread adds up its piece of all processes' slots. No byte goes
from process to process: gloo would copy the gradients through sockets (docs/parallel.md has the times).

Every process has a few slots, which it uses in turn. Reduction n uses slot n modulo their number:

    engine's thread   wait_free_slot: when all have read reduction n - slots, gradients may be copied into the slot
                      next_reduction: number it
    update thread     wait_filled(n): post that they are there, wait for those of all processes, read one's pieces of all
                      post_read(n): post that they have been read

Reductions have the same numbers in all processes, and update threads run them in order: there is no deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harmony_ds.device.base import Device
from harmony_ds.distributed.board import Board, Posted
from harmony_ds.distributed.shared_memory import SharedMemory


class GradientSlots:
    """The slots of a server's processes, as one of them sees them."""

    def __init__(self, board: Board, memory: SharedMemory, device: Device) -> None:
        self._board = board
        self._memory = memory
        self._device = device
        self._slots: list[list[Tensor]] = [[] for _ in range(board.size)]  # by rank
        self._begun = 0

    @property
    def nbytes(self) -> int:
        """Bytes of this process's slots."""
        return sum(slot.nbytes for slot in self._slots[self._board.rank])

    def fits(self, count: int, nbytes: int) -> bool:
        """Return whether there are `count` slots, of `nbytes` or more each."""
        own = self._slots[self._board.rank]
        return len(own) == count and min((slot.nbytes for slot in own), default=0) >= nbytes

    def allocate(self, count: int, nbytes: int) -> None:
        """Replace all slots by `count` of `nbytes` each; called by all processes, when no reduction is under way."""
        self.unlock()
        for slots in self._slots:
            for slot in slots:
                self._memory.free(slot)
        self._slots = [
            [self._memory.empty((nbytes,), torch.uint8) for _ in range(count)] for _ in range(self._board.size)
        ]
        for slot in self._slots[self._board.rank]:
            self._device.host_lock(slot)

    def unlock(self) -> None:
        """Unlock this process's slots, when it copies no gradients there any more."""
        for slot in self._slots[self._board.rank]:
            self._device.host_free(slot)

    # ---- on the engine's thread

    def wait_free_slot(self, check: Callable[[], None]) -> Tensor:
        """Return this process's slot of the next reduction, when all processes have read what was there.

        Args:
            check: raises the error that has ended this process's update thread, if any: waiting would never end.
        """
        own = self._slots[self._board.rank]
        before = self._begun + 1 - len(own)

        def has_read(other: int) -> bool:
            if other == self._board.rank:
                check()
            return self._board.posted(other, Posted.SLOTS_READ) >= before

        self._board.wait(has_read, "added up gradients", among=range(self._board.size))
        return own[self._begun % len(own)]

    def next_reduction(self) -> int:
        """Return the number of the reduction that begins now, in all processes."""
        self._begun += 1
        return self._begun

    # ---- on the update thread

    def wait_filled(self, number: int) -> list[Tensor]:
        """Post that this process has filled its slot of a reduction, wait for all others', and return all, by rank."""
        self._board.post(Posted.SLOT_FILLED, number)
        self._board.wait(
            lambda other: self._board.posted(other, Posted.SLOT_FILLED) >= number, "left its gradients on the host"
        )
        return [slots[(number - 1) % len(slots)] for slots in self._slots]

    def post_read(self, number: int) -> None:
        """Post that this process has read all slots of a reduction."""
        self._board.post(Posted.SLOTS_READ, number)


@dataclass(frozen=True, slots=True)
class HostSum:
    """This process's pieces of the mean of the gradients that all processes leave in their slots of one reduction.

    Attributes:
        pieces: elements of this process's piece, for every parameter that any process has a gradient of.
    """

    pieces: Mapping[str, int]
    _slots: GradientSlots
    _number: int
    _ranks: Mapping[str, Sequence[int]]  # of the processes that have a gradient, by parameter
    _elements: Mapping[str, slice]  # of this process's piece in a slot, by parameter

    def write(self, means: Mapping[str, Tensor]) -> None:
        """Fill the flat tensors `means`, by parameter; called when this process's own gradients are in its slot."""
        slots = self._slots.wait_filled(self._number)
        for name, mean in means.items():
            parts = [slots[rank].view(mean.dtype)[self._elements[name]] for rank in self._ranks[name]]
            mean.copy_(parts[0])
            for part in parts[1:]:  # in the order of the ranks, whoever came first
                mean.add_(part)
            mean.div_(len(slots))
        self._slots.post_read(self._number)
