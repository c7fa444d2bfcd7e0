"""Ways to propagate back from a loss: by the engine, or by the caller from a loss that the engine has scaled.

Whoever calls `loss.backward()` is seen by `LossScaler.check_scaled`, which the group calls for every backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harmony_ds.engine.optimizer import TrainedBy
from harmony_ds.engine.training import Training
from harmony_ds.errors import NotScalarError
from harmony_ds.stepping.pending import PendingLoss


class Propagation:
    """Divides losses by the accumulation steps, scales them, and propagates back, at once or when their group runs."""

    def __init__(self, training: Training, trained_by: TrainedBy) -> None:
        self._settings = training.settings
        self._counts = training.counts
        self._scaler = training.scaler
        self._trained_by = trained_by

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Propagates back from `loss`, or notes that the group has to when it runs.

        Returns:
            The loss divided by the number of accumulation steps (unless not `scale_wrt_gas`).
        """
        self._trained_by.need("backward")
        _need_scalar(
            loss, "loss must be a scalar tensor. If you need to pass output gradients, backward() of output tensors"
        )
        if isinstance(loss, PendingLoss):
            loss.check_not_propagated()
        self._counts.backwards += 1
        if scale_wrt_gas:
            loss = loss / self._settings.gradient_accumulation_steps()
        scaled = self._scaler.scaled(loss)
        with self._scaler.backward():
            if isinstance(scaled, PendingLoss):
                scaled.propagate()
            else:
                torch.autograd.backward(scaled, retain_graph=retain_graph)
        return loss.detach()

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the loss scale, for a `backward()` of the caller's own (instead of `engine.backward(loss)`)."""
        self._trained_by.need("scale")
        _need_scalar(
            loss, "loss must be a scalar tensor with grad_fn. For non-scalar tensors, use tensor.backward(grad)"
        )
        self._scaler.announce_backward()
        return self._scaler.scaled(loss)


def _need_scalar(loss: object, message: str) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise NotScalarError(message)
