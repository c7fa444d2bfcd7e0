"""Forward passes that are measured: layer by layer, with gradients, their outputs cut as in a step. Nothing is kept of
them: no gradient, also of what the program has outside the model, no random number, no change of a buffer. Subclasses look
at what they measure.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from harmony_ds.decomposer.find import Layer
from harmony_ds.model.boundary import explaining_errors, on_one_thread, reachable_nodes
from harmony_ds.model.checkpointing import checkpoints_bypassed
from harmony_ds.model.inter_layer import InterLayerGraph
from harmony_ds.model.intercept import Request, handled_by
from harmony_ds.model.recorded_call import RecordedCall
from harmony_ds.model.targets import GradientTarget, TensorGradient
from harmony_ds.model.untouched import Untouched, untouched
from harmony_ds.offload.residency import DeviceCopy
from harmony_ds.profiling.sample import Sample
from harmony_ds.runtime.runtime import Runtime
from harmony_ds.runtime.streaming import Streamer
from harmony_ds.scheduler.rows import WHOLE_CALLS, Rows


class Passes(Streamer):
    """Forward passes of one model. Used once."""

    def __init__(
        self, runtime: Runtime, layers: tuple[Layer, ...], unlayered: tuple[str, ...] = (), rows: Rows = WHOLE_CALLS
    ) -> None:
        """Run with `unlayered` parameters, as far as they are known, and with layer calls cut into `rows`."""
        super().__init__(runtime, layers)
        self._unlayered = unlayered
        self._rows = rows
        self._untouched = Untouched()
        self._number = 0  # of the next call
        self._inter_layer = InterLayerGraph()

    def loss(self, sample: Sample) -> Tensor | None:
        """Return the loss of a forward pass that runs by itself. What one leaves in buffers, the next one finds."""
        loss = sample.objective(self._forward(sample))
        # On the host, since it waits for the step, whose device memory is planned.
        return None if loss is None else loss.detach().to("cpu", copy=True)

    @contextmanager
    def opened(self) -> Iterator[DeviceCopy]:
        """Open a context for forward passes: unlayered parameters are on the device, and modules hold no host parameters.

        Random numbers, buffers and attributes are restored in the end.
        """
        installation, calls = self._runtime.installation, self._runtime.layer_calls
        installation.touched.clear()
        proving, calls.checks_recomputation = calls.checks_recomputation, False
        self._runtime.random.open()
        try:
            with (
                self._runtime.contract.reverting(),
                untouched() as self._untouched,
                self.on_device(self._unlayered) as copy,
                installation.installed(copy.leaves, keep_buffers=False),
                on_one_thread(),
            ):
                self._untouched.unlayered = copy.leaves.values()
                yield copy
        finally:
            self._runtime.random.close()
            calls.checks_recomputation = proving

    def _forward(self, sample: Sample) -> Any:
        """Run one forward pass of `sample`, on a random stream of its own.

        Raises:
            UnseenError: it draws from generators that it was not known to draw from.
        """
        self._number = 0
        self._inter_layer = InterLayerGraph()
        self._runtime.random.start(self, sample.seed)
        settings = self._runtime.contract.settings
        settings.begin()
        with checkpoints_bypassed(), handled_by(self), torch.enable_grad():
            outputs = sample.call(sample.inputs)
        settings.end_pass()
        self._runtime.random.check_drawn()
        return outputs

    def call(self, request: Request) -> Any:
        """Run one layer call at once; note what the code before it has set on modules."""
        settings = self._runtime.contract.settings
        if not settings.are_unchanged(request.layer):
            settings.note_arrival(request.layer)
        outputs = super().call(request)
        if not settings.is_layer_unchanged(request.layer):
            settings.note_return(request.layer)
        return outputs

    def _propagate_loss(self, loss: Tensor | None) -> None:
        """Propagate from the objective of a forward pass, through the code after its last call."""
        if loss is None or not loss.requires_grad:
            return
        with explaining_errors():
            was_there = self._untouched.set_aside(reachable_nodes([get_gradient_edge(loss).node]))
            shared = not self._inter_layer.is_trivial and self._inter_layer.touches(loss)
            loss.backward(retain_graph=shared or was_there)

    def swapped_in(self, copy: DeviceCopy) -> None:
        """Let the parameters of the layer that is called get gradients."""
        self._untouched.layer = copy.leaves.values()

    def evicted(self) -> None:
        """Forget the parameters of the layer that was called."""
        self._untouched.layer = ()

    def run(self, request: Request, copy: DeviceCopy) -> Any:
        """Run a layer call, and forget it."""
        outputs, call = self._record(request, copy)
        if call is not None:
            self._runtime.layer_calls.discard(call)
        return outputs

    def _record(self, request: Request, copy: DeviceCopy) -> tuple[Any, RecordedCall | None]:
        """Run a layer call; return its outputs, and the record to propagate through it."""
        self._number += 1
        return self._runtime.layer_calls.forward(
            request, self._number - 1, copy.leaves, self._inter_layer, self._runtime.random.snapshot, self._rows
        )

    @contextmanager
    def _made_up_gradients(self, call: RecordedCall) -> Iterator[list[GradientTarget]]:
        """Let `call` be propagated through while open. In the end, the list names the targets that got a gradient."""
        reached: list[GradientTarget] = []
        for made in filter(None, call.output_gradients):
            self._make_up(made)
        try:
            yield reached
        finally:
            self._runtime.random.switch(self)
            reached += [target for target in call.targets if target is not None and target.take() is not None]

    def _make_up(self, target: TensorGradient) -> None:
        target.gradient = torch.ones(target.shape, dtype=target.dtype, device=self.device.torch_device)
