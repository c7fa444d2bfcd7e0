"""Gradients that wait for their update, on either side: added up over packs, measured, and made what an optimizer takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from harmony_ds.parallel import Alone

_ALONE = Alone()


class GradientSums(ABC):
    """By parameter, what packs have gathered for it. Knows who holds the parts, and no thread."""

    master_dtype = torch.float32
    """Of the parameters that an optimizer steps, and of the gradients that it takes."""

    def __init__(self, trains: Callable[[str], bool], world: Alone = _ALONE) -> None:
        """`trains`: whether the optimizer has a parameter; `world`: whose gradients they are."""
        self._trains = trains
        self.norms: dict[str, Tensor] = {}
        self._came: set[str] = set()
        self.world = world

    @abstractmethod
    def gradient(self, name: str) -> Tensor | None:
        """The gradient of `name` that waits here, in the accumulation dtype: the tensor itself, its parts added up."""

    @abstractmethod
    def forget_gradients(self, names: Iterable[str] | None = None) -> None:
        """Drops the gradients of `names`, or (after a failure, or an overflow) all of them and their norms."""

    def take_came(self) -> set[str]:
        """The parameters that a gradient has come for since this was asked last, and was not dropped."""
        came, self._came = self._came, set()
        return came

    def never_came(self, names: Iterable[str]) -> None:
        """Those for `names` are dropped."""
        self._came.difference_update(names)

    @torch.no_grad()
    def measure(self, names: Iterable[str]) -> None:
        """Takes the norms of the gradients of `names`, whose backward passes are finished."""
        for name, total in self._trained(names):
            self.norms[name] = self._norm_of(name, total)

    def _norm_of(self, name: str, total: Tensor) -> Tensor:
        return self.world.measured(total)

    def for_update(self, names: Iterable[str], coefficient: Tensor | None, measured: bool) -> dict[str, Tensor]:
        """The gradients of `names` as an optimizer takes them, in the masters' dtype.

        Args:
            coefficient: what they are multiplied with (on the host, 0-dim).
            measured: whether their norms are known; if not, they are taken for whoever asks.
        """
        gradients: dict[str, Tensor] = {}
        for name, total in self._trained(names):
            gradient = total.to(self.master_dtype)
            if not measured:
                self.norms[name] = self._norm_of(name, gradient)
            gradients[name] = gradient if coefficient is None else gradient.mul_(coefficient.item())
        return gradients

    def drop_unused(self, names: Iterable[str]) -> None:
        """Drops the gradients of `names`, and their norms with them."""
        self.forget_gradients(names)
        for name in names:
            self.norms.pop(name, None)

    @torch.no_grad()
    def copied(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Copies on the host of the gradients of `names` that wait here."""
        return {name: g.to("cpu", copy=True) for name in names if (g := self.gradient(name)) is not None}

    def _trained(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            total = self.gradient(name)
            if total is not None and self._trains(name):
                yield name, total
