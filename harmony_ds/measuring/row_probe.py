"""Find out which layers can be cut into slices of a micro-batch's rows, and where their tensors hold the rows.

The model is run twice, with a few rows and with one more. What grows with the rows holds them. Then each layer is run
in slices on what it was given, and must give what it gave as a whole: a layer whose rows look at each other (batch
normalization, capacities of experts) does not, and is never cut.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from torch import nn

from harmony_ds.calls.intercept import Request
from harmony_ds.calls.patching import patched
from harmony_ds.calls.random_streams import states_differ
from harmony_ds.calls.sameness import close
from harmony_ds.calls.slices import Shapes, Slicing, row_dims
from harmony_ds.measuring.passes import Passes
from harmony_ds.measuring.sample import Sample
from harmony_ds.offload.residency import DeviceCopy, Leaves
from harmony_ds.profiler.rows import RowDims, Rows


class RowProbe(Passes):
    """Probe that runs two small micro-batches through the model, layer by layer."""

    def __init__(self, *model: Any) -> None:
        super().__init__(*model)
        self._refused: dict[int, str] = {}
        self._dims: dict[int, RowDims] = {}
        self._drawing: set[int] = set()
        self._few: list[tuple[int, Shapes, Shapes]] = []
        self._counts = (0, 0)
        self._comparing = False

    def probe(self, sample: Sample, rows: tuple[int, int]) -> tuple[Rows, dict[int, str]]:
        """Run forward passes over `rows[0]` rows and over `rows[1]`, which are more.

        Returns:
            Which layers can be cut; and why others cannot, which is empty where nothing depends on the rows.
        """
        self._counts = rows
        with self._opened():
            for self._comparing, count in zip((False, True), rows, strict=True):
                self._forward(sample.few(count))
        can = {layer: dims for layer, dims in self._dims.items() if layer not in self._refused}
        return Rows(dims=can, drawing=self._drawing), self._refused

    def run(self, request: Request, copy: DeviceCopy) -> Any:
        """Try the call before it is run."""
        random, layer = self._parts.random, request.layer
        before = random.snapshot()
        trial = self._parts.layer_calls.trial(request, copy.leaves)
        if states_differ(before, random.snapshot()):
            self._drawing.add(layer)
        seen = layer, [t.shape for t in trial.inputs], [t.shape for t in trial.outputs]
        if self._comparing:
            self._compare(request, trial.may_be_sliced, trial.places, seen, copy.leaves)
        else:
            self._few.append(seen)
        del trial
        return super().run(request, copy)

    def _compare(
        self,
        request: Request,
        may_be_sliced: bool,
        places: tuple[int, ...],
        more: tuple[int, Shapes, Shapes],
        copies: Leaves,
    ) -> None:
        """Note where the rows of this call are, or why it cannot be cut."""
        layer, refused = request.layer, self._refused
        few = self._few[self._number] if self._number < len(self._few) else None
        if few == more:  # nothing depends on the rows: there is nothing to cut, or to log
            refused.setdefault(layer, "")
            return
        dims = None
        if few is not None and few[0] == layer:
            dims = row_dims(few[1:], more[1:], self._counts)
            dims = None if dims is None else replace(dims, places=places)
        if not may_be_sliced:
            refused[layer] = "it changes an input, a buffer or an object that it is given"
        elif dims is None:
            refused[layer] = "where its tensors hold the rows cannot be told from their shapes"
        elif self._dims.get(layer, dims) != dims:
            refused[layer] = "its calls hold the rows in different places"
        elif not self._same_in_slices(request, dims, copies):
            refused[layer] = "its rows depend on each other"
        else:
            self._dims[layer] = dims

    def _same_in_slices(self, request: Request, dims: RowDims, copies: Leaves) -> bool:
        if not self._parts.device.has_values:
            return True
        calls, rows = self._parts.layer_calls, self._counts[1]
        cut = Slicing(dims, rows, rows - 1, rows - 1)
        drawing = request.layer in self._drawing
        # What draws random numbers is compared as it is without them: slices draw others than the whole does.
        with _evaluating(self._layers[request.layer].module) if drawing else nullcontext():
            whole = calls.trial(request, copies).outputs
            slices = calls.trial(request, copies, cut).outputs
        return len(whole) == len(slices) and all(map(close, whole, slices))


def _evaluating(module: nn.Module) -> AbstractContextManager[object]:
    """Put `module` in evaluation mode, without calling `train`, which it may override."""
    return patched((m.__dict__, "training", False) for m in module.modules() if m.training)
