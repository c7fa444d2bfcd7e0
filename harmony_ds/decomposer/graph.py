"""What the decomposer hands on: the layers of a model and the order in which one forward pass calls them. Pure data."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter, under the first name by which the model knows it (tied parameters have one spec).

    Attributes:
        state_bytes: device bytes of its master and its optimizer state, where it is updated on the device.
        update_bytes: device bytes that its update takes there beside them.
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool
    state_bytes: int = 0
    update_bytes: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The smallest unit that is swapped and run: one module call's worth of parameters."""

    index: int
    name: str
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """Layers, parameters, and the call order: `calls[position]` is the index of the layer called there.

    A layer may be called at several positions (weights shared in depth). `unlayered` are the parameters that no layer
    call covers (bare parameters of containers, parameters read between layers): they stay on the device during a step.
    `uncalled` are those that are trained but not used by the model: backward passes of the program's own may reach them.
    """

    layers: tuple[LayerSpec, ...]
    parameters: tuple[ParameterSpec, ...]
    calls: tuple[int, ...]
    unlayered: tuple[str, ...]
    uncalled: tuple[str, ...] = ()

    def parameter(self, name: str) -> ParameterSpec:
        return next(spec for spec in self.parameters if spec.name == name)

    def layer_at(self, position: int) -> LayerSpec:
        return self.layers[self.calls[position]]


def merge_calls(known: tuple[int, ...], seen: tuple[int, ...]) -> tuple[int, ...]:
    """A call order of which both `known` and `seen` are subsequences.

    Layers may be skipped at random (LayerDrop) or by data; whatever one micro-batch skipped, another one may call.
    Where the two orders differ, layers keep the order of their indices if both sides do.
    """
    merged: list[int] = []
    for kind, i1, i2, j1, j2 in difflib.SequenceMatcher(None, known, seen, autojunk=False).get_opcodes():
        left, right = list(known[i1:i2]), list(seen[j1:j2])
        if kind == "equal":
            merged += left
        elif left == sorted(left) and right == sorted(right):
            merged += sorted(left + right)
        else:
            merged += left + right
    return tuple(merged)


def positions_of(calls: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """For a subsequence `calls` of `order`: the earliest position in `order` of each of its elements."""
    positions: list[int] = []
    cursor = 0
    for layer in calls:
        cursor = order.index(layer, cursor) + 1
        positions.append(cursor - 1)
    return tuple(positions)


ALIGNMENT_BYTES = 64
"""Parameters start at multiples of this inside a slab, as they do when torch allocates them one by one: kernels choose
other code paths, and so other roundings, for memory aligned differently."""


_PIECE_GRAIN = 128
"""Elements."""


def piece_of(numel: int, rank: int, size: int) -> slice:
    """The elements of a tensor that belong to `rank`: whole grains, so that vectors of numbers are not cut.

    Compiled optimizers round the last numbers of what they step, which fill no vector, otherwise than the others.
    """
    grains = -(-numel // _PIECE_GRAIN)
    return slice(
        min(numel, rank * grains // size * _PIECE_GRAIN), min(numel, (rank + 1) * grains // size * _PIECE_GRAIN)
    )


def share_of(numel: int, size: int) -> int:
    """How many elements of a pack's weights each of `size` devices swaps in for all; what is left over, each one does."""
    return numel // (size * _PIECE_GRAIN) * _PIECE_GRAIN


def slab_bytes(numel: int, itemsize: int) -> int:
    """Bytes that one parameter takes in a slab, and on the link: its own, rounded up to the alignment."""
    return -(-numel * itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
