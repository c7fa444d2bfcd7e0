"""Gradients of a step that has run in part, which wait for their update: on the host, or on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from harmony_ds.offload.residency import DeviceCopy
from harmony_ds.runtime.parts import Parts


class GatheredGradients:
    """Keeper of these gradients: finds, moves, and drops them."""

    def __init__(self, parts: Parts, unlayered: Callable[[], Sequence[DeviceCopy]]) -> None:
        """Take `unlayered`, which gives the copy of the unlayered parameters while it is on the device."""
        self._parts = parts
        self._unlayered = unlayered
        self._moved = False  # to the host, of packs that are updated on the device, since a plan was exchanged

    def receive_own(self, names: tuple[str, ...], measure: bool = False) -> None:
        """Take what the user's own backward passes left on the host parameters `names`.

        Args:
            measure: takes the norms of their gradients anew if so.
        """
        parts = self._parts
        own = parts.user_gradients.pop(names)
        if own:
            # Copies: the program may write into its tensors right after the step.
            parts.updater.receive(parts.gradients.on_host({name: g.clone() for name, g in own.items()}))
            if measure:
                parts.updater.measure(names)

    def to_host(self) -> None:
        """Move the gradients of resident packs to the host, since the packs leave the device."""
        parts = self._parts
        kept = parts.device_store.take_gradients()
        if kept:
            parts.updater.receive(parts.gradients.on_host(kept))
            parts.updater.measure(tuple(kept))
            self._moved = True

    def to_device(self, names: tuple[str, ...]) -> None:
        """Move gradients of `names`, which are updated on the device, there from the host."""
        on_host = self._parts.updater.pop_gradients(names) if self._moved else {}
        for gradients in (on_host, self._parts.user_gradients.pop(names)):
            for name, gradient in gradients.items():
                self._parts.device_store.add_gradient(name, gradient)

    def find(self, name: str) -> Tensor | None:
        """Return the gradient of `name`: the tensor itself."""
        store = self._parts.device_store
        if self._moved and store.leaves((name,)):
            self.to_device((name,))
        for copy in self._unlayered():
            if (found := self._parts.residency.gradient(copy, name)) is not None:
                return found
        found = store.gradient(name)
        return self._parts.updater.gradient(name) if found is None else found

    def drop(self, names: Iterable[str]) -> None:
        """Drop the gradients of `names`."""
        self._parts.gradients.discard_received(names)
        self._parts.updater.drop_gradients(tuple(names))
        self._parts.device_store.clear_gradients(names)
        for copy in self._unlayered():
            for name in names:
                self._parts.residency.clear_gradient(copy, name)

    def used(self) -> None:
        """End the step."""
        self._moved = False
