"""Gradients between two steps, as the program may look at and change them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from harmony_ds.engine.assembly import Assembly
from harmony_ds.engine.loss_scaling import LossScaler
from harmony_ds.engine.used_gradients import UsedGradients
from harmony_ds.offload.host_store import ungated


class StepGradients:
    """Shows what has gathered, not scaled, and notes what the program does about it."""

    def __init__(self, assembly: Assembly, scaler: LossScaler) -> None:
        self._store = assembly.store
        self._optimizer = assembly.host_optimizer
        self._gathered = assembly.runner.executor.gathered
        self._own = assembly.parts.user_gradients
        self._sums = [sums for sums in (assembly.parts.gradients, assembly.parts.device_store) if sums is not None]
        self._scaler = scaler
        self._shown: set[str] = set()  # whoever saw them may have changed them
        self._stepped: set[str] = set()  # by the last step
        self.used = UsedGradients()
        """Those that `optimizer.step()` by hand has used."""

    @torch.no_grad()
    def read(self, name: str, gathered: bool) -> Tensor | None:
        """What is on the `.grad` of `name`: it is used as it is changed.

        Args:
            gathered: some gradients wait for their update.
        """
        total = self._show(name) if gathered else self.used.show(name, self._store.parameters[name])
        own = self._own.find(name)
        if total is None or own is None:
            return own if total is None else total
        total.add_(own)
        self._own.put(name, None)
        return total

    def _show(self, name: str) -> Tensor | None:
        """The gradient of `name` that waits for its update, to be looked at and changed; not scaled meanwhile."""
        gradient = self._gathered.find(name)
        if gradient is not None and name not in self._shown:
            self._shown.add(name)
            if self._scaler.scale != 1.0:
                gradient.div_(self._scaler.scale)
        return gradient

    @torch.no_grad()
    def hide(self) -> None:
        """Before others come to those that were shown, or they are used."""
        for name in self._shown if self._scaler.scale != 1.0 else ():
            gradient = self._gathered.find(name)
            if gradient is not None:
                gradient.mul_(self._scaler.scale)
        if self._shown:
            self._gathered.changed(self._shown)
            self._shown.clear()

    def drop(self, gathered: bool) -> None:
        """Drops all; `gathered`: some wait for their update."""
        if gathered:
            self._gathered.drop(self._store.parameters)
        self._own.pop(self._store.parameters)

    def step_passed(self) -> None:
        """An optimizer step is over."""
        self._stepped = set().union(*(sums.pop_received() for sums in self._sums))

    def take_others(self) -> list[tuple[nn.Parameter, Tensor]]:
        """What has gathered for parameters that the optimizer does not have, and takes it from there."""
        assert self._optimizer is not None
        taken = []
        for parameter in (p for name, p in self._store.parameters.items() if not self._optimizer.trains(name)):
            gradient = parameter.grad if parameter.requires_grad else None
            if gradient is not None:
                taken.append((parameter, gradient.to("cpu", parameter.dtype, copy=True)))
                parameter.grad = None
        return taken

    def note_used(self, others: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        """The last step, by hand, has used those of the optimizer's parameters; `others` stay, for another one to step."""
        assert self._optimizer is not None
        with ungated():
            self.used.add(name for name in self._optimizer.trained if name in self._stepped)
        for parameter, gradient in others:
            parameter.grad = gradient

    def zero_by_hand(self, set_to_none: bool) -> None:
        """`optimizer.zero_grad()`, where the optimizer has masters in the place of the parameters."""
        assert self._optimizer is not None
        for name in self._optimizer.trained:
            parameter = self._store.parameters[name]
            if parameter is not self._store.masters[name] and parameter.grad is not None:
                if set_to_none:
                    parameter.grad = None
                else:
                    parameter.grad.zero_()
