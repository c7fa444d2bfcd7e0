"""Gradients between two steps, as the program may read and change them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from harmony_ds.offload.host_store import bypass_hooks
from harmony_ds.step.engine_state import EngineState
from harmony_ds.step.loss_scaling import LossScaler
from harmony_ds.step.used_gradients import UsedGradient


class StepGradients:
    """The gradients that have accumulated, shown unscaled, with the program's changes to them.

    Attributes:
        used: names of gradients that `optimizer.step()` by hand has used, and the program has not dropped.
    """

    def __init__(self, state: EngineState, scaler: LossScaler) -> None:
        self._store, self._optimizer = state.store, state.host_optimizer
        self._executor = state.executor
        self._own, self._updater = state.runtime.user_gradients, state.runtime.updater
        self._sums = (state.runtime.host_gradients, state.runtime.resident_packs)
        self._scaler = scaler
        # Sums of the engine that the program has been given: divided by the loss scale since, and perhaps changed.
        self._shown: set[str] = set()
        # Gradients of the program's own that are of a loss times the loss scale; and those of them that are divided by it
        # since the program has been given them.
        self._scaled: set[str] = set()
        self._shown_own: set[str] = set()
        self.used: set[str] = set()

    @torch.no_grad()
    def read(self, name: str, has_accumulated: bool) -> Tensor | None:
        """Return the `.grad` of `name`, which is used as the program changes it.

        Args:
            has_accumulated: whether gradients of the open step wait for their updates.
        """
        total: Tensor | None = self._show(name) if has_accumulated else None
        if not has_accumulated and name in self.used:
            total = UsedGradient.stand_in_for(name, self._store.parameters[name])
        own = self._show_own(name)
        if total is None or own is None:
            return own if total is None else total
        total.add_(own.to(total.device))
        self.forget_own(name)
        self._own.put(name, None)
        return total

    def _show(self, name: str) -> Tensor | None:
        gradient = self._executor.accumulated_gradient(name)
        if gradient is not None and name not in self._shown:
            self._shown.add(name)
            if self._scaler.scale != 1.0:
                gradient.div_(self._scaler.scale)
        return gradient

    def _show_own(self, name: str) -> Tensor | None:
        gradient = self._own.find(name)
        if gradient is not None and name in self._scaled - self._shown_own:
            self._shown_own.add(name)
            gradient.div_(self._scaler.scale)
        return gradient

    @contextmanager
    def receiving_scaled(self) -> Iterator[None]:
        """Note that what parameters outside the engine's calls receive while open is of a loss times the loss scale."""
        if self._scaler.scale == 1.0:
            yield
            return
        self._hide_own()
        unscaled = self.unscaled()
        yield
        self._scaled.update(self._own.names() - unscaled)

    def unscaled(self) -> set[str]:
        """Return the names of the program's own gradients that are not known to be scaled."""
        return self._own.names() - self._scaled

    def forget_own(self, name: str) -> None:
        """Note that the program replaces its own gradient of `name`."""
        self._scaled.discard(name)
        self._shown_own.discard(name)

    @torch.no_grad()
    def _hide_own(self) -> None:
        for name in self._shown_own:
            gradient = self._own.find(name)
            if gradient is not None:
                gradient.mul_(self._scaler.scale)
        self._shown_own.clear()

    @torch.no_grad()
    def hide(self) -> None:
        """Scale those that were shown again, before others are added to them or they are used."""
        self._hide_own()
        for name in self._shown if self._scaler.scale != 1.0 else ():
            gradient = self._executor.accumulated_gradient(name)
            if gradient is not None:
                gradient.mul_(self._scaler.scale)
        if self._shown:
            self._updater.compute_norms(tuple(self._shown))
            self._shown.clear()

    def discard(self, has_accumulated: bool) -> None:
        """Discard all gradients; `has_accumulated`: some of the open step wait for their updates."""
        if has_accumulated:
            self._executor.discard_accumulated(self._store.parameters)
        self._own.pop(self._store.parameters)
        self._scaled.clear()
        self._shown_own.clear()

    def note_used(self, by_hand: bool) -> None:
        """Note that the step which is over has used its gradients; `by_hand`: the program has to drop them."""
        self._scaled.clear()
        stepped = self.pop_received()
        if by_hand and self._optimizer is not None:
            with bypass_hooks():
                self.used.update(stepped.intersection(self._optimizer.trained))

    def pop_received(self) -> set[str]:
        """Remove and return the names of parameters that have received gradients, which are used or discarded now."""
        received: set[str] = set()
        for sums in self._sums:
            received |= sums.pop_received()
        return received

    # ---- optimizer.step() and optimizer.zero_grad() by hand

    def pop_unmanaged(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Remove and return the gradients of parameters that the optimizer does not have."""
        assert self._optimizer is not None
        popped = []
        for parameter in (p for name, p in self._store.parameters.items() if not self._optimizer.trains(name)):
            gradient = parameter.grad if parameter.requires_grad else None
            if gradient is not None:
                popped.append((parameter, gradient.to("cpu", parameter.dtype, copy=True)))
                parameter.grad = None
        return popped

    def zero_by_hand(self, set_to_none: bool) -> None:
        """Zero the gradients of parameters whose master the optimizer has in their place."""
        assert self._optimizer is not None
        for name in self._optimizer.trained:
            parameter = self._store.parameters[name]
            if parameter is not self._store.masters[name] and parameter.grad is not None:
                if set_to_none:
                    parameter.grad = None
                else:
                    parameter.grad.zero_()
