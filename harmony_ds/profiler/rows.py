"""The places of a micro-batch's rows in the tensors of layer calls, and how many are taken through a layer at a time."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RowDims:
    """The places of rows in the tensors of one layer's calls.

    Attributes:
        inputs, outputs: per tensor the dimension that holds the rows; None where all rows share the tensor.
        places: of each input, where it first stands among all arguments; empty: not known.
        counted_by: an input whose dimension is as long as there are rows (another's may be a multiple: tokens of all
            rows in one dimension).
    """

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    counted_by: int
    places: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Rows:
    """How layer calls are cut: a result of measuring.

    Attributes:
        forward, backward: the most rows of a slice in either pass; 0: as many as there are.
        dims: by layer; a layer that is not among them is never cut.
        drawing: layers that draw random numbers. Their slices are the same in both passes, so that a recomputation
            draws what the forward pass drew.
    """

    forward: int = 0
    backward: int = 0
    dims: Mapping[int, RowDims] = field(default_factory=dict)
    drawing: Set[int] = frozenset()

    @property
    def cuts(self) -> bool:
        """Whether any call may be cut."""
        return bool(self.dims) and bool(self.forward or self.backward)


WHOLE_CALLS = Rows()
