"""The layer graph: the layers of a model, their parameters, and the order in which a forward pass calls the layers."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter, by its first name in the model (tied parameters have one spec).

    Attributes:
        state_bytes: device bytes of its master and optimizer state, where it is updated on the device.
        update_bytes: further device bytes during its update there.
        stored_bytes: of a packed parameter, a frozen one that travels as the bytes it is stored in (quantized weights); a
            multiple of `ALIGNMENT_BYTES`. None: its elements have the compute dtype.
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool
    state_bytes: int = 0
    update_bytes: int = 0
    stored_bytes: int | None = None

    def weight_bytes(self, itemsize: int) -> int:
        """Return its bytes in a slab and on the link, where elements of the compute dtype have `itemsize` bytes."""
        return slab_bytes(self.numel, itemsize) if self.stored_bytes is None else self.stored_bytes

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
    `uncalled` are those that are trained but not used by the model; the program's own backward passes may reach them.
    """

    layers: tuple[LayerSpec, ...]
    parameters: tuple[ParameterSpec, ...]
    calls: tuple[int, ...]
    unlayered: tuple[str, ...]
    uncalled: tuple[str, ...] = ()

    def parameter(self, name: str) -> ParameterSpec:
        return next(spec for spec in self.parameters if spec.name == name)


def merge_calls(known: tuple[int, ...], seen: tuple[int, ...]) -> tuple[int, ...]:
    """Return a call order of which both `known` and `seen` are subsequences.

    Layers may be skipped at random (LayerDrop) or depending on data, each by some micro-batches. Where the two orders
    differ, layers are in the order of their indices if both orders agree with that.
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
    """Return the earliest positions in `order` of the elements of its subsequence `calls`."""
    positions: list[int] = []
    cursor = 0
    for layer in calls:
        cursor = order.index(layer, cursor) + 1
        positions.append(cursor - 1)
    return tuple(positions)


ALIGNMENT_BYTES = 64
"""Parameters start at multiples of this in a slab, as in torch's own allocations: alignment decides which code paths of
kernels run, and so how they round."""

_PIECE_GRAIN = 128
"""Elements."""


def piece_of(numel: int, rank: int, size: int) -> slice:
    """Return the elements of a tensor that belong to `rank`: whole grains, which hold whole SIMD vectors.

    Compiled optimizers round elements that do not fill a vector differently.
    """
    grains = -(-numel // _PIECE_GRAIN)
    start, stop = (min(numel, r * grains // size * _PIECE_GRAIN) for r in (rank, rank + 1))
    return slice(start, stop)


def share_of(numel: int, size: int) -> int:
    """Return how many elements of a pack's weights each of `size` devices swaps in for all; each swaps in the rest."""
    return numel // (size * _PIECE_GRAIN) * _PIECE_GRAIN


def slab_bytes(numel: int, itemsize: int) -> int:
    """Return the bytes of one parameter in a slab and on the link, rounded up to the alignment."""
    return -(-numel * itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
