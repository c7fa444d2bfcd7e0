"""Measure the milliseconds of a model's layer calls on the device, forward and backward, with one micro-batch.

The passes are others than those of `Measurement`, because counting bytes slows every operation down. Calls of equal
structure share their samples; only the first few of them are propagated back through.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from harmony_ds.decomposer.find import Layer
from harmony_ds.model.intercept import Request
from harmony_ds.model.trees import tensors_in
from harmony_ds.offload.device_copies import DeviceCopy
from harmony_ds.profiling.passes import ModelPasses
from harmony_ds.profiling.sample import Sample
from harmony_ds.runtime.runtime import Runtime
from harmony_ds.runtime.streaming import LayerCallObserver
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.rows import WHOLE_CALLS, Rows

_PASSES = 2
_BACKWARD_SAMPLES = 4
"""Equal calls that are propagated back through, in each pass."""

CallStructure = tuple[object, ...]
_REST: CallStructure = ()
"""Stands for the code before the first call and after the last."""


def structure_of(layer: Layer, request: Request) -> CallStructure:
    """Key of the calls of equal layers: same class, same parameters, same arguments, in shape and dtype."""
    parameters = tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in layer.module.parameters())
    arguments = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors_in((request.args, request.kwargs)))
    return (type(layer.module), parameters, arguments)


def typical(samples: list[float]) -> float:
    """Return the median, without the first of several, which paid for what is only done once."""
    return statistics.median(samples[1:] or samples or [0.0])


class Timing(LayerCallObserver):
    """Milliseconds of each layer call of one micro-batch, of the code around the calls, and of the swap-ins.

    They leave as fields of a `CostTable` (`time`), and as `swaps`.

    Attributes:
        device: where layers run.
        swaps: bytes and milliseconds of every swap-in.
    """

    def __init__(
        self,
        runtime: Runtime,
        layers: tuple[Layer, ...],
        unlayered: tuple[str, ...] = (),
        rows: Rows = WHOLE_CALLS,
        observers: Sequence[LayerCallObserver] = (),
    ) -> None:
        """`observers` are told of each call, too, after this object."""
        self.device = runtime.device
        self._observers = observers
        self._runtime = runtime
        self._layers = layers
        self._passes = ModelPasses(runtime, layers, unlayered, rows)
        # In the order they were measured.
        self._samples: defaultdict[tuple[CallStructure, str], list[float]] = defaultdict(list)
        self._structures: list[CallStructure] = []  # of the calls of this pass
        self._since = 0.0
        self.swaps: list[tuple[int, float]] = []

    def time(self, costs: CostTable, sample: Sample) -> CostTable:
        """Return `costs` with the times of its forward pass and of propagating its loss."""
        self._lap()
        with self._passes.opened(self._run_call, [self, *self._observers]):
            for number in range(_PASSES if self.device.has_values else 1):
                self._passes.untouched.looks_into_layers = number == 0  # it takes time
                self._structures.clear()
                self._lap()
                self._passes.propagate_loss(sample.surrogate_loss(self._passes.forward(sample)))
                self._end_lap(_REST, "tail")
        return self._timed(costs)

    def call_reached(self, request: Request) -> None:
        """Note what the code since the last call took."""
        if self._structures:
            self._end_lap(self._structures[-1], "inter-layer")
        else:
            self._end_lap(_REST, "head")

    def weights_arrived(self, copy: DeviceCopy) -> None:
        """Note what the swap-in took."""
        self.swaps.append((copy.buffer.numel() * copy.buffer.element_size(), self._lap()))

    def _run_call(self, request: Request, copy: DeviceCopy) -> Any:
        """Run the call, and propagate through the first few of its structure."""
        calls, device_copies = self._runtime.layer_calls, self._runtime.device_copies
        replay = self._runtime.random.replay
        keeps_graphs = calls.layers[request.layer].may_keep_graphs
        structure = (*structure_of(self._layers[request.layer], request), keeps_graphs)
        self._structures.append(structure)
        has_samples = self._structures.count(structure) > _BACKWARD_SAMPLES
        self._lap()
        begin = self.device.issued_ms()
        head = self._passes.open_head(request, copy, partial(device_copies.accumulate, copy))
        if head is not None:  # it takes its time with the loss
            self._lap()
            return head
        outputs, call = self._passes.record(request, copy)
        self._issued(structure, "issue", begin)
        self._end_lap(structure, "forward")
        if call is None:
            return outputs
        if has_samples:
            calls.discard(call)
            return outputs
        with self._passes.made_up_gradients(call):
            self._lap()
            begin = self.device.issued_ms()
            if call.slicing is None and keeps_graphs:
                calls.recompute(call, copy.leaves, replay, as_in_steps=True)
                self._end_lap(structure, "again")
            calls.backward(call, copy.leaves, replay, lambda: device_copies.accumulate(copy))
            device_copies.accumulate(copy)
            self._issued(structure, "issue back", begin)
            self._end_lap(structure, "backward")  # with the recomputation, where no graph is kept
        copy.leaves.drop_gradients()
        return outputs

    def call_finished(self) -> None:
        """Begin to time the code after the call."""
        self._lap()

    def _lap(self) -> float:
        """Return the milliseconds since the last call of this function."""
        before, self._since = self._since, self.device.now_ms()
        return self._since - before

    def _issued(self, structure: CallStructure, what: str, begin: float) -> None:
        """Note what the host took until now, if the device may still compute."""
        if self.device.copies_overlap:
            self._samples[structure, what].append(self.device.issued_ms() - begin)

    def _end_lap(self, structure: CallStructure, what: str) -> None:
        """Note the milliseconds since the last lap as a sample."""
        self._samples[structure, what].append(self._lap())

    def _timed(self, costs: CostTable) -> CostTable:
        """Return `costs` with times; its calls are those of the timed passes, which drew the same random numbers."""
        timed, issued_ms, total_ms = [], 0.0, 0.0
        for cost, structure in zip(costs.costs, self._structures, strict=True):
            forward = self._typical(structure, "forward")
            inter_layer = self._typical(structure, "inter-layer")
            propagate = self._typical(structure, "backward")
            backward = self._typical(structure, "again") + propagate
            issued_ms += self._typical(structure, "issue") + self._typical(structure, "issue back")
            total_ms += forward + backward
            # The graph is built while running forward either way, and propagated through once; unless none is kept.
            fused = (backward or forward) + inter_layer
            if backward and self._passes.rows.keep_no_graph:
                fused += forward
            timed.append(
                replace(
                    cost,
                    forward_ms=forward + inter_layer,
                    backward_ms=backward,
                    fused_ms=fused,
                    propagate_ms=propagate,
                )
            )
        return replace(
            costs,
            costs=tuple(timed),
            head_ms=self._typical(_REST, "head"),
            tail_ms=self._typical(_REST, "tail"),
            issue_share=min(1.0, issued_ms / total_ms) if total_ms else 0.0,
        )

    def _typical(self, structure: CallStructure, what: str) -> float:
        return typical(self._samples[structure, what])
