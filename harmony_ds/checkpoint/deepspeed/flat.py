"""What a ZeRO stage keeps where, for who reads and who writes it: many parameters in one vector, cut over processes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harmony_ds.checkpoint.snapshot import Source
from harmony_ds.errors import CheckpointError

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class ZeroForm:
    """How a stage keeps an optimizer in its *_optim_states.pt.

    Attributes:
        stage: DeepSpeed's name for it.
        base: the key of torch's state dict, to which a vector is one parameter.
        flat: the key of the vectors' fp32 values.
        alignment: elements that states are padded to a multiple of.
        cut_each: each parameter is cut into equal parts, the last one padded, and a process has its parts one after
            another; otherwise parameters (each maybe padded) lie one after another, and the whole is padded and cut.
    """

    stage: str
    base: str
    flat: str
    alignment: int
    cut_each: bool = False

    def split(
        self, shapes: Shapes, paddings: Sequence[int] | None, vectors: Iterable[Tensor], what: str
    ) -> dict[str, Source]:
        """The parameters in a vector of which each process has one part.

        Raises:
            CheckpointError: it is too short.
        """
        parts = tuple(vectors)
        found: dict[str, Source] = {}
        offset = 0
        for place, (name, shape) in enumerate(shapes.items()):
            numel = math.prod(shape)
            if self.cut_each:
                share = -(-numel // len(parts))
                pieces = [part[offset : offset + _own(rank, share, numel)] for rank, part in enumerate(parts)]
                offset += share
            else:
                pieces = _cut(parts, offset, offset + numel)
                offset += numel + (paddings[place] if paddings else 0)
            found[name] = _joined(pieces, shape, f"{what} of {name}")
        return found

    def part(self, numels: Sequence[int], vector: Tensor, rank: int, count: int) -> tuple[Tensor, int]:
        """What one of `count` processes has of a vector of parameters one after another, and how many elements at its end
        are padding.
        """
        if self.cut_each:
            whole = vector.split(list(numels))
            return torch.cat([_share(one, -(-one.numel() // count), rank) for one in whole]), 0
        length = -(-vector.numel() // (self.alignment * count)) * self.alignment
        own = _share(vector, length, rank)
        return own, length - _own(rank, length, vector.numel())


ZERO2 = ZeroForm("gradients", "base_optimizer_state", "single_partition_of_fp32_groups", alignment=2)
"""And ZeRO-1."""
ZERO3 = ZeroForm("weights", "optimizer_state_dict", "fp32_flat_groups", alignment=1, cut_each=True)


def _cut(parts: Iterable[Tensor], start: int, stop: int) -> list[Tensor]:
    """Views that elements `start` to `stop` are made of, of a vector that processes hold one part of each."""
    pieces = []
    for part in parts:
        if start < part.numel() and stop > 0 and stop > start:
            pieces.append(part[max(start, 0) : min(stop, part.numel())])
        start, stop = start - part.numel(), stop - part.numel()
    return pieces


def _own(rank: int, share: int, numel: int) -> int:
    """How many of `numel` elements one process has, which are cut into equal shares."""
    return max(0, min(share, numel - rank * share))


def _share(vector: Tensor, length: int, rank: int) -> Tensor:
    """The elements of one process, with zeros behind the last ones."""
    own = vector[rank * length : (rank + 1) * length]
    return torch.cat([own, own.new_zeros(length - own.numel())])


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
