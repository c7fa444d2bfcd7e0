"""Rows of any shape, cut in any way: slices cover them once, in order, and what is put together is the whole."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from harmony_ds.model.slices import RowSlice, SliceAssembler, Slicing, row_dims, slicing_of
from harmony_ds.scheduler.rows import RowDims, Rows


@dataclass(frozen=True)
class Kind:
    """How a tensor depends on the rows: `lengths` but in dimension `dim` (None: in none), which is `width` per row."""

    lengths: tuple[int, ...]
    dim: int | None
    width: int

    def shape(self, rows: int) -> torch.Size:
        lengths = list(self.lengths)
        if self.dim is not None:
            lengths[self.dim] = self.width * rows
        return torch.Size(lengths)

    def tensor(self, rows: int) -> Tensor:
        """No two elements are equal."""
        shape = self.shape(rows)
        return torch.arange(shape.numel(), dtype=torch.float32).reshape(shape)


@st.composite
def kinds(draw: st.DrawFn, has_rows: bool | None = None) -> Kind:
    lengths = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    held = draw(st.booleans()) if has_rows is None else has_rows
    dim = draw(st.integers(0, len(lengths) - 1)) if held else None
    return Kind(lengths, dim, draw(st.integers(1, 3)))


COUNTING = kinds(has_rows=True).map(lambda kind: Kind(kind.lengths, kind.dim, 1))
SIDES = st.tuples(COUNTING, st.lists(kinds(), max_size=3), st.lists(kinds(), max_size=3))
ROWS = st.integers(1, 7)
SIZES = st.integers(1, 8)


def dims_of(inputs: list[Kind], outputs: list[Kind]) -> RowDims:
    counting = next(i for i, kind in enumerate(inputs) if kind.dim is not None and kind.width == 1)
    return RowDims(tuple(k.dim for k in inputs), tuple(k.dim for k in outputs), counting)


def shapes(kinds_of_one_side: list[Kind], rows: int) -> list[torch.Size]:
    return [kind.shape(rows) for kind in kinds_of_one_side]


@given(SIDES, st.integers(1, 5))
def test_rows_are_found_where_they_are(sides: tuple[Kind, list[Kind], list[Kind]], few: int) -> None:
    first, more_inputs, outputs = sides
    inputs = [*more_inputs, first]
    found = row_dims(
        (shapes(inputs, few), shapes(outputs, few)), (shapes(inputs, few + 1), shapes(outputs, few + 1)), (few, few + 1)
    )
    assert found == dims_of(inputs, outputs)


@pytest.mark.parametrize(
    ("few", "more"),
    [((2, 4), (3, 5)), ((2, 4), (4, 4)), ((2, 5), (2, 6)), ((2,), (3, 1))],
    ids=["two grow", "by two rows", "by something else", "another dimension"],
)
def test_one_tensor_that_grows_otherwise_is_enough_to_tell_nothing(few: tuple[int, ...], more: tuple[int, ...]) -> None:
    rest = [torch.Size([2])], [torch.Size([3])]
    assert row_dims(([*rest[0], torch.Size(few)], []), ([*rest[1], torch.Size(more)], []), (2, 3)) is None
    assert row_dims((rest[0], [torch.Size(few)]), (rest[1], [torch.Size(more)]), (2, 3)) is None


def test_a_call_may_have_several_rows_for_each_of_the_micro_batch() -> None:
    """Two inputs joined along the rows, and a mask of all their tokens in one dimension."""
    few, more = [torch.Size([4, 5]), torch.Size([20])], [torch.Size([6, 5]), torch.Size([30])]
    assert row_dims((few, few[:1]), (more, more[:1]), (2, 3)) == RowDims((0, 0), (0,), 0, per_row=2)
    halves = [torch.Size([2, 5])], [torch.Size([3, 5])]  # an output of both inputs together
    assert row_dims((few, halves[0]), (more, halves[1]), (2, 3)) is None


def test_a_call_that_is_given_nothing_with_rows_is_not_cut() -> None:
    assert row_dims(([torch.Size([4])], [torch.Size([2])]), ([torch.Size([4])], [torch.Size([3])]), (2, 3)) is None


@given(st.lists(kinds(), min_size=1, max_size=3), ROWS, SIZES)
def test_what_slices_give_is_put_together_as_the_whole(outputs: list[Kind], rows: int, size: int) -> None:
    cut = Slicing(RowDims((), tuple(kind.dim for kind in outputs), 0), rows, size, size)
    whole = [kind.tensor(rows) for kind in outputs]
    together = SliceAssembler(cut, [])
    assert all(part.end - part.begin == size for part in [*cut.slices(size)][:-1])
    for part in cut.slices(size):
        together.add(part, [], [*_part(cut, part, whole), "said"])
    assert together.leaves[-1] == "said"
    for found, expected in zip(together.leaves, whole, strict=False):
        assert torch.equal(found, expected)


def _part(cut: Slicing, part: RowSlice, tensors: list[Tensor]) -> list[Tensor]:
    return [part.narrow(t, dim).clone() for t, dim in zip(tensors, cut.dims.outputs, strict=True)]


class Sum:
    """A target."""

    def __init__(self) -> None:
        self.gradient: Tensor | None = None
        self.adds = 0

    def add(self, gradient: Tensor) -> None:
        self.adds += 1
        self.gradient = gradient if self.gradient is None else self.gradient + gradient

    def take(self) -> Tensor | None:
        raise AssertionError("nobody takes it here")


@given(st.lists(kinds(), min_size=1, max_size=3), ROWS, SIZES)
def test_gradients_of_slices_are_the_gradient_of_the_whole(inputs: list[Kind], rows: int, size: int) -> None:
    """Of x * x: what all rows share gets its gradient from the first slice alone, as it is handed on."""
    dims = tuple(kind.dim for kind in inputs)
    cut = Slicing(RowDims(dims, dims, 0), rows, size, size)
    tensors = [kind.tensor(rows) for kind in inputs]
    gradients = [torch.ones_like(t) for t in tensors]
    targets = [Sum() for _ in inputs]
    for parts, own, given_here in cut.propagated(tensors, targets, gradients, list, cut.slices(cut.backward)):
        for target, part, gradient in zip(own, parts, given_here, strict=True):
            if gradient is not None and target is not None:
                target.add(2 * part * gradient)
    for one, tensor in zip(targets, tensors, strict=True):
        assert one.gradient is not None
        assert torch.equal(one.gradient, 2 * tensor)
        assert one.adds == 1


@given(COUNTING, st.lists(kinds(), max_size=2), ROWS, st.integers(0, 8), st.integers(0, 8), st.booleans())
def test_a_call_is_cut_as_asked_for_and_only_if_that_changes_anything(
    counting: Kind, others: list[Kind], rows: int, forward: int, backward: int, draws: bool
) -> None:
    inputs = [counting, *others]
    asked = Rows(forward, backward, {3: {(0,): dims_of(inputs, [])}}, {3} if draws else set())
    cut = slicing_of(asked, 3, (0,), [kind.tensor(rows) for kind in inputs])
    assert cut == slicing_of(
        Rows(forward, backward, asked.dims), 3, (0,), [kind.tensor(rows) for kind in inputs], draws
    )
    sizes = ((backward if draws else forward) or rows, backward or rows)
    if min(sizes) >= rows:
        assert cut is None
    else:
        assert cut is not None
        assert (cut.rows, cut.forward, cut.backward) == (rows, *sizes)
    assert slicing_of(asked, 2, (0,), [kind.tensor(rows) for kind in inputs]) is None
