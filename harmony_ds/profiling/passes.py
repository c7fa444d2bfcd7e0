"""Forward passes with gradients that run by themselves, layer by layer, and leave nothing behind.

No gradient, also of what the program has outside the model, no random number and no change of a buffer or an attribute
outlives them. All that measures layer calls runs the model with them, and observes their calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from harmony_ds.decomposer.find import Layer
from harmony_ds.model.checkpointing import checkpoints_bypassed
from harmony_ds.model.graph_cut import explaining_errors, explaining_errors_in_forward, on_one_thread, reachable_nodes
from harmony_ds.model.inter_layer import InterLayerGraph
from harmony_ds.model.intercept import Request, handled_by
from harmony_ds.model.recorded_call import RecordedCall
from harmony_ds.model.targets import GradientSum, GradientTarget
from harmony_ds.model.token_tensor import TokenTensor
from harmony_ds.model.untouched import Untouched, untouched
from harmony_ds.offload.device_copies import DeviceCopy
from harmony_ds.profiling.sample import Sample
from harmony_ds.runtime.runtime import Runtime
from harmony_ds.runtime.streaming import LayerCallObserver, RunCall, Streamer
from harmony_ds.scheduler.rows import WHOLE_CALLS, Rows


class ModelPasses(LayerCallObserver):
    """Forward passes of one model with gradients, their outputs cut at layer calls as in a step. Nothing is left of them.

    Attributes:
        device: where layers run.
        rows: how layer calls are cut into slices.
        untouched: gradients of other tensors than the model's, set aside while a context is open.
        inter_layer: the code between the layer calls of the current pass.
        call_number: how many calls of the current pass have been recorded.
    """

    def __init__(
        self, runtime: Runtime, layers: tuple[Layer, ...], unlayered: tuple[str, ...], rows: Rows = WHOLE_CALLS
    ) -> None:
        """Run with `unlayered` parameters, as far as they are known, and with layer calls cut into `rows`."""
        self.device = runtime.device
        self._runtime = runtime
        self._unlayered = unlayered
        self._streamer = Streamer(runtime, layers)
        self.rows = rows
        self.untouched = Untouched()
        self.inter_layer = InterLayerGraph()
        self.call_number = 0
        self._weights_of_head: Collection[Tensor] = ()

    # ---- passes

    def loss(self, sample: Sample) -> Tensor | None:
        """Return the loss of one forward pass, on the host. What a pass leaves in buffers, the next one finds."""
        loss = sample.surrogate_loss(self.forward(sample))
        # On the host, since it waits for the step, whose device memory is planned.
        return None if loss is None else loss.detach().to("cpu", copy=True)

    @contextmanager
    def opened(
        self, run_call: RunCall | None = None, observers: Sequence[LayerCallObserver] = ()
    ) -> Iterator[DeviceCopy]:
        """Open a context for forward passes: unlayered parameters are on the device, and modules hold no host parameters.

        Random numbers, buffers and attributes are restored in the end.

        Args:
            run_call: runs each layer call (None: `run_and_discard`).
            observers: told of the stages of each layer call.
        """
        installation, calls = self._runtime.installation, self._runtime.layer_calls
        installation.touched.clear()
        checked, calls.checks_recomputation = calls.checks_recomputation, False
        self._runtime.random.open()
        try:
            with (
                self._runtime.contract.reverting(),
                untouched() as self.untouched,
                self._streamer.opened(
                    self._unlayered, run_call or self.run_and_discard, [self, *observers]
                ) as unlayered,
                installation.installed(unlayered.leaves, keep_buffers=False),
                on_one_thread(),
            ):
                self.untouched.unlayered = unlayered.leaves.values()
                yield unlayered
        finally:
            self._runtime.random.close()
            calls.checks_recomputation = checked
            # They hold weights, which have left the device.
            self.untouched, self.inter_layer, self._weights_of_head = Untouched(), InterLayerGraph(), ()

    def forward(self, sample: Sample) -> Any:
        """Run one forward pass of `sample`, on a random stream of its own; return the model's outputs.

        Raises:
            UnseenError: it draws from generators that it was not known to draw from.
        """
        self.call_number = 0
        self.inter_layer = InterLayerGraph()
        self.release_head()
        self._runtime.random.start(self, sample.seed)
        settings = self._runtime.contract.settings
        settings.begin()
        with checkpoints_bypassed(), handled_by(self), torch.enable_grad(), explaining_errors_in_forward():
            outputs = sample.call(sample.inputs)
        settings.end_pass()
        self._runtime.random.check_drawn()
        return outputs

    def call(self, request: Request) -> Any:
        """Run one layer call at once; note what the code before it, and the layer, have set on modules."""
        settings = self._runtime.contract.settings
        settings.note_arrival(request.layer)
        outputs = self._streamer.call(request)
        settings.note_return(request.layer)
        return outputs

    # ---- one layer call

    def weights_arrived(self, copy: DeviceCopy) -> None:
        """Let the parameters of the layer that is called get gradients."""
        self.untouched.layer = copy.leaves.values()

    def call_finished(self) -> None:
        """Forget the parameters of the layer that was called, unless its output is computed with the loss."""
        self.untouched.layer = self._weights_of_head

    def run_and_discard(self, request: Request, copy: DeviceCopy) -> Any:
        """Run a layer call without keeping what is needed to propagate through it; return its outputs."""
        head = self.open_head(request, copy, copy.leaves.drop_gradients)
        if head is not None:
            return head
        outputs, recorded = self.record(request, copy)
        if recorded is not None:
            self._runtime.layer_calls.discard(recorded)
        return outputs

    def record(self, request: Request, copy: DeviceCopy) -> tuple[Any, RecordedCall | None]:
        """Run a layer call; return its outputs, and the record to propagate through it (None: nothing is trained)."""
        number = self.call_number
        self.call_number += 1
        return self._runtime.layer_calls.forward(
            request, number, copy.leaves, self.inter_layer, self._runtime.random.snapshot, self.rows
        )

    def open_head(self, request: Request, copy: DeviceCopy, gather: Callable[[], None]) -> TokenTensor | None:
        """Return the output of a head, which is computed with the loss, with its weights on the device until then.

        None: the call is to be run now. `gather`: see `LayerCalls.open_head`.
        """
        head = self._runtime.layer_calls.open_head(request, copy.leaves, gather)
        if head is not None:
            self.call_number += 1
            self._streamer.keep(copy)
            self._weights_of_head = copy.leaves.values()
        return head

    def release_head(self) -> None:
        """Evict the weights of the head of the last pass, whose output and loss are not used any more."""
        self._streamer.evict_kept()
        self._weights_of_head = self.untouched.layer = ()

    def switch_to_own_random_numbers(self) -> None:
        """Go on with the pass's random numbers after those of a replayed call."""
        self._runtime.random.switch(self)

    # ---- gradients

    def propagate_loss(self, loss: Tensor | None) -> None:
        """Propagate from a pass's loss through the code after its last call."""
        if loss is None or not loss.requires_grad:
            return
        with explaining_errors():
            was_there = self.untouched.set_aside(reachable_nodes([get_gradient_edge(loss).node]))
            keeps_graph = not self.inter_layer.is_trivial and self.inter_layer.touches(loss)
            loss.backward(retain_graph=keeps_graph or was_there)

    @contextmanager
    def made_up_gradients(self, call: RecordedCall) -> Iterator[list[GradientTarget]]:
        """Let `call` be propagated through while open. In the end, the list names the targets that got a gradient."""
        reached: list[GradientTarget] = []
        for output_gradient in call.output_gradients:
            if output_gradient is not None:
                self.make_up(output_gradient)
        try:
            yield reached
        finally:
            self.switch_to_own_random_numbers()
            reached += [target for target in call.targets if target is not None and target.pop() is not None]

    def make_up(self, target: GradientSum) -> None:
        """Give `target` a gradient of ones."""
        target.gradient = torch.ones(target.shape, dtype=target.dtype, device=self.device.torch_device)
