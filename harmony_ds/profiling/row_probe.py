"""Find out which layers can be cut into slices of a micro-batch's rows, and where their tensors hold the rows.

The model is run twice, with a few rows and with one more. The dimensions that grow hold the rows. Then each layer is run
in slices on what it was given, and must give what it gave as a whole, forward and backward: a layer whose rows look at
each other (batch normalization, capacities of experts, a loss over all rows, a number that it computes of them) does not,
and is never cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from harmony_ds.decomposer.find import Layer
from harmony_ds.model.arguments import PLAIN, LayerInputs
from harmony_ds.model.intercept import Request
from harmony_ds.model.patching import patched
from harmony_ds.model.random_streams import RandomState, states_differ
from harmony_ds.model.recorded_call import RecordedCall
from harmony_ds.model.sameness import TOLERANCES, close
from harmony_ds.model.slices import RowSlice, Slicing, TensorShapes, row_dims
from harmony_ds.offload.device_copies import DeviceCopy, Leaves
from harmony_ds.profiling.passes import ModelPasses
from harmony_ds.profiling.sample import Sample
from harmony_ds.runtime.garbage import release_frames
from harmony_ds.runtime.runtime import Runtime
from harmony_ds.scheduler.rows import CallKind, RowDims, Rows


@dataclass(frozen=True, slots=True)
class _CallShapes:
    """Layer and kind of a call, and the shapes of the tensors among its arguments and its outputs."""

    layer: int
    kind: CallKind
    inputs: TensorShapes
    outputs: TensorShapes


@dataclass(frozen=True, slots=True)
class _Trial:
    """Call that was run to learn about its layer.

    Attributes:
        results: leaves of what it has returned, and of containers that it has written into.
        attributes: what the layer's modules hold afterwards in their attributes, by module and name: numbers and tensors in
            floating point, as a layer leaves them for others to read.
    """

    call: RecordedCall
    results: list[Any]
    attributes: Mapping[tuple[int, str], Any]

    @property
    def outputs(self) -> list[Tensor]:
        return [one for one in self.results if isinstance(one, Tensor)]

    def gave_as(self, other: _Trial) -> bool:
        """Return whether it has given and left what `other` has: tensors to rounding, plain values exactly."""
        if len(self.results) != len(other.results) or self.attributes.keys() != other.attributes.keys():
            return False
        pairs = [*zip(self.results, other.results, strict=True)]
        pairs += [(value, other.attributes[key]) for key, value in self.attributes.items()]
        return all(_are_alike(one, another) for one, another in pairs)


def _are_alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and close(one, other)
    return bool(one == other) if isinstance(one, PLAIN) else type(one) is type(other)


class RowProbe:
    """Where layer calls hold the rows of a micro-batch, found by running two small ones; it leaves as `found`.

    `probe` may be called several times: each adds to what was found before.
    """

    def __init__(self, runtime: Runtime, layers: tuple[Layer, ...]) -> None:
        self._runtime = runtime
        self._layers = layers
        self._refused: dict[int, str] = {}
        self._dims: dict[int, dict[CallKind, RowDims]] = {}
        self._drawing: set[int] = set()
        self._code_between_draws = False
        self._after_call = RandomState()  # of the random numbers, when the last call had run
        self._passes: ModelPasses  # of the current probe
        self._rows = 0  # of the current pass
        self._calls: list[_CallShapes] = []  # of the current pass
        self._fewer_rows = 0  # of the pass before, if the calls of this one are compared with its calls
        self._calls_with_fewer_rows: Sequence[_CallShapes] | None = None

    @property
    def found(self) -> tuple[Rows, dict[int, str]]:
        """Which layers can be cut; and why others cannot, which is empty where nothing depends on the rows."""
        can = {layer: dims for layer, dims in self._dims.items() if layer not in self._refused}
        rows = Rows(dims=can, drawing=frozenset(self._drawing), code_between_draws=self._code_between_draws)
        return rows, dict(self._refused)

    def probe(self, sample: Sample, rows: tuple[int, int], unlayered: tuple[str, ...] = ()) -> None:
        """Run forward passes over the first `rows[0]` rows of `sample` and over the first `rows[1]`, which are more."""
        few, more = rows
        self._passes = ModelPasses(self._runtime, self._layers, unlayered)
        with self._passes.opened(self._run_call):
            self._calls_with_fewer_rows = None
            self._run_pass(sample, few)
            self._calls_with_fewer_rows, self._fewer_rows = self._calls, few
            self._run_pass(sample, more)

    def _run_pass(self, sample: Sample, rows: int) -> None:
        """Run a forward pass over the first `rows` rows; note whether code outside the layer calls draws."""
        self._calls, self._rows = [], rows
        random = self._runtime.random
        random.start(self._passes, sample.seed)
        self._after_call = random.snapshot()
        self._passes.forward(sample.few(rows))  # which starts with the same numbers
        self._note_code_between(random.snapshot())

    def _note_code_between(self, now: RandomState) -> None:
        """Note whether random numbers were drawn since the last call had run."""
        self._code_between_draws |= states_differ(self._after_call, now)

    def _run_call(self, request: Request, copy: DeviceCopy) -> Any:
        """Run a trial of the call, and compare it with the same call over fewer rows, before the call is run."""
        random = self._runtime.random
        before = random.snapshot()
        self._note_code_between(before)
        trial = self._trial(request, copy.leaves)
        if states_differ(before, random.snapshot()):
            self._drawing.add(request.layer)
        self._calls.append(
            _CallShapes(
                request.layer,
                trial.call.arguments.kind,
                [tensor.shape for tensor in trial.call.on_device],
                [tensor.shape for tensor in trial.outputs],
            )
        )
        if self._calls_with_fewer_rows is not None:
            self._compare(request, trial, copy.leaves, before, self._calls_with_fewer_rows)
            copy.leaves.drop_gradients()
        del trial  # its memory
        result = self._passes.run_and_discard(request, copy)
        self._after_call = random.snapshot()
        return result

    def _trial(self, request: Request, leaves: Leaves, slicing: Slicing | None = None) -> _Trial:
        call, results = self._runtime.layer_calls.trial(request, leaves, slicing)
        left = {
            (number, key): value.detach().clone() if isinstance(value, Tensor) else value
            for number, module in enumerate(self._layers[request.layer].module.modules())
            for key, value in vars(module).items()
            if isinstance(value, float) or (type(value) is Tensor and value.is_floating_point())
        }
        return _Trial(call, results, left)

    def _compare(
        self,
        request: Request,
        trial: _Trial,
        leaves: Leaves,
        before: RandomState,
        calls_with_fewer_rows: Sequence[_CallShapes],
    ) -> None:
        """Note where the rows of the last call are, or why its layer cannot be cut.

        Args:
            trial: the call, run once; `before`: of the random numbers, before that.
        """
        position = len(self._calls) - 1
        more = self._calls[position]
        few = calls_with_fewer_rows[position] if position < len(calls_with_fewer_rows) else None
        layer, refused = more.layer, self._refused
        if few == more:  # nothing depends on the rows: there is nothing to cut, or to log
            refused.setdefault(layer, "")
            return
        dims = None
        if few is not None and (few.layer, few.kind) == (layer, more.kind):
            dims = row_dims((few.inputs, few.outputs), (more.inputs, more.outputs), (self._fewer_rows, self._rows))
        if not self._runtime.layer_calls.layers[layer].may_be_sliced(trial.call.arguments):
            refused[layer] = "it changes an input, a buffer or an object that it is given"
        elif dims is None:
            refused[layer] = "where its tensors hold the rows cannot be told from their shapes"
        elif not self._note_dims(layer, more.kind, dims):
            refused[layer] = "its calls hold the rows in different places"
        elif self._runtime.device.has_values:
            reaches_others = layer in self._drawing and self._last_row_reaches_others(
                request, trial, dims, leaves, before
            )
            if reaches_others or not self._rows_are_independent(request, trial, dims, leaves):
                refused[layer] = "its rows depend on each other"

    def _note_dims(self, layer: int, kind: CallKind, dims: RowDims) -> bool:
        """Note where calls of a kind hold the rows; return False if others of that kind hold them elsewhere.

        Of calls with different numbers of rows (queries, and several passages for each) the fewest count.
        """
        known = self._dims.setdefault(layer, {}).setdefault(kind, dims)
        fewest = min(known, dims, key=lambda one: one.per_row)
        self._dims[layer][kind] = fewest
        return replace(known, per_row=1) == replace(dims, per_row=1)

    def _last_row_reaches_others(
        self, request: Request, trial: _Trial, dims: RowDims, leaves: Leaves, before: RandomState
    ) -> bool:
        """Return whether a call that draws gives other rows otherwise when it gets the first row in the place of the last.

        It draws the same numbers: those after `before`. Slices draw others, so that they are no test of training mode.
        """
        random = self._runtime.random
        after, rows = random.snapshot(), self._rows * dims.per_row
        given = LayerInputs.from_request(request)
        pairs = zip(given.tensors, dims.inputs, strict=True)
        changed = [_with_first_row_last(tensor, dim, rows) for tensor, dim in pairs]
        random.replay(before)
        other = self._trial(given.arguments.request_with(request, changed), leaves)
        random.replay(after)
        all_but_last = RowSlice(0, rows - 1, rows)
        for own, others, dim in zip(trial.outputs, other.outputs, dims.outputs, strict=True):
            if not close(all_but_last.narrow(own, dim), all_but_last.narrow(others, dim)):
                return True
        return False

    def _rows_are_independent(self, request: Request, trial: _Trial, dims: RowDims, leaves: Leaves) -> bool:
        """Return whether a call's rows give the same in slices, and nothing to each other's gradients."""
        rows = self._rows * dims.per_row
        slicing = Slicing(dims, rows, rows - 1, rows - 1)
        all_but_last = next(slicing.slices(rows - 1))
        # All rows but the last of the outputs get a zero gradient; so must these rows of the inputs. They do not if
        # rows are mixed, or if a layer adds a gradient of its own (an auxiliary loss).
        input_gradients = self._propagate(trial, dims, leaves, 1.0, zeroed=all_but_last)
        for gradient, dim in zip(input_gradients, dims.inputs, strict=True):
            if gradient is not None and dim is not None and all_but_last.narrow(gradient, dim).any():
                return False
        leaves.drop_gradients()
        # What draws random numbers is compared as it is without them: slices draw others than the whole does.
        modules = self._layers[request.layer].module.modules() if request.layer in self._drawing else ()
        with patched((vars(m), "training", False) for m in modules if m.training):  # `train` may be overridden
            whole = self._trial(request, leaves)
            try:
                sliced = self._trial(request, leaves, slicing)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever a layer says to other rows than it is called with
                release_frames(error)
                return False
            if not sliced.gave_as(whole):
                return False
            trained = [leaf for leaf in leaves.values() if leaf.requires_grad]
            of_slices = self._propagate(sliced, dims, leaves, 1.0)
            largest = _largest([*of_slices, *(leaf.grad for leaf in trained)])
            # Gradients of the whole call get the opposite sign and are added to those of the slices: parameters' gradients
            # add up so by themselves. What remains is rounding.
            of_whole = self._propagate(whole, dims, leaves, -1.0)
        sums = [a + b for a, b in zip(of_slices, of_whole, strict=True) if a is not None and b is not None]
        dtypes = {tensor.dtype for tensor in (*whole.call.on_device, *whole.outputs, *trained)}
        tolerance = max(TOLERANCES.get(dtype, 0.0) for dtype in dtypes)
        return _largest([*sums, *(leaf.grad for leaf in trained)]) <= tolerance * largest

    def _propagate(
        self, trial: _Trial, dims: RowDims, leaves: Leaves, factor: float, zeroed: RowSlice | None = None
    ) -> list[Tensor | None]:
        """Propagate made-up gradients times `factor`, zero in the rows `zeroed`; return the gradients of the inputs."""
        for output, target, dim in zip(trial.outputs, trial.call.output_gradients, dims.outputs, strict=True):
            if target is None:
                continue
            # No two elements are alike.
            made_up = torch.arange(output.numel(), dtype=torch.float32, device=output.device).sin_().mul_(factor)
            target.gradient = made_up.reshape(output.shape).to(output.dtype)
            if zeroed is not None:
                zeroed.narrow(target.gradient, dim).zero_()
        return self._runtime.layer_calls.propagate_trial(trial.call, leaves)


def _with_first_row_last(tensor: Tensor, dim: int | None, rows: int) -> Tensor:
    """Return a copy of a tensor whose last row is the first one; `dim`: of its `rows`; None: it has none."""
    if dim is None:
        return tensor
    changed = tensor.detach().clone()
    RowSlice(rows - 1, rows, rows).narrow(changed, dim).copy_(RowSlice(0, 1, rows).narrow(tensor.detach(), dim))
    return changed.requires_grad_(tensor.requires_grad)


def _largest(gradients: Iterable[Tensor | None]) -> float:
    """Return the largest magnitude among the finite elements of `gradients`."""
    known = [gradient for gradient in gradients if gradient is not None and gradient.numel()]
    return max((gradient.nan_to_num(0.0, 0.0, 0.0).abs().max().item() for gradient in known), default=0.0)
