"""Finds out which layers can be cut into slices of a micro-batch's rows, and where their tensors hold the rows.

The model is run twice, with a few rows and with one more. What grows with the rows holds them. Then each layer is run
in slices on what it was given, and must give what it gave as a whole: a layer whose rows look at each other (batch
normalization, capacities of experts) does not, and is never cut.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.calls.held import held
from harmony_ds.calls.intercept import Request
from harmony_ds.calls.random_streams import differ
from harmony_ds.calls.slices import Cut, Shapes, row_dims
from harmony_ds.calls.trees import map_tensors, tensors_in
from harmony_ds.measuring.passes import Passes, Setup
from harmony_ds.measuring.sample import Sample
from harmony_ds.offload.residency import DeviceCopy, Leaves
from harmony_ds.profiler.rows import RowDims, Rows

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Of the largest value: sums over other blocks round differently, rows that look at each other are far off."""
_PIECE = 2**20
"""Elements that are compared at once: in double precision, and in several copies, outputs take what a step does not."""


@dataclass(slots=True)
class Found:
    """What can be cut, and why the rest cannot.

    Attributes:
        dims: by layer.
        drawing: layers that draw random numbers.
        refused: by layer that is not in `dims`: the reason; none where nothing depends on the rows.
    """

    dims: dict[int, RowDims] = field(default_factory=dict)
    drawing: set[int] = field(default_factory=set)
    refused: dict[int, str] = field(default_factory=dict)

    def rows(self, forward: int, backward: int) -> Rows:
        """Calls cut into slices of so many rows."""
        return Rows(forward, backward, self.dims, self.drawing)


class RowProbe(Passes):
    """Runs two small micro-batches through the model, layer by layer. Used once."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._found = Found()
        self._few: list[tuple[int, Shapes, Shapes]] = []
        self._counts = (0, 0)
        self._comparing = False

    def probe(self, sample: Sample, rows: tuple[int, int]) -> Found:
        """What forward passes over `rows[0]` rows and over `rows[1]`, which are more, show.

        Raises:
            BaseException: whatever the model raised.
        """
        self._counts = rows
        with self._opened() as copy, self._lent(copy):
            for self._comparing, count in zip((False, True), rows, strict=True):
                self._forward(sample, count)
        found = self._found
        for layer in found.refused:
            found.dims.pop(layer, None)
        return found

    def run(self, request: Request, copy: DeviceCopy) -> Any:
        """Tries the call before it is run."""
        random, layer = self._parts.random, request.layer
        before = random.snapshot()
        trial = self._parts.layer_calls.trial(request, copy.leaves)
        if differ(before, random.snapshot()):
            self._found.drawing.add(layer)
        seen = layer, [t.shape for t in trial.inputs], [t.shape for t in trial.outputs]
        if self._comparing:
            self._compare(request, trial.may_be_cut, seen, copy.leaves)
        else:
            self._few.append(seen)
        del trial
        return super().run(request, copy)

    def _compare(self, request: Request, may_be_cut: bool, more: tuple[int, Shapes, Shapes], copies: Leaves) -> None:
        """Notes where the rows of this call are, or why it cannot be cut."""
        found, layer = self._found, request.layer
        few = self._few[self._number] if self._number < len(self._few) else None
        if few == more:  # whatever the rows: there is nothing to cut, or to tell
            found.refused.setdefault(layer, "")
            return
        dims = None
        if few is not None and few[0] == layer:
            dims = row_dims(few[1:], more[1:], self._counts)
        if not may_be_cut:
            found.refused[layer] = "it changes an input, a buffer or an object that it is given"
        elif dims is None:
            found.refused[layer] = "where its tensors hold the rows cannot be told from their shapes"
        elif found.dims.get(layer, dims) != dims:
            found.refused[layer] = "its calls hold the rows in different places"
        elif not self._same_in_slices(request, dims, copies):
            found.refused[layer] = "its rows depend on each other"
        else:
            found.dims[layer] = dims

    def _same_in_slices(self, request: Request, dims: RowDims, copies: Leaves) -> bool:
        if not self._parts.device.has_values:
            return True
        calls, rows = self._parts.layer_calls, self._counts[1]
        cut = Cut(dims, rows, rows - 1, rows - 1)
        drawing = request.layer in self._found.drawing
        # What draws random numbers is compared as it is without them: slices draw others than the whole does.
        with _evaluating(self._layers[request.layer].module) if drawing else nullcontext():
            whole = calls.trial(request, copies).outputs
            slices = calls.trial(request, copies, cut).outputs
        return len(whole) == len(slices) and all(map(close, whole, slices))


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same but for rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    tolerance = _TOLERANCES.get(a.dtype)
    if tolerance is None:
        return torch.equal(a, b)
    apart = largest = torch.zeros((), dtype=torch.float64, device=a.device)
    for x, y in zip(a.reshape(-1).split(_PIECE), b.reshape(-1).split(_PIECE), strict=True):
        finite = x.isfinite()
        if not torch.equal(finite, y.isfinite()):
            return False
        if finite.any():
            x, y = x[finite].double(), y[finite].double()  # noqa: PLW2901
            apart, largest = torch.maximum(apart, (x - y).abs().max()), torch.maximum(largest, x.abs().max())
    return bool(apart <= tolerance * largest)


def few_rows(tree: Any, rows: int) -> Any:
    """`tree` with only the first `rows` rows of each tensor that has as many as the first one, which are repeated if
    there are not enough.
    """
    tensors = [t for t in tensors_in(tree) if t.dim()]
    total = tensors[0].shape[0] if tensors else 0

    def few(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != total or not total:
            return tensor
        return tensor[torch.arange(rows, device=tensor.device) % total]

    return map_tensors(few, tree)


def _evaluating(module: nn.Module) -> AbstractContextManager[object]:
    """In evaluation mode, without telling a module that overrides `train`."""
    return held((m.__dict__, "training", False) for m in module.modules() if m.training)
