"""The methods that a training loop calls: forward, backward, step, train_batch; and those that run without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from harmony_ds.engine.open_step import OpenStep
from harmony_ds.engine.step_log import StepLog
from harmony_ds.engine.training import Training
from harmony_ds.errors import BatchError, UsageError
from harmony_ds.model.intercept import is_between_layers
from harmony_ds.step.division import divided
from harmony_ds.step.inputs import Arguments
from harmony_ds.step.pending import PendingTensor
from harmony_ds.step.ticket import LossFunction, QueuedMicroBatch


class Loop:
    """The loop's calls: hands micro-batches to the open step, one by one or a group at once, and finds its boundary."""

    def __init__(self, training: Training, open_step: OpenStep, log: StepLog) -> None:
        self._training, self._open, self._log = training, open_step, log
        self._model, self._scaler = training.model, training.scaler
        self._runner, self._world = training.assembly.runner, training.assembly.world
        self._boundary: bool | None = None  # as the caller has set it, in the place of counting
        self.inside_no_sync_ctxt = False

    # ---- one micro-batch at a time

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs for one micro-batch. While gradients are on, outputs with a loss stay pending.

        Raises:
            BatchError: there is no tensor among the arguments.
            DoesNotFitError: nothing fits this micro-batch in the device memory budget.
        """
        if self._is_running():
            return self._model(*args, **kwargs)
        if not torch.is_grad_enabled():
            with self.streaming():
                return self._open.parts.call(self._model, Arguments(args, kwargs))
        with self._world.reporting_failures():
            self._open.apply_user_edits()
            return self._open.group.add(args, kwargs)

    def _is_running(self) -> bool:
        """Return whether the caller is a function that this engine runs, such as `compute_loss`."""
        is_running = self._training.assembly.runtime.contract.is_running
        return is_running and is_between_layers() and not self._runner.is_streaming

    # ---- propagating back: by the engine, or by the caller from a loss that the engine has scaled.
    # `LossScaler.check_scaled` is called in every backward pass, of `loss.backward()` too.

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Propagate back from `loss`, or note that the group has to when it runs.

        Returns:
            The loss divided by the number of accumulation steps (unless not `scale_wrt_gas`).
        """
        self._training.check_can_propagate()
        if self._is_running():
            raise UsageError(
                "engine.backward() was called within a function that the engine runs (compute_loss): return the loss "
                "instead, and the engine propagates back from it."
            )
        _need_scalar(
            loss, "loss must be a scalar tensor. If you need to pass output gradients, backward() of output tensors"
        )
        if isinstance(loss, PendingTensor):
            for ticket in loss.node.tickets:
                ticket.check_not_propagated()
        self._training.count_backwards()
        if scale_wrt_gas:
            loss = loss / self._training.settings.gradient_accumulation_steps()
        scaled = self._scaler.scaled(loss)
        with self._scaler.backward(), divided():
            if isinstance(scaled, PendingTensor):
                scaled.backward()
            else:
                self._open.group.propagating_from_real()
                torch.autograd.backward(scaled, retain_graph=retain_graph)
        return loss.detach()

    def scale(self, loss: Tensor) -> Tensor:
        """Return `loss` times the loss scale, for the caller's own `backward()` (instead of `engine.backward(loss)`)."""
        self._training.require_optimizer("scale")
        _need_scalar(
            loss, "loss must be a scalar tensor with grad_fn. For non-scalar tensors, use tensor.backward(grad)"
        )
        self._scaler.announce_backward()
        return self._scaler.scaled(loss)

    # ---- the boundary

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Run the queued group, update the weights, and step the scheduler, at an accumulation boundary."""
        if self.inside_no_sync_ctxt:
            raise UsageError("It is illegal to call Engine.step() inside no_sync context manager")
        self._training.require_optimizer("step")
        training = self._training
        if self._manages_accumulation() and not self.is_gradient_accumulation_boundary():
            training.count_call()
            return
        with self._world.reporting_failures():
            self._open.step(lr_kwargs or {})
        training.begin_group(training.micro_steps + 1)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next `step()` updates the weights."""
        if self._boundary is not None:
            return self._boundary
        if not self._manages_accumulation():
            return False
        called = self._training.micro_steps + 1 - self._training.group_began  # train_batch may end a group early
        return called % self._training.settings.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set the boundary by hand; a group ends at the next `step()` at a boundary, whatever its size."""
        if not self._manages_accumulation():
            raise UsageError(
                "set_gradient_accumulation_boundary() is not supported with managed_gradient_accumulation=False; "
                "the caller owns the boundary by calling step()"
            )
        self._boundary = is_boundary

    def _manages_accumulation(self) -> bool:
        return bool(self._training.settings.now.values["managed_gradient_accumulation"])

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Refuse `step()` inside. Allowed with every ZeRO stage: gradients are exchanged once a step anyway."""
        if self.inside_no_sync_ctxt:
            raise UsageError("no_sync context manager reentry is unsupported")
        self.inside_no_sync_ctxt = True
        try:
            yield
        finally:
            self.inside_no_sync_ctxt = False

    # ---- a group at once

    def train_batch(
        self,
        data_iter: Iterator[Any] | Sequence[Any] | None = None,
        loss_fn: LossFunction | None = None,
        compute_loss: Callable[[Any], Tensor] | None = None,
    ) -> Tensor:
        """Take an optimizer step over the next `gradient_accumulation_steps()` micro-batches of `data_iter`.

        Args:
            data_iter: yields mappings (keyword arguments), tuples (positional ones) or single arguments; a list of them
                is one step's. If it ends early, the step is taken over what it gave, and the mean is over that.
            loss_fn: from the model's outputs to a scalar (by default, the loss among them).
            compute_loss: from a micro-batch as `data_iter` yields it, on the device, to a scalar, by its own calls of the
                engine; instead of one call and `loss_fn`.

        Returns:
            The mean loss, detached, 0-dim, on the device.

        Raises:
            StopIteration: `data_iter` is at its end.
        """
        self._training.require_optimizer("train_batch")
        if loss_fn is not None and compute_loss is not None:
            raise UsageError(
                "train_batch() takes loss_fn, which is given the outputs of one call, or compute_loss, which calls the "
                "engine itself: not both."
            )
        if queued := len(self._open.group):
            raise BatchError(
                f"micro-batches of engine(...) are still queued ({queued}): call backward() and step() for them before "
                "train_batch()."
            )
        with self._world.reporting_failures():
            batches = self._training.data.take(data_iter, whole=compute_loss is not None)

            def queue() -> list[QueuedMicroBatch]:
                return [self._open.group.queue(batch, loss_fn, compute_loss) for batch in batches]

            losses = self._step_over(len(batches), queue)
            loss = self._world.mean(torch.stack(losses).mean())
        self._log.write_loss("train_loss", loss)
        return loss

    def train_group(
        self,
        batches: Sequence[Any],
        loss_fn: LossFunction,
        aside: Callable[[], AbstractContextManager[object]] = nullcontext,
        *,
        boundary: bool = True,
    ) -> list[Tensor]:
        """Take an optimizer step over `batches`, whose losses `loss_fn(batch)` computes with its own calls of the model.

        Args:
            batches: one for each micro-batch, however many.
            loss_fn: from a batch, on the device, to the scalar to propagate back from; the gradients are those of the sum.
                It is called on a thread of its own for each micro-batch, and a few times more to measure the model. It may
                call `engine.module` any number of times, with and without gradients, and must not call backward.
            aside: makes the context that measuring runs in, which may undo side effects of `loss_fn`.
            boundary: without it nothing is updated, and the gradients are part of the next step (one process alone).

        Returns:
            The losses, detached, 0-dim, on the device.
        """
        self._training.require_optimizer("train_group")
        queued = len(self._open.group) if self._open.group.is_open else 0
        if queued or not batches:
            raise BatchError(
                f"train_group() takes one or more micro-batches (here {len(batches)}) while none is queued (here {queued})."
            )
        if not boundary:
            self._world.refuse(
                "a group that ends without a step (a Trainer's data of unknown length that end within one, or a callback's "
                "on_pre_optimizer_step)"
            )
        given = [Arguments((batch,), {}) for batch in batches]
        queue = self._open.group.queue
        with self._world.reporting_failures():
            return self._step_over(1, lambda: [queue(one, call=loss_fn, aside=aside) for one in given], boundary)

    def end_group(self, *, clip: bool = True) -> None:
        """Take the optimizer step over the gradients that `train_group(..., boundary=False)` has left.

        Args:
            clip: whether gradients are clipped as the ds_config says; False: the program has done it.
        """
        with self._world.reporting_failures():
            self._open.step({}, clip=clip)
        self._training.begin_group(self._training.micro_steps)

    def _step_over(
        self, divisor: int, queue: Callable[[], list[QueuedMicroBatch]], boundary: bool = True
    ) -> list[Tensor]:
        """Take a step, or a part of one, over what `queue()` queues, backward from each loss over `divisor`; the losses."""
        training = self._training
        self._open.apply_user_edits()
        try:
            queued = queue()
            losses = [micro_batch.backward_from_loss(divisor, self._scaler.scale) for micro_batch in queued]
            training.count_backwards(len(queued))
            if boundary:
                self._open.step({})
            else:
                self._open.propagate()
        except BaseException:
            self._open.renew()
            training.rewind()
            raise
        training.begin_group(training.micro_steps + len(queued))
        return [loss.node.look().detach() for loss in losses]

    # ---- without gradients

    @torch.inference_mode(False)  # the model may be measured, with gradients
    def eval_batch(self, data_iter: Iterator[Any] | Sequence[Any], loss_fn: LossFunction | None = None) -> Tensor:
        """Return the mean loss over the next `gradient_accumulation_steps()` micro-batches, without gradients.

        The model is in evaluation mode meanwhile; every pack is swapped in once for all of them.
        """
        training = [(module, module.training) for module in self._model.modules()]
        with self._world.reporting_failures():
            batches = self._training.data.take(data_iter)
            self._model.eval()
            self._training.assembly.runtime.updater.wait_all()
            try:
                losses = self._open.group.evaluate(batches, loss_fn)
            finally:
                for module, mode in training:  # some may be frozen: `train()` would not leave them so
                    module.training = mode
            loss = self._world.mean(torch.stack(losses).mean())
        self._log.write_loss("eval_loss", loss)
        return loss

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own `generate`, its weights streamed layer by layer."""
        with self.streaming():
            return self._open.parts.call(self._model.generate, Arguments(args, kwargs))  # type: ignore[arg-type]

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Open a context to call the model's methods in, without gradients, under the device memory budget."""
        self._open.group.catch_up()
        with self._training.assembly.ledger.beside(), self._runner.streaming():
            yield


def _need_scalar(loss: object, message: str) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError(message)
