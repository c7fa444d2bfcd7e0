"""Gradients that the program's own backward passes leave on `.grad` of host parameters."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from harmony_ds.offload.host_store import HostStore, bypass_hooks
from harmony_ds.optim.updater import Updater


class UserGradients:
    """Finds and removes the program's gradients, told from those that an update has put on `.grad`.

    Attributes:
        popped: the number of those removed so far.
    """

    def __init__(self, store: HostStore, updater: Updater) -> None:
        self._store = store
        self._updater = updater
        self.popped = 0

    def exist(self, names: Iterable[str] | None = None) -> bool:
        """Return whether any of `names` (None: any parameter) has such a gradient."""
        return any(self.find(name) is not None for name in self._with_gradient(names))

    def pop(self, names: Iterable[str]) -> dict[str, Tensor]:
        taken: dict[str, Tensor] = {}
        for name in self._with_gradient(names):
            if (gradient := self.find(name)) is not None:
                taken[name] = gradient
                with bypass_hooks():
                    self._store.parameters[name].grad = None
        self.popped += len(taken)
        return taken

    def _with_gradient(self, names: Iterable[str] | None) -> list[str]:
        parameters = self._store.parameters
        with bypass_hooks():
            return [name for name in (parameters if names is None else names) if parameters[name].grad is not None]

    def find(self, name: str) -> Tensor | None:
        with bypass_hooks():  # asks first: an update that ends in between drops its own
            return None if self._updater.is_updating(name) else self._store.parameters[name].grad

    def put(self, name: str, value: Tensor | None) -> None:
        if not self._updater.is_updating(name):
            with bypass_hooks():
                parameter = self._store.parameters[name]
                parameter.grad = None if value is None else value.to(parameter.device)  # it may be of a resident pack
