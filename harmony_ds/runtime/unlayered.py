"""Parameters that no layer owns: on the device from the first task of a step to the last."""

from __future__ import annotations

from torch import Tensor, nn

from harmony_ds.offload.residency import DeviceCopy
from harmony_ds.runtime.parts import Parts
from harmony_ds.runtime.work import UNLAYERED


class Unlayered:
    """Their copy on the device."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.copy: DeviceCopy | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What is on the device."""
        return () if self.copy is None else tuple(self.copy.leaves)

    @property
    def leaves(self) -> dict[str, nn.Parameter]:
        """To compute with."""
        return {} if self.copy is None else self.copy.leaves

    def swap_in(self, names: tuple[str, ...]) -> None:
        """Brings `names`, unless they are there; the compute stream waits."""
        parts = self._parts
        if names and self.copy is None:
            if parts.updater is not None:
                parts.updater.wait(UNLAYERED)
            with parts.timeline.unlayered():
                self.copy = parts.residency.swap_in(names)
            parts.residency.follow(self.copy)
        if self.copy is not None:
            self.copy.wait(parts.device)

    def accumulate(self) -> None:
        """Adds what a backward pass has left to the gradients."""
        if self.copy is not None:
            self._parts.residency.accumulate(self.copy)

    def evict(self) -> None:
        """Frees the device of them."""
        copy, self.copy = self.copy, None
        if copy is not None:
            self._parts.residency.evict(copy)

    def gradient(self, name: str) -> Tensor | None:
        """What has gathered for `name` on the device; the tensor itself."""
        return None if self.copy is None else self._parts.residency.gradient(self.copy, name)

    def forget_gradient(self, name: str) -> None:
        """Drops it."""
        if self.copy is not None:
            self._parts.residency.forget_gradient(self.copy, name)
