"""Loss scaling for fp16 by DeepSpeed's own scaler, and the rule that no loss passes it by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from harmony_ds.distributed.process_group import init_distributed
from harmony_ds.errors import EngineFailedError, UsageError

_MOVING = ("cur_scale", "cur_hysteresis", "cur_iter", "last_overflow_iter")
"""What of a scaler's state its rules change; the rest is the ds_config's."""


def _deepspeeds(settings: Any) -> Any:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

    if settings is None or settings.loss_scale > 0:
        return LossScaler(1.0 if settings is None else settings.loss_scale)
    init_distributed()  # it asks for this process's rank before it logs an overflow
    return DynamicLossScaler(**settings.dynamic_loss_scale_args())


class LossScaler:
    """The factor that losses are multiplied with, which follows overflows. Without fp16 it is always 1.

    Attributes:
        deepspeed_scaler: DeepSpeed's scaler.
    """

    def __init__(self, settings: Any) -> None:
        self.deepspeed_scaler = _deepspeeds(settings)
        self._is_needed = settings is not None
        self._scales = False  # inside engine.backward
        self._announced = 0  # backward passes of the caller's own, from losses that it has scaled

    @property
    def scale(self) -> float:
        """The factor now."""
        return float(self.deepspeed_scaler.cur_scale) if self._is_needed else 1.0

    def scaled(self, loss: Tensor) -> Tensor:
        """Return `loss` times the scale."""
        return loss if self.scale == 1.0 else loss * self.scale

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Enter a backward pass from a scaled loss."""
        self._scales = True
        try:
            yield
        finally:
            self._scales = False

    def announce_backward(self) -> None:
        """Note that the caller got a scaled loss, to propagate back from by itself."""
        self._announced += 1

    def check_scaled(self) -> None:
        """Raise UsageError if a backward pass that begins is from a loss that was not scaled."""
        if self._scales or not self._is_needed:
            return
        if self._announced == 0:
            raise UsageError(
                "Loss scaling is required for this configuration, but backward() was called directly without scaling the "
                "loss. Please use one of the following: 1. engine.backward(loss) 2. engine.scale(loss).backward()"
            )
        self._announced -= 1

    def state_dict(self) -> dict[str, Any] | None:
        """Return the attributes of DeepSpeed's scaler; None if the scale never changes."""
        return dict(vars(self.deepspeed_scaler)) if self.deepspeed_scaler.dynamic else None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from `state` (None: there is none), by the rules of this ds_config, which may fix the scale."""
        if state is not None and self.deepspeed_scaler.dynamic:
            vars(self.deepspeed_scaler).update({name: state[name] for name in _MOVING})

    def update(self, overflow: bool) -> None:
        """Adapt the scale after a step; `overflow`: its gradients held inf or NaN.

        Raises:
            EngineFailedError: an overflow at the smallest scale.
        """
        if not self.deepspeed_scaler.dynamic:
            return
        try:
            self.deepspeed_scaler.update_scale(overflow)
        except Exception as error:
            raise EngineFailedError(str(error)) from error
