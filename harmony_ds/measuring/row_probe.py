"""Finds out which layers can be cut into slices of a micro-batch's rows, and where their tensors hold the rows.

The model is run twice, with a few rows and with one more. What grows with the rows holds them. Then each layer is run
in slices on what it was given, and must give what it gave as a whole: a layer whose rows look at each other (batch
normalization, capacities of experts) does not, and is never cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.calls.boundary import Glue
from harmony_ds.calls.intercept import Request, handled_by
from harmony_ds.calls.random_streams import differ
from harmony_ds.calls.recorded_call import Trial
from harmony_ds.calls.slices import Cut, RowDims, Rows, row_dims
from harmony_ds.calls.trees import map_tensors, tensors_in
from harmony_ds.decomposer.find import Layer
from harmony_ds.runtime.parts import Parts

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Of the largest value: sums over other blocks round differently, rows that look at each other are far off."""


@dataclass(frozen=True, slots=True)
class Found:
    """What can be cut, and why the rest cannot.

    Attributes:
        dims: by layer.
        drawing: layers that draw random numbers.
        refused: by layer that is not in `dims`: the reason; none where nothing depends on the rows.
    """

    dims: dict[int, RowDims]
    drawing: frozenset[int]
    refused: dict[int, str]

    def rows(self, forward: int, backward: int) -> Rows:
        """Calls cut into slices of so many rows."""
        return Rows(forward, backward, self.dims, set(self.drawing))


@dataclass(slots=True)
class _Shapes:
    layer: int
    inputs: list[torch.Size]
    outputs: list[torch.Size]


@dataclass(slots=True)
class _State:
    dims: dict[int, RowDims] = field(default_factory=dict)
    drawing: set[int] = field(default_factory=set)
    refused: dict[int, str] = field(default_factory=dict)


class RowProbe:
    """Runs two small micro-batches through the model, layer by layer. Used once."""

    def __init__(self, parts: Parts, layers: tuple[Layer, ...], unlayered: tuple[str, ...]) -> None:
        self.device_type = parts.device.torch_device.type
        self._parts = parts
        self._layers = layers
        self._unlayered = unlayered
        self._found = _State()
        self._few: list[_Shapes] = []
        self._rows = (0, 0)
        self._seen = 0
        self._comparing = False
        self._glue = Glue()

    def run(self, few: Callable[[], Any], more: Callable[[], Any], rows: tuple[int, int], seed: int) -> Found:
        """What `few`, a forward pass over `rows[0]` rows, and `more`, one over `rows[1]`, show.

        Raises:
            BaseException: whatever the model raised.
        """
        self._rows = rows
        parts = self._parts
        copy = parts.residency.swap_in(self._unlayered)
        copy.wait(parts.device)
        parts.random.open()
        try:
            with parts.installation.installed(copy.leaves, keep_buffers=False):
                for self._comparing, forward in ((False, few), (True, more)):
                    self._seen = 0
                    self._glue = Glue()
                    parts.random.start(self, seed)
                    with handled_by(self), torch.enable_grad(), parts.random.others_kept():
                        forward()
        finally:
            parts.random.close()
            parts.residency.evict(copy)
        found = self._found
        dims = {layer: dim for layer, dim in found.dims.items() if layer not in found.refused}
        return Found(dims, frozenset(found.drawing), found.refused)

    def call(self, request: Request) -> Any:
        """One layer call of the model."""
        parts = self._parts
        names = tuple(n for n in self._layers[request.layer].parameters if n not in self._unlayered)
        copy = parts.residency.swap_in(names)
        copy.wait(parts.device)
        try:
            before = parts.random.snapshot()
            trial = parts.layer_calls.trial(request, copy.leaves)
            if differ(before, parts.random.snapshot()):
                self._found.drawing.add(request.layer)
            if self._comparing:
                self._compare(request, trial, copy.leaves)
            else:
                self._few.append(_Shapes(request.layer, _shapes(trial.inputs), _shapes(trial.outputs)))
            del trial
            self._seen += 1
            outputs, call = parts.layer_calls.forward(
                request, self._seen - 1, copy.leaves, self._glue, parts.random.snapshot
            )
            if call is not None:
                parts.layer_calls.forget(call)
            return outputs
        finally:
            parts.residency.evict(copy)

    def _compare(self, request: Request, trial: Trial, copies: Mapping[str, Tensor]) -> None:
        """Notes where the rows of this call are, or why it cannot be cut."""
        found, layer = self._found, request.layer
        if self._is_without_rows(layer, trial):
            found.refused.setdefault(layer, "")
            return
        reason = None
        dims = self._dims(layer, trial)
        if not trial.may_be_cut:
            reason = "it changes an input, a buffer, an attribute or an object that it is given"
        elif dims is None:
            reason = "where its tensors hold the rows cannot be told from their shapes"
        elif found.dims.get(layer, dims) != dims:
            reason = "its calls hold the rows in different places"
        elif not self._same_in_slices(request, dims, copies):
            reason = "its rows depend on each other"
        if reason is not None or dims is None:
            found.refused[layer] = reason or ""
            return
        found.dims[layer] = dims

    def _dims(self, layer: int, trial: Trial) -> RowDims | None:
        if self._seen >= len(self._few) or self._few[self._seen].layer != layer:
            return None
        few = self._few[self._seen]
        return row_dims((few.inputs, few.outputs), (_shapes(trial.inputs), _shapes(trial.outputs)), self._rows)

    def _is_without_rows(self, layer: int, trial: Trial) -> bool:
        """Whether the call takes and gives the same shapes whatever the rows: there is nothing to cut, or to tell."""
        few = self._few[self._seen] if self._seen < len(self._few) else None
        return few is not None and few == _Shapes(layer, _shapes(trial.inputs), _shapes(trial.outputs))

    def _same_in_slices(self, request: Request, dims: RowDims, copies: Mapping[str, Tensor]) -> bool:
        if not self._parts.device.has_values:
            return True
        calls, rows = self._parts.layer_calls, self._rows[1]
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
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()):
        return False
    x, y = a[finite].double(), b[finite].double()
    return x.numel() == 0 or bool((x - y).abs().max() <= tolerance * x.abs().max())


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


def _shapes(tensors: Sequence[Tensor]) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors]


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """In evaluation mode, without telling a module that overrides `train`."""
    training = [m for m in module.modules() if m.training]
    for m in training:
        m.training = False
    try:
        yield
    finally:
        for m in training:
            m.training = True
