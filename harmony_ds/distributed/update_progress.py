"""How far the updates of a server's processes are: every process updates its own piece of each parameter.

A parameter's weights may be read once all processes have done the updates of it that were issued. The global gradient norm
is the root of the sum of parts, one from each process, which measures its own pieces. Update threads post both on the
board; whoever needs them waits there.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from harmony_ds.distributed.board import NORM_BYTES, NORMS, NORMS_PLACE, NUMBER, VERSIONS_PLACE, Board

_PART = struct.Struct("<d")


class UpdateProgress:
    """Counts of updates, and parts of norms, as one process of a server posts and reads them."""

    def __init__(self, board: Board, parameters: Sequence[str]) -> None:
        """`parameters`: the names of the parameters, in the same order in all processes."""
        self._board = board
        self._index = {name: index for index, name in enumerate(parameters)}
        self._issued = torch.zeros(len(parameters), dtype=torch.int64)
        self._done = torch.zeros_like(self._issued)
        self._norms = 0

    # ---- updates

    def count_issued(self, names: Sequence[str]) -> None:
        """Count an update of `names` that all processes will do; on the engine's thread."""
        self._issued[self._indices(names)] += 1

    def post_done(self, names: Sequence[str]) -> None:
        """Post that this process has updated its pieces of `names`; on the update thread."""
        indices = self._indices(names)
        self._done[indices] += 1
        for index in indices.tolist():
            self._board.write(VERSIONS_PLACE + NUMBER.size * index, NUMBER.pack(int(self._done[index])))

    def wait_done(self, names: Sequence[str] | None = None) -> None:
        """Wait until all other processes have done the issued updates of `names` (None: of all parameters)."""
        indices = self._indices(list(self._index) if names is None else names)
        issued = self._issued[indices]
        if len(indices):
            self._board.wait(lambda other: self._has_done(other, indices, issued), "updated its pieces of the weights")

    def _has_done(self, other: int, indices: Tensor, issued: Tensor) -> bool:
        if not len(indices):
            return True
        versions = self._board.read(other, VERSIONS_PLACE, NUMBER.size * len(self._index))
        done = torch.frombuffer(bytearray(versions), dtype=torch.int64)
        return bool((done[indices] >= issued).all())

    def _indices(self, names: Sequence[str]) -> Tensor:
        # Packs name buffers, too, that are swapped with their weights: these have no updates.
        return torch.tensor([self._index[name] for name in names if name in self._index], dtype=torch.int64)

    # ---- norms

    def next_norm_number(self) -> int:
        """Return the number of the next norm, the same in every process; on the engine's thread."""
        self._norms += 1
        return self._norms

    def post_norm_part(self, number: int, part: float) -> None:
        """Post this process's part of norm `number`; on the update thread."""
        place = self._norm_place(number)
        self._board.write(place + NUMBER.size, _PART.pack(part))
        self._board.write(place, NUMBER.pack(number))  # says that the part is there

    def norm_parts(self, number: int) -> list[float]:
        """Wait for the parts of norm `number` of all processes, and return them by rank."""
        place = self._norm_place(number)

        def is_there(other: int) -> bool:
            return bool(NUMBER.unpack(self._board.read(other, place, NUMBER.size))[0] == number)

        everyone = range(self._board.size)
        self._board.wait(is_there, "measured its part of the gradients", among=everyone)
        return [_PART.unpack(self._board.read(other, place + NUMBER.size, _PART.size))[0] for other in everyone]

    @staticmethod
    def _norm_place(number: int) -> int:
        return NORMS_PLACE + number % NORMS * NORM_BYTES
