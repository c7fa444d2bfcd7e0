"""Times a model on the device with one micro-batch: how long every layer call takes forward and backward.

As `Measurement` does for bytes: layer by layer, each swapped in alone, its backward pass run with a made-up gradient,
nothing kept. A pass of its own, because counting bytes slows every operation down. Calls of equal structure (same
class, same shapes) share what was measured of them; only the first few are propagated back through.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from harmony_ds.calls.boundary import Glue
from harmony_ds.calls.intercept import Request, handled_by
from harmony_ds.calls.recorded_call import RecordedCall
from harmony_ds.decomposer.find import Layer
from harmony_ds.measuring.structure import Structure, structure_of
from harmony_ds.offload.residency import DeviceCopy
from harmony_ds.profiler.costs import CostTable
from harmony_ds.runtime.micro_batch import Objective
from harmony_ds.runtime.parts import Parts

_PASSES = 2
_BACKWARD_SAMPLES = 4
"""Of equal calls, in each pass."""


@dataclass(slots=True)
class _Samples:
    """Milliseconds of the calls of one structure, in the order they were made; the first one was cold."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    glue: list[float] = field(default_factory=list)


def typical(samples: list[float]) -> float:
    """The median, without the first of several, which paid for what is only done once."""
    return statistics.median(samples[1:] or samples or [0.0])


class Timing:
    """Runs a micro-batch through the model, layer by layer. Used once."""

    def __init__(self, parts: Parts, layers: tuple[Layer, ...]) -> None:
        self.device_type = parts.device.torch_device.type
        self._device = parts.device
        self._layers = layers
        self._residency = parts.residency
        self._installation = parts.installation
        self._calls = parts.layer_calls
        self._random = parts.random
        self._unlayered: tuple[str, ...] = ()
        self._samples: dict[Structure, _Samples] = {}
        self._structures: list[Structure] = []
        self._propagated: dict[Structure, int] = {}
        self._glue = Glue()
        self._head: list[float] = []
        self._tail: list[float] = []
        self._since = 0.0
        self.swaps: list[tuple[int, float]] = []
        """Bytes and milliseconds of every swap-in."""

    def run(
        self,
        costs: CostTable,
        forward: Callable[[], Any],
        objective: Objective,
        seed: int,
        unlayered: tuple[str, ...],
    ) -> CostTable:
        """`costs` with the times of `forward` and of propagating `objective` of its outputs.

        Raises:
            BaseException: whatever the model or the objective raised.
        """
        self._unlayered = unlayered
        copy = self._swap_in(unlayered)
        self._random.open()
        try:
            for _ in range(_PASSES if self._device.has_values else 1):
                self._structures.clear()
                self._propagated.clear()
                self._glue = Glue()
                with self._installation.installed(copy.leaves, keep_buffers=False), self._random.others_kept():
                    self._random.start(self, seed)
                    self._one_pass(forward, objective)
        finally:
            self._random.close()
            self._residency.evict(copy)
        return self._timed(costs)

    def _one_pass(self, forward: Callable[[], Any], objective: Objective) -> None:
        self._since = self._device.now_ms()
        with handled_by(self), torch.enable_grad():
            outputs = forward()
        loss = objective(outputs)
        if loss is not None and loss.requires_grad:
            loss.backward()
        self._tail.append(self._lap())

    def call(self, request: Request) -> Any:
        """One layer call of the model: timed, its outputs cut."""
        between = self._lap()
        if self._structures:
            self._samples[self._structures[-1]].glue.append(between)
        else:
            self._head.append(between)
        structure = structure_of(self._layers[request.layer], request)
        samples = self._samples.setdefault(structure, _Samples())
        self._structures.append(structure)
        names = tuple(n for n in self._layers[request.layer].parameters if n not in self._unlayered)
        copy = self._swap_in(names)
        try:
            self._lap()
            outputs, call = self._calls.forward(
                request, len(self._structures) - 1, copy.leaves, self._glue, self._random.snapshot
            )
            samples.forward.append(self._lap())
            if call is not None:
                self._propagate(call, copy, structure, samples)
            return outputs
        finally:
            self._residency.evict(copy)
            self._lap()

    def _propagate(self, call: RecordedCall, copy: DeviceCopy, structure: Structure, samples: _Samples) -> None:
        done = self._propagated.get(structure, 0)
        self._propagated[structure] = done + 1
        if done >= _BACKWARD_SAMPLES:
            self._calls.forget(call)
            return
        for slot in call.slots:
            if slot is not None:
                slot.add(torch.ones(slot.shape, dtype=slot.dtype, device=self._device.torch_device))
        self._lap()
        self._calls.backward(call, copy.leaves, self._random.replay, lambda: self._residency.accumulate(copy))
        self._residency.accumulate(copy)
        samples.backward.append(self._lap())
        self._random.switch(self)
        for sink in call.sinks:
            if sink is not None:
                sink.take()
        for leaf in copy.leaves.values():
            leaf.grad = None

    def _swap_in(self, names: tuple[str, ...]) -> DeviceCopy:
        before = self._device.now_ms()
        copy = self._residency.swap_in(names)
        copy.wait(self._device)
        nbytes = copy.buffer.numel() * copy.buffer.element_size()
        self.swaps.append((nbytes, self._device.now_ms() - before))
        return copy

    def _lap(self) -> float:
        before, self._since = self._since, self._device.now_ms()
        return self._since - before

    def _timed(self, costs: CostTable) -> CostTable:
        """Times by position; the calls are those that were measured, as the random numbers were the same."""
        timed = []
        for cost, structure in zip(costs.costs, self._structures, strict=True):
            samples = self._samples[structure]
            backward = typical(samples.backward)
            timed.append(
                replace(
                    cost,
                    forward_ms=typical(samples.forward) + typical(samples.glue),
                    backward_ms=backward,
                    # The graph is built while running forward either way, and propagated through once; unless it is
                    # recomputed in slices.
                    fused_ms=(backward or typical(samples.forward))
                    + typical(samples.glue)
                    + (typical(samples.forward) if backward and self._calls.rows.cuts else 0.0),
                )
            )
        return replace(costs, costs=tuple(timed), head_ms=typical(self._head), tail_ms=typical(self._tail))
