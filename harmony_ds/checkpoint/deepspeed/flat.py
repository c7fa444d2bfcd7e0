"""Flat groups: DeepSpeed's way of keeping many parameters in one vector, cut over processes.

ZeRO-1, 2   a group's parameters one after another (each maybe padded), the whole padded and cut into equal parts
ZeRO-3      each parameter cut into equal parts, the last one padded; a process has its parts one after another
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harmony_ds.checkpoint.snapshot import Source
from harmony_ds.errors import CheckpointError

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Shares:
    """A vector that processes hold one part of each."""

    parts: tuple[Tensor, ...]

    def cut(self, start: int, stop: int) -> list[Tensor]:
        """Views that elements `start` to `stop` are made of."""
        pieces = []
        for part in self.parts:
            if start < part.numel() and stop > 0 and stop > start:
                pieces.append(part[max(start, 0) : min(stop, part.numel())])
            start, stop = start - part.numel(), stop - part.numel()
        return pieces


def split_in_order(shapes: Shapes, paddings: Sequence[int] | None, vector: Shares, where: str) -> dict[str, Source]:
    """Parameters of a group of ZeRO-1 or 2.

    Raises:
        CheckpointError: the vector is too short.
    """
    found: dict[str, Source] = {}
    offset = 0
    for place, (name, shape) in enumerate(shapes.items()):
        stop = offset + math.prod(shape)
        found[name] = _joined(vector.cut(offset, stop), shape, f"{where} of {name}")
        offset = stop + (paddings[place] if paddings else 0)
    return found


def split_each(shapes: Shapes, vector: Shares, where: str) -> dict[str, Source]:
    """Parameters of a group of ZeRO-3.

    Raises:
        CheckpointError: a process's part is too short.
    """
    found: dict[str, Source] = {}
    offset = 0
    count = len(vector.parts)
    for name, shape in shapes.items():
        numel = math.prod(shape)
        share = -(-numel // count)
        pieces = []
        for rank, part in enumerate(vector.parts):
            own = max(0, min(share, numel - rank * share))
            pieces.append(part[offset : offset + own])
        found[name] = _joined(pieces, shape, f"{where} of {name}")
        offset += share
    return found


def _joined(pieces: Sequence[Tensor], shape: Sequence[int], what: str) -> Source:
    numel = math.prod(shape)
    have = sum(piece.numel() for piece in pieces)
    if have != numel:
        raise CheckpointError(f"the {what} has {have} elements instead of {numel}.")
    dtype = pieces[0].dtype if pieces else torch.float32

    def read() -> Tensor:
        whole = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
        return whole.detach().view(tuple(shape))

    return Source(tuple(shape), dtype, read)
