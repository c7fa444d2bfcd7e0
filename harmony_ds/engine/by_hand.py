"""The user's optimizer while an engine steps it: `optimizer.step()` by hand means what it always means."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from harmony_ds.errors import UnsupportedError


class OptimizerByHand:
    """Puts a `step` on the optimizer object that lets its engine update; learning-rate schedulers may wrap it."""

    def __init__(self, optimizer: torch.optim.Optimizer, step: Callable[[], None], finish: Callable[[], None]) -> None:
        """`step` and `finish`: what `optimizer.step()` does, and what must be done before its state is replaced. Neither
        keeps the engine alive.
        """
        self._optimizer = optimizer
        self._own = optimizer.__dict__.get("step")  # a scheduler's wrapper

        def step_by_hand(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
            if closure is not None:
                raise UnsupportedError(
                    "optimizer.step(closure) evaluates the loss again while it steps, which an engine that updates layer "
                    "by layer cannot do: call engine.backward(loss), then step() without a closure."
                )
            step()

        if self._own is not None:
            step_by_hand._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.__dict__["step"] = MethodType(step_by_hand, optimizer)
        # State that is loaded takes the place of what pending updates still write into.
        self._hook = optimizer.register_load_state_dict_pre_hook(lambda *_: finish())

    def remove(self) -> None:
        """Gives the optimizer its own `step` back."""
        self._hook.remove()
        self._optimizer.__dict__.pop("step", None)
        if self._own is not None:
            self._optimizer.__dict__["step"] = self._own
