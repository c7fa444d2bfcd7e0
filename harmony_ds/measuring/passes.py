"""Forward passes that are measured: layer by layer, with gradients, their outputs cut as in a step. Nothing is kept of
them: no gradient, no random number, no change of a buffer. What is looked at is for subclasses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from harmony_ds.calls.checkpointing import passed_through
from harmony_ds.calls.inter_layer import InterLayerGraph
from harmony_ds.calls.intercept import Request, handled_by
from harmony_ds.calls.recorded_call import RecordedCall
from harmony_ds.calls.targets import GradientTarget
from harmony_ds.decomposer.find import Layer
from harmony_ds.measuring.sample import Sample
from harmony_ds.offload.residency import DeviceCopy
from harmony_ds.profiler.rows import WHOLE_CALLS, Rows
from harmony_ds.runtime.parts import Parts
from harmony_ds.runtime.streaming import Observer, Streamer

Reached = list[tuple[GradientTarget, torch.Size, torch.dtype]]


@dataclass(frozen=True, slots=True)
class Setup:
    """A model as it is run.

    Attributes:
        unlayered: the parameters that no layer owns, as far as they are known.
        rows: how layer calls are cut into slices.
    """

    parts: Parts
    layers: tuple[Layer, ...]
    unlayered: tuple[str, ...] = ()
    rows: Rows = WHOLE_CALLS


class Passes(Observer):
    """Runs forward passes of one model. Used once."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup.parts)
        self._layers = setup.layers
        self._unlayered = setup.unlayered
        self._rows = setup.rows
        self._streamer: Streamer
        self._number = 0  # of the next call
        self._inter_layer = InterLayerGraph()

    @contextmanager
    def _opened(self) -> Iterator[DeviceCopy]:
        """The unlayered parameters on the device; random numbers are put back in the end."""
        self._parts.installation.touched.clear()
        calls = self._parts.layer_calls
        proving, calls.proving = calls.proving, False
        self._parts.random.open()
        self._streamer = Streamer(self._parts, self._layers, self)
        try:
            with self._streamer.on_device(self._unlayered) as copy:
                yield copy
        finally:
            self._parts.random.close()
            calls.proving = proving
            del self._streamer  # each would hold the other, and device memory, until the garbage collector comes

    def _lent(self, copy: DeviceCopy) -> AbstractContextManager[None]:
        """The model, without its host parameters; what happens to buffers is undone in the end."""
        return self._parts.installation.installed(copy.leaves, keep_buffers=False)

    def _forward(self, sample: Sample, rows: int | None = None) -> Any:
        """One forward pass over all rows of `sample`, or over so many, on a random stream of its own.

        Raises:
            UnseenError: it draws from generators that nobody knew it to draw from.
        """
        self._number = 0
        self._inter_layer = InterLayerGraph()
        self._parts.random.start(self, sample.seed)
        forward = sample.forward if rows is None else sample.few(rows)
        with passed_through(), handled_by(self._streamer), torch.enable_grad():
            outputs = forward()
        self._parts.random.check_drawn()
        return outputs

    def run(self, request: Request, copy: DeviceCopy) -> Any:
        """Runs a layer call, and forgets it."""
        outputs, call = self._record(request, copy)
        if call is not None:
            self._parts.layer_calls.forget(call)
        return outputs

    def _record(self, request: Request, copy: DeviceCopy) -> tuple[Any, RecordedCall | None]:
        """Its outputs, and what it takes to propagate through it."""
        self._number += 1
        return self._parts.layer_calls.forward(
            request, self._number - 1, copy.leaves, self._inter_layer, self._parts.random.snapshot, self._rows
        )

    @contextmanager
    def _made_up_gradients(self, call: RecordedCall) -> Iterator[Reached]:
        """While open, `call` can be propagated through. The list names those whose gradient came of that, in the end."""
        reached: Reached = []
        for output_gradient in call.output_gradients:
            if output_gradient is not None:
                output_gradient.gradient = torch.ones(
                    output_gradient.shape, dtype=output_gradient.dtype, device=self._parts.device.torch_device
                )
        try:
            yield reached
        finally:
            self._parts.random.switch(self)
            for target in call.targets:
                gradient = target.take() if target is not None else None
                if target is not None and gradient is not None:
                    reached.append((target, gradient.shape, gradient.dtype))
