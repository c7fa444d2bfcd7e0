"""Layer calls in slices: a micro-batch's rows taken through a layer a few at a time.

    micro-batch      0 1 2 3 4 5 6 7        what the loss is over, as the ds_config says
    forward          0 1 2 3 4 5 | 6 7      forward_rows = 6
    backward         0 1 2 | 3 4 5 | 6 7    backward_rows = 3, each recomputed and propagated through

A layer gets fewer rows at a time and so needs less working memory. The model's code between layers, and the loss, get the
outputs of the whole micro-batch, equal to those of a whole call up to the rounding of sums. `row_probe` finds out which
dimension of each tensor holds the rows, and which layers treat each row by itself. At the end: parts of a tensor along its
rows, one for each of several micro-batches that are joined, which know the whole that they are of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from harmony_ds.model.targets import GradientSum, GradientTarget, Targets
from harmony_ds.scheduler.rows import CallKind, RowDims, Rows


def slicing_of(asked: Rows, layer: int, kind: CallKind, tensors: list[Tensor], draws: bool = False) -> Slicing | None:
    """Return how a call of `layer` with `tensors` is sliced; None: not at all. `draws`: it draws random numbers."""
    dims = asked.dims.get(layer, {}).get(kind)
    if dims is None or not (asked.forward or asked.backward):
        return None
    where = dims.inputs[dims.counted_by]
    counter = tensors[dims.counted_by]
    if where is None or where >= counter.dim():
        return None
    rows = counter.shape[where]
    held = [(tensor, dim) for tensor, dim in zip(tensors, dims.inputs, strict=True) if dim is not None]
    if rows == 0 or not all(dim < tensor.dim() and tensor.shape[dim] % rows == 0 for tensor, dim in held):
        return None
    draws = draws or layer in asked.drawing
    forward, backward = asked.forward * dims.per_row, asked.backward * dims.per_row
    found = Slicing(dims, rows, (backward if draws else forward) or rows, backward or rows, draws)
    return found if min(found.forward, found.backward) < rows else None


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Rows `begin` to `end` (exclusive) of `of`."""

    begin: int
    end: int
    of: int

    @property
    def is_first(self) -> bool:
        return self.begin == 0

    def narrow(self, tensor: Tensor, dim: int | None) -> Tensor:
        """Return the part of `tensor` with these rows, which are in dimension `dim` (None: all rows share it)."""
        if dim is None:
            return tensor
        width = tensor.shape[dim] // self.of
        return tensor.narrow(dim, self.begin * width, (self.end - self.begin) * width)


Piece = tuple[list[Tensor], Targets, list[Tensor | None]]
"""Inputs of a slice in backward, the targets of their gradients, and the gradients of its outputs."""


@dataclass(frozen=True, slots=True)
class Slicing:
    """Slices of one call: of its `rows`, at most `forward` or `backward` at a time; `draws`: random numbers."""

    dims: RowDims
    rows: int
    forward: int
    backward: int
    draws: bool = False

    def slices(self, size: int) -> Iterator[RowSlice]:
        """Yield slices of `size` rows from the first row to the last; the last slice may be smaller."""
        for begin in range(0, self.rows, size):
            yield RowSlice(begin, min(begin + size, self.rows), self.rows)

    def propagated(
        self,
        tensors: Sequence[Tensor],
        targets: Targets,
        gradients: Sequence[Tensor | None],
        bring: Callable[[list[Tensor]], list[Tensor]],
        parts: Iterable[RowSlice],
    ) -> Iterator[Piece]:
        """Yield the slices of a backward pass; in the end, hand the gradients of whole inputs to `targets`.

        Args:
            bring: of parts of `tensors`, returns them on the device.
            parts: the slices to run.
        """
        split = [
            SliceTarget(target, tensor, dim) if target is not None and dim is not None else target
            for target, tensor, dim in zip(targets, tensors, self.dims.inputs, strict=True)
        ]
        parts_of_targets = [target for target in split if isinstance(target, SliceTarget)]
        for part in parts:
            for target in parts_of_targets:
                target.part = part
            yield bring(self.inputs_of(part, tensors)), split, self.gradients_of(part, gradients)
        for target in parts_of_targets:
            target.finish()

    def share_of(self, nbytes: int, dim: int | None) -> int:
        """Return the bytes of the largest slice, in backward, of a tensor of `nbytes` whose rows are in `dim`."""
        return nbytes if dim is None else nbytes // self.rows * min(self.backward, self.rows)

    def inputs_of(self, part: RowSlice, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [part.narrow(tensor, dim) for tensor, dim in zip(tensors, self.dims.inputs, strict=True)]

    def gradients_of(self, part: RowSlice, gradients: Iterable[Tensor | None]) -> list[Tensor | None]:
        """Return the rows of `part` of the output gradients; one that all rows share belongs to the first slice."""
        return [
            None if gradient is None or (dim is None and not part.is_first) else part.narrow(gradient, dim)
            for gradient, dim in zip(gradients, self.dims.outputs, strict=True)
        ]


class SliceAssembler:
    """Assembles the output leaves of a call from those of its slices."""

    def __init__(self, slicing: Slicing, inputs: Sequence[Tensor]) -> None:
        self._slicing = slicing
        self._inputs = inputs
        self.leaves: list[Any] = []

    def add(self, part: RowSlice, inputs: Sequence[Tensor], leaves: Sequence[Any]) -> None:
        """Copy the output `leaves` of one slice, run with `inputs`, to their rows."""
        returned = {id(tensor): place for place, tensor in enumerate(inputs)}
        dims = iter(self._slicing.dims.outputs)
        first_of: dict[int, int] = {}  # a tensor may be a result several times
        for place, leaf in enumerate(leaves):
            dim = next(dims) if isinstance(leaf, Tensor) else None
            first = first_of.setdefault(id(leaf), place) if dim is not None else place
            if part.is_first:
                self.leaves.append(self._begin(leaf, dim, returned) if first == place else self.leaves[first])
            if isinstance(leaf, Tensor) and dim is not None and id(leaf) not in returned:
                part.narrow(self.leaves[place].detach(), dim).copy_(leaf.detach())

    def _begin(self, leaf: Any, dim: int | None, returned: Mapping[int, int]) -> Any:
        if id(leaf) in returned:
            return self._inputs[returned[id(leaf)]]
        if not isinstance(leaf, Tensor) or dim is None:
            return leaf
        shape = list(leaf.shape)
        shape[dim] = shape[dim] // min(self._slicing.forward, self._slicing.rows) * self._slicing.rows
        return torch.empty(shape, dtype=leaf.dtype, device=leaf.device).requires_grad_(leaf.requires_grad)


class SliceTarget(GradientSum):
    """The gradient of a whole input, assembled from those of its slices when a call is propagated through in slices."""

    __slots__ = ("_dim", "_whole", "part")

    def __init__(self, whole: GradientTarget, tensor: Tensor, dim: int) -> None:
        super().__init__(tensor)
        self._whole = whole
        self._dim = dim
        self.part: RowSlice | None = None  # the slice that is propagated through

    def add(self, gradient: Tensor) -> None:
        assert self.part is not None
        if self.gradient is None:
            self.gradient = torch.zeros(self.shape, dtype=gradient.dtype, device=gradient.device)
        self.part.narrow(self.gradient, self._dim).add_(gradient)

    def finish(self) -> None:
        """Hand the gradient of the whole input to its own target, after the last slice."""
        gradient = self.pop()
        if gradient is not None:
            self._whole.add(gradient)


TensorShapes = Sequence[torch.Size]


def row_dims(
    few: tuple[TensorShapes, TensorShapes], more: tuple[TensorShapes, TensorShapes], rows: tuple[int, int]
) -> RowDims | None:
    """Find the row dimensions from two calls of one layer with different numbers of rows; None: they are not clear.

    Args:
        few, more: the shapes of inputs and of outputs in either call.
        rows: the numbers of rows of the micro-batches. A call may have several times as many: of inputs that the model
            has joined, or tokens.
    """
    if [len(shapes) for shapes in few] != [len(shapes) for shapes in more]:
        return None
    inputs = [_row_dim(a, b, rows) for a, b in zip(few[0], more[0], strict=True)]
    outputs = [_row_dim(a, b, rows) for a, b in zip(few[1], more[1], strict=True)]
    if _UNCLEAR in (*inputs, *outputs):
        return None
    growing = [(few[0][i][dim], i) for i, dim in enumerate(inputs) if dim is not None]
    if not growing:
        return None
    count, counting = min(growing)
    several = [
        shape[dim] for shape, dim in zip((*few[0], *few[1]), (*inputs, *outputs), strict=True) if dim is not None
    ]
    if any(length % count for length in several):
        return None
    return RowDims(tuple(inputs), tuple(outputs), counting, count // rows[0])


_UNCLEAR = -1


def _row_dim(few: torch.Size, more: torch.Size, rows: tuple[int, int]) -> int | None:
    """Return the one dimension that grows with the rows; None: none grows; _UNCLEAR: several do, or out of proportion."""
    if few == more:
        return None
    growing = [dim for dim, (a, b) in enumerate(zip(few, more, strict=False)) if a != b]
    if len(few) != len(more) or len(growing) != 1:
        return _UNCLEAR
    dim = growing[0]
    return dim if few[dim] * rows[1] == more[dim] * rows[0] and few[dim] % rows[0] == 0 else _UNCLEAR


_PART = "_harmony_part"
_PARTS = "_harmony_parts"


@dataclass(frozen=True, slots=True)
class _SlicePlace:
    """Place of a tensor in `whole`; `version`: of the tensor when it was made; `all`: the parts, not kept alive."""

    whole: Tensor
    number: int
    count: int
    dim: int
    version: int
    all: Sequence[ref[Tensor]]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # copies and pickles of a part are parts of nothing


def parts_of(whole: Tensor, dim: int, count: int) -> list[Tensor]:
    """Split `whole` into `count` equal parts along `dim`."""
    parts = list(whole.split(whole.shape[dim] // count, dim))
    _note(parts, whole, dim)
    setattr(whole, _PARTS, [ref(part) for part in parts])
    return parts


def whole_of(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Join `parts` along `dim`: without a copy if they are parts of one tensor, or were joined before, and unchanged."""
    known = [_part(part) for part in parts]
    whole = None if known[0] is None or (known[0].count, known[0].dim) != (len(parts), dim) else known[0].whole
    in_order = all(one is not None and one.whole is whole and one.number == n for n, one in enumerate(known))
    if whole is None or not in_order:
        whole = torch.cat(list(parts), dim)
        _note(parts, whole, dim)
    return whole


def _note(parts: Sequence[Tensor], whole: Tensor, dim: int) -> None:
    refs = [ref(part) for part in parts]
    for number, part in enumerate(parts):
        setattr(part, _PART, _SlicePlace(whole, number, len(parts), dim, part._version, refs))


def whole_over(tensor: Tensor) -> list[Tensor]:
    """Return the whole whose memory `tensor` has a part of, if the engine has made it so; else nothing."""
    part: _SlicePlace | None = getattr(tensor, _PART, None)
    if part is None or part.whole.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
        return []
    return [part.whole]


def parts_over(whole: Tensor) -> list[Tensor]:
    """Return the parts that the engine has made of `whole`, over its memory, and that are alive."""
    made: list[ref[Tensor]] = getattr(whole, _PARTS, [])
    return [part for one in made if (part := one()) is not None]


def parts_moved(tensor: Tensor, move: Callable[[Tensor], Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the whole's parts that are alive, if `tensor` is one, each with its counterpart in what `move` makes of the
    whole; nothing if it is no part.
    """
    part = _part(tensor)
    if part is None:
        return []
    made = parts_of(move(part.whole), part.dim, part.count)
    return [(own, other) for one, other in zip(part.all, made, strict=True) if (own := one()) is not None]


def _part(tensor: Tensor) -> _SlicePlace | None:
    part: _SlicePlace | None = getattr(tensor, _PART, None)
    # Through a hook the gradient has to pass the part itself.
    watched = tensor._backward_hooks or tensor.retains_grad
    return part if part is not None and part.version == tensor._version and not watched else None
