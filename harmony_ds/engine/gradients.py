"""Gradients between backward and step, for whoever asks: the group runs up to its norm, and step() does the rest."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import Tensor

from harmony_ds.errors import UnsupportedError, UsageError
from harmony_ds.parameters import Gradients

if TYPE_CHECKING:
    from harmony_ds.engine.core import HarmonyEngine


class EngineGradients(Gradients):
    """Those of one engine, which the model's parameters do not keep alive."""

    def __init__(self, engine: HarmonyEngine) -> None:
        self._reference = weakref.ref(engine)

    @property
    def _engine(self) -> HarmonyEngine:
        engine = self._reference()
        if engine is None:
            raise UsageError("the engine of this parameter is gone.")
        return engine

    @property
    def scale(self) -> float:  # type: ignore[override]
        """The loss scale."""
        return self._engine.cur_scale

    def finish(self) -> None:
        """Makes every weight, master and state on the host true."""
        self._engine.finish_updates()

    def gradient(self, name: str) -> Tensor | None:
        """The gradient of `name`, itself, times the loss scale; None if no backward pass came there.

        Raises:
            UsageError: the group is not complete, so that gradients are not either.
            UnsupportedError: layers are updated as soon as their gradients arrive.
        """
        engine, parts = self._engine, self._engine._assembly.parts
        if not engine._settings.deferred_update:
            raise UnsupportedError(
                "with gradient_clipping 0 each layer is updated as soon as its gradient arrives, so that gradients are "
                "never there together. To look at them, set gradient_clipping to a norm that is never reached, such as 1e9."
            )
        if engine.managed_gradient_accumulation() and not engine.is_gradient_accumulation_boundary():
            raise UsageError(
                "a group's gradients are there between the backward() of its last micro-batch and step(): "
                f"{len(engine._group)} of {engine.gradient_accumulation_steps()} micro-batches are queued now. Their norm "
                "after the step is engine.get_global_grad_norm()."
            )
        if not engine._propagate():
            return None
        assert parts.updater is not None
        found = parts.updater.gradient(name)
        return parts.device_store.gradient(name) if found is None else found

    def changed(self, name: str) -> None:
        """The norm of `name` is taken again (on the device it has not been taken yet)."""
        updater = self._engine._assembly.parts.updater
        assert updater is not None
        if updater.gradient(name) is not None:
            updater.measure((name,))
