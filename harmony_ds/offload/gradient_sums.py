"""Gradients that wait for their update on host or device: added up over packs, measured, and scaled for the optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from harmony_ds.distributed import ALONE, SingleProcess


class GradientSums(ABC):
    """Gradients by parameter, added up over packs. Knows no thread.

    Attributes:
        received: the parameters that have received a gradient, which was not discarded, since `pop_received`.
    """

    def __init__(self, trains: Callable[[str], bool], world: SingleProcess = ALONE) -> None:
        """`trains`: tells whether the optimizer has a parameter; `world`: of the gradients' norms."""
        self._trains = trains
        self.norms: dict[str, Tensor] = {}
        self.received: set[str] = set()
        self.world = world

    @abstractmethod
    def gradient(self, name: str) -> Tensor | None:
        """Return the gradient of `name` that waits here, its parts added up: the tensor itself, in accumulation dtype."""

    @abstractmethod
    def clear_gradients(self, names: Iterable[str] | None = None) -> None:
        """Drop the gradients of `names`, or (after a failure, or an overflow) all of them and their norms."""

    def pop_received(self) -> set[str]:
        """Return what has been received since the last call."""
        came, self.received = self.received, set()
        return came

    @torch.no_grad()
    def measure(self, names: Iterable[str]) -> None:
        """Compute the norms of the gradients of `names`, whose backward passes are finished."""
        for name, total in self._trained(names):
            self.norms[name] = self._norm_of(name, total)

    def _norm_of(self, name: str, total: Tensor) -> Tensor:
        return self.world.norm_part(total)

    def _scale(self, name: str, gradient: Tensor, coefficient: Tensor | None, measured: bool) -> None:
        """Scale `gradient`, that of `name` in the dtype of the parameter that the optimizer steps.

        Args:
            coefficient: factor of the gradients (on the host, 0-dim).
            measured: their norms are known; if not, they are computed, for reports.
        """
        if not measured:
            self.norms[name] = self._norm_of(name, gradient)
        if coefficient is not None:
            gradient.mul_(coefficient.item())

    def drop_unused(self, names: Iterable[str]) -> None:
        self.clear_gradients(names)
        for name in names:
            self.norms.pop(name, None)

    @torch.no_grad()
    def copies_of(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: g.to("cpu", copy=True) for name in names if (g := self.gradient(name)) is not None}

    def _trained(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            total = self.gradient(name)
            if total is not None and self._trains(name):
                yield name, total
