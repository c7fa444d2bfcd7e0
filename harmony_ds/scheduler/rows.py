"""The places of a micro-batch's rows in the tensors of layer calls, and how many are taken through a layer at a time."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RowDims:
    """The places of rows in the tensors of one layer's calls.

    Attributes:
        inputs, outputs: per tensor the dimension that holds the rows; None where all rows share the tensor.
        counted_by: the input whose dimension is as long as the call has rows (another's may be a multiple: tokens of all
            rows in one dimension).
        per_row: how many rows the call has for each row of the micro-batch: 2 where forward joins two inputs.
    """

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    counted_by: int
    per_row: int = 1


CallKind = tuple[tuple[int, ...], tuple[tuple[int, object], ...]]
"""What calls of a layer have in common that treat rows in the same way: the numbers of the arguments that are tensors (with
a mask a call is of another kind than without), and the flags and words among the others, by their numbers."""


@dataclass(frozen=True, slots=True)
class Rows:
    """How layer calls are cut: a result of measuring.

    Attributes:
        forward, backward: the most rows of a slice in either pass, counted in rows of the micro-batch; 0: as many as there
            are.
        dims: by layer and kind of call; calls that are not among them are never cut.
        drawing: layers that draw random numbers. Their slices are the same in both passes, so that a recomputation
            draws what the forward pass drew.
        code_between_draws: whether the code between layer calls draws random numbers.
        from_host: whether calls take their inputs from the host in backward, see `Policy.slices_from_host`.
    """

    forward: int = 0
    backward: int = 0
    dims: Mapping[int, Mapping[CallKind, RowDims]] = field(default_factory=dict)
    drawing: Set[int] = frozenset()
    code_between_draws: bool = False
    from_host: bool = False

    @property
    def cuts(self) -> bool:
        """Whether any call may be cut."""
        return bool(self.dims) and bool(self.forward or self.backward)

    @property
    def keep_no_graph(self) -> bool:
        """Whether the fused pack is recomputed as the others are: its graph would take what slices, or the host, save."""
        return self.cuts or self.from_host


WHOLE_CALLS = Rows()
