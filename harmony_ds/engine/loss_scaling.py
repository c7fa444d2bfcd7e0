"""Loss scaling for fp16, by the rules of DeepSpeed's `DynamicLossScaler` (0.19, runtime/fp16/loss_scaler.py).

Not DeepSpeed's class itself: it needs a process group to log an overflow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from harmony_ds.config.settings import SCALER_NAMES
from harmony_ds.errors import EngineFailedError, UsageError

_FACTOR = 2.0


class LossScaler:
    """The factor that losses are multiplied with, which follows overflows. Without fp16 it is always 1."""

    def __init__(self, settings: Any) -> None:
        self._settings = settings
        self._dynamic = settings is not None and settings.loss_scale <= 0
        self.scale = 1.0
        self._hysteresis = 0 if settings is None else settings.hysteresis
        self._step, self._last_overflow = 0, -1
        self._scales = False  # inside engine.backward
        self._announced = 0  # backward passes of the caller's own, from losses that it has scaled
        if settings is not None:
            self.scale = float(2**settings.initial_scale_power) if self._dynamic else settings.loss_scale

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
        """Raise UsageError in a backward pass from a loss that was not scaled."""
        if self._scales or self._settings is None:
            return
        if self._announced == 0:
            raise UsageError(
                "Loss scaling is required for this configuration, but backward() was called directly without scaling the "
                "loss. Please use one of the following: 1. engine.backward(loss) 2. engine.scale(loss).backward()"
            )
        self._announced -= 1

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state that the scale of later steps depends on; None if it never changes."""
        if not self._dynamic:
            return None
        return {
            "scale": self.scale,
            "hysteresis": self._hysteresis,
            "step": self._step,
            "last_overflow": self._last_overflow,
            "settings": {name: getattr(self._settings, name) for name in SCALER_NAMES},
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from `state` (None: there is none), by the rules of this ds_config, which may fix the scale."""
        if state is not None and self._dynamic:
            self.scale, self._hysteresis = float(state["scale"]), int(state["hysteresis"])
            self._step, self._last_overflow = int(state["step"]), int(state["last_overflow"])

    def update(self, overflow: bool) -> None:
        """Adapt the scale after a step; `overflow`: its gradients held inf or NaN.

        Raises:
            EngineFailedError: an overflow at the smallest scale.
        """
        settings = self._settings
        if settings is None or not self._dynamic:
            return
        if overflow:
            self._shrink(settings)
            self._last_overflow = self._step
        else:
            clean = self._step - self._last_overflow - 1
            grows = clean > 0 and clean % settings.loss_scale_window == 0
            if grows or settings.consecutive_hysteresis:
                self._hysteresis = settings.hysteresis
            if grows:
                self.scale *= _FACTOR
        self._step += 1

    def _shrink(self, settings: Any) -> None:
        if settings.hysteresis > 1 and self._hysteresis > 1:
            self._hysteresis -= 1
            return
        if self.scale == settings.min_loss_scale:
            raise EngineFailedError(
                "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."
            )
        self.scale = max(self.scale / _FACTOR, settings.min_loss_scale)
