"""Loss scaling for fp16, by DeepSpeed's own scaler."""

from __future__ import annotations

from typing import Any

from harmony_ds.config import LossScale


class LossScaler:
    """The factor that losses take, and how it follows overflows. Without fp16 it is 1 for ever."""

    def __init__(self, settings: LossScale | None) -> None:
        self._scaler: Any = None
        if settings is None:
            return
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
        from deepspeed.runtime.fp16.loss_scaler import LossScaler as StaticLossScaler

        if settings.static > 0:
            self._scaler = StaticLossScaler(scale=settings.static)
        else:
            self._scaler = DynamicLossScaler(
                init_scale=2**settings.initial_scale_power,
                scale_window=settings.loss_scale_window,
                min_scale=settings.min_loss_scale,
                delayed_shift=settings.hysteresis,
                consecutive_hysteresis=settings.consecutive_hysteresis,
                raise_error_at_min_scale=True,
                dtype=None,
            )

    @property
    def scale(self) -> float:
        return 1.0 if self._scaler is None else float(self._scaler.loss_scale)

    def update(self, overflow: bool) -> None:
        """After each step: whether its gradients held inf or NaN.

        Raises:
            Exception: an overflow at the smallest scale (DeepSpeed's).
        """
        if self._scaler is not None:
            self._scaler.update_scale(overflow)
