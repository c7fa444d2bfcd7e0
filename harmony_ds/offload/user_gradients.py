"""What backward passes of the program's own leave on host parameters, where an update puts its gradients, too."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from harmony_ds.offload.host_store import HostStore, ungated
from harmony_ds.offload.updater import Updater


class UserGradients:
    """Finds them, and takes them away."""

    def __init__(self, store: HostStore, updater: Updater | None) -> None:
        self._store = store
        self._updater = updater

    def exist(self, names: Iterable[str] | None = None) -> bool:
        """Whether `take` would find any of `names` (None: of any parameter)."""
        parameters = self._store.parameters
        with ungated():
            found = [name for name in (parameters if names is None else names) if parameters[name].grad is not None]
        return not all(map(self.is_updating, found))

    def pop(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Those of `names`, which are taken from there."""
        taken: dict[str, Tensor] = {}
        with ungated():
            for name in names:
                parameter = self._store.parameters[name]
                if parameter.grad is not None and not self.is_updating(name):
                    taken[name], parameter.grad = parameter.grad, None
        return taken

    def find(self, name: str) -> Tensor | None:
        """That of `name`, if there is one."""
        with ungated():
            return None if self.is_updating(name) else self._store.parameters[name].grad

    def put(self, name: str, value: Tensor | None) -> None:
        """Puts `value` in its place."""
        if not self.is_updating(name):
            with ungated():
                self._store.parameters[name].grad = value

    def is_updating(self, name: str) -> bool:
        """Whether what is on the `.grad` of `name` is an update's."""
        return self._updater is not None and self._updater.is_updating(name)
