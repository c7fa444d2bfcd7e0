"""Models that fail when a test wants them to: on the way forward or back, and by any error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.drive import family, weights_of

LLAMA = family("llama")


class Mishap(Exception):
    """An error that only these tests raise."""


class Trap:
    """Raises on its `at`-th call from being armed on; does nothing before, after, or disarmed."""

    def __init__(self, at: int, failure: BaseException | None = None, act: Callable[[], None] | None = None) -> None:
        self.at = at
        self.failure = failure if failure is not None else Mishap("sprung")
        self.act = act
        self.left: int | None = None

    def arm(self) -> None:
        self.left = self.at

    def spring(self) -> None:
        if self.left is None:
            return
        self.left -= 1
        if self.left < 0:
            self.left = None
            if self.act is not None:
                self.act()
            else:
                raise self.failure


class BackwardTrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, trap: Trap) -> Tensor:
        ctx.trap = trap
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.trap.spring()
        return gradient, None


class Trapped(nn.Module):
    """Part of a layer, which may fail on its way forward or back."""

    def __init__(self, inner: nn.Module, trap: Trap, where: str) -> None:
        super().__init__()
        self.inner = inner
        self.trap = trap
        self.where = where

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.where == "forward":
            self.trap.spring()
        else:
            hidden = BackwardTrap.apply(hidden, self.trap)
        return self.inner(hidden, *args, **kwargs)


def trapped_llama(trap: Trap, where: str) -> nn.Module:
    model = LLAMA.build(0.1)
    layer = model.model.layers[1]
    layer.mlp = Trapped(layer.mlp, trap, where)
    return model


def unwrapped(model: nn.Module) -> dict[str, Tensor]:
    return {name.replace("mlp.inner.", "mlp."): t for name, t in weights_of(model).items()}
