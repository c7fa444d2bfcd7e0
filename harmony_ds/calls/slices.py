"""Layer calls in slices: a micro-batch's rows taken through a layer a few at a time.

    micro-batch      0 1 2 3 4 5 6 7        what the loss is over, as the ds_config says
    forward          0 1 2 3 4 5 | 6 7      forward_rows = 6
    backward         0 1 2 | 3 4 5 | 6 7    backward_rows = 3, each recomputed and propagated through

A layer sees fewer rows at a time and so needs less working memory; the model's own code between layers, and the loss,
see the whole micro-batch, and what reaches them is what an uncut call would have given, up to the rounding of sums.
Where a tensor holds the rows, and whether a layer treats each row by itself, is found out by `row_probe`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harmony_ds.calls.targets import GradientSum, GradientTarget
from harmony_ds.profiler.rows import RowDims, Rows


def slicing_of(asked: Rows, layer: int, tensors: Sequence[Tensor], draws: bool = False) -> Slicing | None:
    """How a call of `layer` with `tensors` is cut; None: not at all. `draws`: it was seen to draw since."""
    dims = asked.dims.get(layer)
    if dims is None or not (asked.forward or asked.backward) or len(dims.inputs) != len(tensors):
        return None
    where = dims.inputs[dims.counted_by]
    counter = tensors[dims.counted_by]
    if where is None or where >= counter.dim():
        return None
    rows = counter.shape[where]
    if rows == 0 or not all(_holds(t, d, rows) for t, d in zip(tensors, dims.inputs, strict=True)):
        return None
    draws = draws or layer in asked.drawing
    cut = Slicing(dims, rows, (asked.backward if draws else asked.forward) or rows, asked.backward or rows, draws)
    return cut if min(cut.forward, cut.backward) < rows else None


def _holds(tensor: Tensor, dim: int | None, rows: int) -> bool:
    return dim is None or (dim < tensor.dim() and tensor.shape[dim] % rows == 0)


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Rows `first` to `last` (exclusive) of `of`."""

    first: int
    last: int
    of: int

    def narrow(self, tensor: Tensor, dim: int | None) -> Tensor:
        """The part of `tensor` with these rows."""
        if dim is None:
            return tensor
        width = tensor.shape[dim] // self.of
        return tensor.narrow(dim, self.first * width, (self.last - self.first) * width)


Piece = tuple[list[Tensor], list[GradientTarget | None], list[Tensor | None]]
"""Inputs of a run in a backward pass, their targets, and gradients of its outputs."""


@dataclass(frozen=True, slots=True)
class Slicing:
    """How one call is cut: `rows` of them, in slices of at most `forward` or `backward`; whether it draws at random."""

    dims: RowDims
    rows: int
    forward: int
    backward: int
    draws: bool = False

    def slices(self, size: int) -> Iterator[RowSlice]:
        """From the first row to the last; only the last slice may be smaller."""
        for first in range(0, self.rows, size):
            yield RowSlice(first, min(first + size, self.rows), self.rows)

    def propagated(
        self, tensors: Sequence[Tensor], targets: Sequence[GradientTarget | None], gradients: Sequence[Tensor | None]
    ) -> Iterator[Piece]:
        """Inputs, their targets, and gradients of outputs, slice by slice of a backward pass.

        What the targets of slices have gathered is handed to `targets` in the end.
        """
        split = [
            SliceTarget(target, tensor, dim) if target is not None and dim is not None else target
            for target, tensor, dim in zip(targets, tensors, self.dims.inputs, strict=True)
        ]
        own = [target for target in split if isinstance(target, SliceTarget)]
        for part in self.slices(self.backward):
            for target in own:
                target.part = part
            yield self.inputs_of(part, tensors), split, self.gradients_of(part, gradients)
        for target in own:
            target.finish()

    def inputs_of(self, part: RowSlice, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The rows of `part` of a call's inputs."""
        return [part.narrow(tensor, dim) for tensor, dim in zip(tensors, self.dims.inputs, strict=True)]

    def gradients_of(self, part: RowSlice, gradients: Iterable[Tensor | None]) -> list[Tensor | None]:
        """The rows of `part` of the gradients of a call's outputs; what all rows share is the first slice's."""
        return [
            None if gradient is None or (dim is None and part.first) else part.narrow(gradient, dim)
            for gradient, dim in zip(gradients, self.dims.outputs, strict=True)
        ]


class SliceAssembler:
    """Output leaves of a call, put together from those of its slices."""

    def __init__(self, cut: Slicing, inputs: Sequence[Tensor]) -> None:
        self._cut = cut
        self._inputs = inputs
        self.leaves: list[Any] = []

    def add(self, part: RowSlice, inputs: Sequence[Tensor], leaves: Sequence[Any]) -> None:
        """Takes what one piece gave."""
        returned = {id(tensor): place for place, tensor in enumerate(inputs)}
        dims = iter(self._cut.dims.outputs)
        first_of: dict[int, int] = {}  # a tensor may be a result several times
        for place, leaf in enumerate(leaves):
            dim = next(dims) if isinstance(leaf, Tensor) else None
            first = first_of.setdefault(id(leaf), place) if dim is not None else place
            if part.first == 0:
                self.leaves.append(self._begin(leaf, dim, returned) if first == place else self.leaves[first])
            if isinstance(leaf, Tensor) and dim is not None and id(leaf) not in returned:
                part.narrow(self.leaves[place].detach(), dim).copy_(leaf.detach())

    def _begin(self, leaf: Any, dim: int | None, returned: Mapping[int, int]) -> Any:
        if id(leaf) in returned:
            return self._inputs[returned[id(leaf)]]  # the model's own
        if not isinstance(leaf, Tensor) or dim is None:
            return leaf
        shape = list(leaf.shape)
        shape[dim] = shape[dim] // min(self._cut.forward, self._cut.rows) * self._cut.rows
        return torch.empty(shape, dtype=leaf.dtype, device=leaf.device).requires_grad_(leaf.requires_grad)


class SliceTarget(GradientSum):
    """Puts the gradient of an input together from those of its slices, for the target of the whole."""

    __slots__ = ("_dim", "_tensor", "_whole", "part")

    def __init__(self, whole: GradientTarget, tensor: Tensor, dim: int) -> None:
        super().__init__()
        self._whole = whole
        self._tensor = tensor
        self._dim = dim
        self.part: RowSlice | None = None
        """The one that is propagated through."""

    def add(self, gradient: Tensor) -> None:
        assert self.part is not None
        if self.gradient is None:
            self.gradient = torch.zeros(self._tensor.shape, dtype=gradient.dtype, device=gradient.device)
        self.part.narrow(self.gradient, self._dim).add_(gradient)

    def finish(self) -> None:
        """Hands the whole over."""
        gradient = self.take()
        if gradient is not None:
            self._whole.add(gradient)


# ---- finding the rows

Shapes = Sequence[torch.Size]


def row_dims(few: tuple[Shapes, Shapes], more: tuple[Shapes, Shapes], rows: tuple[int, int]) -> RowDims | None:
    """Where the rows are, from two calls of one layer with different numbers of rows; None where that cannot be told.

    Args:
        few, more: the shapes of inputs and of outputs in either call.
        rows: how many there were.
    """
    if [len(shapes) for shapes in few] != [len(shapes) for shapes in more]:
        return None
    inputs = [_row_dim(a, b, rows) for a, b in zip(few[0], more[0], strict=True)]
    outputs = [_row_dim(a, b, rows) for a, b in zip(few[1], more[1], strict=True)]
    counting = [i for i, dim in enumerate(inputs) if dim is not None and dim >= 0 and few[0][i][dim] == rows[0]]
    if _UNCLEAR in (*inputs, *outputs) or not counting:
        return None
    return RowDims(tuple(inputs), tuple(outputs), counting[0])


_UNCLEAR = -1


def _row_dim(few: torch.Size, more: torch.Size, rows: tuple[int, int]) -> int | None:
    """The one dimension that grows with the rows; None if none does; _UNCLEAR if more do, or by something else."""
    if few == more:
        return None
    growing = [dim for dim, (a, b) in enumerate(zip(few, more, strict=False)) if a != b]
    if len(few) != len(more) or len(growing) != 1:
        return _UNCLEAR
    dim = growing[0]
    return dim if few[dim] * rows[1] == more[dim] * rows[0] and few[dim] % rows[0] == 0 else _UNCLEAR
