"""The gradients that wait for their update: added up over packs, and scaled for the optimizer.

Those on the host are `HostGradients`, those of resident packs `ResidentPacks`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from harmony_ds.distributed import SINGLE_PROCESS, SingleProcess


class GradientSums(ABC):
    """Gradients by parameter, added up over packs. Knows no thread.

    Attributes:
        norms: those that have been computed, by parameter.
        received: the parameters of which a gradient has come, and was not discarded, since the last `pop_received`.
    """

    def __init__(self, trains: Callable[[str], bool], world: SingleProcess = SINGLE_PROCESS) -> None:
        """Begin without gradients.

        Args:
            trains: whether the optimizer has a parameter, by name; gradients of others are not used.
            world: the processes that the gradients' norms are summed over.
        """
        self._trains = trains
        self.norms: dict[str, Tensor] = {}
        self.received: set[str] = set()
        self.world = world

    @abstractmethod
    def gradient(self, name: str) -> Tensor | None:
        """Return the gradient of `name`, its parts added up: the tensor itself, in the accumulation dtype; None: none."""

    @abstractmethod
    def clear_gradients(self, names: Iterable[str] | None = None) -> None:
        """Drop the gradients of `names`, or (after a failure, or an overflow) all of them and their norms."""

    def pop_received(self) -> set[str]:
        """Return `received`, and begin anew."""
        received, self.received = self.received, set()
        return received

    @torch.no_grad()
    def compute_norms(self, names: Iterable[str]) -> None:
        """Compute the norms of the gradients of `names`, to which nothing more is added."""
        for name, total in self._trained(names):
            self.norms[name] = self._norm_of(name, total)

    def _norm_of(self, name: str, total: Tensor) -> Tensor:
        return self.world.norm_part(total)

    def _scale(self, name: str, gradient: Tensor, coefficient: Tensor | None, norms_known: bool) -> None:
        """Scale `gradient`, that of `name` in the dtype that the optimizer takes, in place.

        Args:
            coefficient: factor of all gradients (on the host, 0-dim); None: 1.
            norms_known: whether their norms are; otherwise this one's is computed, for reports.
        """
        if not norms_known:
            self.norms[name] = self._norm_of(name, gradient)
        if coefficient is not None:
            gradient.mul_(coefficient.item())

    def discard(self, names: Iterable[str]) -> None:
        """Drop the gradients of `names`, and their norms: they will not be used."""
        self.clear_gradients(names)
        for name in names:
            self.norms.pop(name, None)

    def pop(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Remove the gradients of `names`, and return copies of them on the host."""
        on_host = self.copy_to_host(names)
        self.discard(names)
        return on_host

    @torch.no_grad()
    def copy_to_host(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return copies on the host of the gradients of `names`."""
        on_host: dict[str, Tensor] = {}
        for name in names:
            gradient = self.gradient(name)
            if gradient is not None:
                on_host[name] = gradient.to("cpu", copy=True)
        return on_host

    def _trained(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the gradients of those of `names` that the optimizer has."""
        for name in names:
            total = self.gradient(name)
            if total is not None and self._trains(name):
                yield name, total
