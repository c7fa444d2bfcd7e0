"""Find out which layers can be cut into slices of a micro-batch's rows, and where their tensors hold the rows.

The model is run twice, with a few rows and with one more. What grows with the rows holds them. Then each layer is run
in slices on what it was given, and must give what it gave as a whole, forward and backward: a layer whose rows look at
each other (batch normalization, capacities of experts, a loss over all rows) does not, and is never cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from harmony_ds.model.intercept import Request
from harmony_ds.model.patching import patched
from harmony_ds.model.random_streams import State, states_differ
from harmony_ds.model.recorded_call import RecordedCall
from harmony_ds.model.sameness import TOLERANCES, close
from harmony_ds.model.slices import Shapes, Slicing, row_dims
from harmony_ds.offload.residency import DeviceCopy, Leaves
from harmony_ds.profiling.passes import Passes
from harmony_ds.profiling.sample import Sample
from harmony_ds.scheduler.rows import Places, RowDims, Rows

_Seen = tuple[int, Places, Shapes, Shapes]
"""A layer, which of its arguments are tensors, and the shapes of its inputs and outputs."""
_Trial = tuple[RecordedCall, list[Tensor]]
"""A call that was run to learn about its layer, and its outputs."""


class RowProbe(Passes):
    """Probe that runs two small micro-batches through the model, layer by layer; it adds to what it has found before."""

    def __init__(self, *model: Any) -> None:
        super().__init__(*model)
        self._refused: dict[int, str] = {}
        self._dims: dict[int, dict[Places, RowDims]] = {}
        self._drawing: set[int] = set()
        self._code_between_draws = False
        self._after_call = State()  # of the random numbers, when the last call had run
        self._few: list[_Seen] = []
        self._counts = (0, 0)
        self._comparing = False

    def probe(self, sample: Sample, rows: tuple[int, int], unlayered: tuple[str, ...] = ()) -> None:
        """Run forward passes over `rows[0]` rows and over `rows[1]`, which are more."""
        self._counts, self._unlayered = rows, unlayered
        self._few.clear()
        with self.opened():
            for self._comparing, count in zip((False, True), rows, strict=True):
                self._runtime.random.start(self, sample.seed)
                self._after_call = self._runtime.random.snapshot()
                self._forward(sample.few(count))  # which starts with the same numbers
                self._note_code_between(self._runtime.random.snapshot())

    def _note_code_between(self, now: State) -> None:
        """Note whether random numbers were drawn since the last call had run."""
        self._code_between_draws |= states_differ(self._after_call, now)

    @property
    def found(self) -> tuple[Rows, dict[int, str]]:
        """Which layers can be cut; and why others cannot, which is empty where nothing depends on the rows."""
        can = {layer: dims for layer, dims in self._dims.items() if layer not in self._refused}
        rows = Rows(dims=can, drawing=frozenset(self._drawing), code_between_draws=self._code_between_draws)
        return rows, dict(self._refused)

    def run(self, request: Request, copy: DeviceCopy) -> Any:
        """Try the call before it is run."""
        random, layer = self._runtime.random, request.layer
        before = random.snapshot()
        self._note_code_between(before)
        trial, outputs = self._runtime.layer_calls.trial(request, copy.leaves)
        if states_differ(before, random.snapshot()):
            self._drawing.add(layer)
        places = trial.arguments.tensor_places
        seen = layer, places, [t.shape for t in trial.on_device], [t.shape for t in outputs]
        if self._comparing:
            self._compare(request, (trial, outputs), seen, copy.leaves)
            copy.leaves.drop_gradients()
        else:
            self._few.append(seen)
        del trial, outputs
        result = super().run(request, copy)
        self._after_call = random.snapshot()
        return result

    def _compare(self, request: Request, trial: _Trial, more: _Seen, copies: Leaves) -> None:
        """Note where the rows of this call are, or why it cannot be cut."""
        layer, places, refused = *more[:2], self._refused
        few = next(iter(self._few[self._number : self._number + 1]), ())
        if few == more:  # nothing depends on the rows: there is nothing to cut, or to log
            refused.setdefault(layer, "")
            return
        dims = row_dims(few[2:], more[2:], self._counts) if few and few[:2] == more[:2] else None
        if not self._runtime.layer_calls.layers[layer].may_be_sliced(trial[0].arguments):
            refused[layer] = "it changes an input, a buffer or an object that it is given"
        elif dims is None:
            refused[layer] = "where its tensors hold the rows cannot be told from their shapes"
        elif self._dims.setdefault(layer, {}).setdefault(places, dims) != dims:
            refused[layer] = "its calls hold the rows in different places"
        elif self._runtime.device.has_values and not self._are_apart(request, trial, dims, copies):
            refused[layer] = "its rows depend on each other"

    def _are_apart(self, request: Request, trial: _Trial, dims: RowDims, copies: Leaves) -> bool:
        """Return whether a call's rows give the same in slices, and nothing to each other's gradients."""
        calls, rows = self._runtime.layer_calls, self._counts[1]
        cut = Slicing(dims, rows, rows - 1, rows - 1)
        others = next(cut.slices(rows - 1))
        trained = [leaf for leaf in copies.values() if leaf.requires_grad]

        def propagate(trial: _Trial, factor: float, of_others: float = 1.0) -> list[Tensor | None]:
            call, outputs = trial
            for output, target, dim in zip(outputs, call.output_gradients, dims.outputs, strict=True):
                if target is not None:  # a gradient of which no two elements are alike
                    made = torch.arange(output.numel(), dtype=torch.float32, device=output.device).sin_().mul_(factor)
                    target.gradient = made.reshape(output.shape).to(output.dtype)
                    others.narrow(target.gradient, dim).mul_(of_others)
            return calls.propagate_trial(call, copies)

        def largest(gradients: Iterable[Tensor | None]) -> float:
            known = [g for g in (*gradients, *(leaf.grad for leaf in trained)) if g is not None and g.numel()]
            return max((g.nan_to_num(0.0, 0.0, 0.0).abs().max().item() for g in known), default=0.0)

        # Without a gradient, a row gives none: also where a gradient is added on the way (a loss of the layer's own).
        given = zip(propagate(trial, 1.0, of_others=0.0), dims.inputs, strict=True)
        if any(others.narrow(t, dim).any() for t, dim in given if t is not None and dim is not None):
            return False
        copies.drop_gradients()
        # What draws random numbers is compared as it is without them: slices draw others than the whole does.
        modules = self._layers[request.layer].module.modules() if request.layer in self._drawing else ()
        with patched((vars(m), "training", False) for m in modules if m.training):  # `train` may be overridden
            whole, slices = calls.trial(request, copies), calls.trial(request, copies, cut)
            if len(whole[1]) != len(slices[1]) or not all(map(close, whole[1], slices[1])):
                return False
            dtypes = {t.dtype for t in (*whole[0].on_device, *whole[1], *trained)}
            runtime = propagate(slices, 1.0)
            most = largest(runtime)
            wholes = propagate(whole, -1.0)  # so that parameters, too, get the sum, which is rounding alone
        sums = [a + b for a, b in zip(runtime, wholes, strict=True) if a is not None and b is not None]
        return largest(sums) <= max(TOLERANCES.get(dtype, 0.0) for dtype in dtypes) * most
