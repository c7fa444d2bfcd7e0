"""The gradients that the program's own backward passes leave on `.grad` of the model's parameters, outside the engine."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from harmony_ds.offload.host_store import HostStore, bypass_hooks
from harmony_ds.optim.updater import Updater


class UserGradients:
    """Access to the program's gradients. While an update of a parameter is pending, its `.grad` is the update's instead.

    Attributes:
        popped: how many gradients have been removed so far.
    """

    def __init__(self, store: HostStore, updater: Updater) -> None:
        self._store = store
        self._updater = updater
        self.popped = 0

    def exist(self, names: Iterable[str] | None = None) -> bool:
        """Return whether any of `names` (None: any parameter) has a gradient of the program."""
        return any(self.find(name) is not None for name in self._with_gradient(names))

    def names(self) -> set[str]:
        """Return the names of the parameters that have a gradient of the program."""
        return {name for name in self._with_gradient(None) if self.find(name) is not None}

    def pop(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Remove the program's gradients of `names`, and return them."""
        gradients: dict[str, Tensor] = {}
        for name in self._with_gradient(names):
            gradient = self.find(name)
            if gradient is not None:
                gradients[name] = gradient
                with bypass_hooks():
                    _set_gradient(self._store.parameters[name], None)
        self.popped += len(gradients)
        return gradients

    def _with_gradient(self, names: Iterable[str] | None) -> list[str]:
        parameters = self._store.parameters
        with bypass_hooks():
            # Packs have buffers, too, if these are quantized weights.
            known = parameters if names is None else [name for name in names if name in parameters]
            return [name for name in known if parameters[name].grad is not None]

    def find(self, name: str) -> Tensor | None:
        """Return the program's gradient of `name`; None: there is none."""
        # `is_updating` is asked before `.grad` is read: an update that ends in between has removed its own gradient.
        with bypass_hooks():
            return None if self._updater.is_updating(name) else self._store.parameters[name].grad

    def put(self, name: str, value: Tensor | None) -> None:
        """Set the program's gradient of `name`, unless an update of it is pending."""
        if not self._updater.is_updating(name):
            with bypass_hooks():
                parameter = self._store.parameters[name]
                on_host = None if value is None else value.to(parameter.device)  # from a resident pack, maybe
                _set_gradient(parameter, on_host)


def _set_gradient(parameter: Tensor, value: Tensor | None) -> None:
    """Set `parameter.grad`: it may be in fp32, as the engine's sums are, whatever the parameter's dtype."""
    parameter.grad = None
    dtype = torch.float32 if value is not None and value.dtype == torch.float32 else parameter.dtype
    if parameter.grad_dtype != dtype:
        parameter.grad_dtype = dtype
    parameter.grad = value
