"""A small residual model, its batches, and a training run of it that is compared with plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harmony_ds import HarmonyEngine
from tests.engine.drive import adamw, config_of, engine_for, seed_of
from tests.oracle import assert_same, train_plainly

WIDTH = 6
STEPS, ACCUMULATION = 3, 3
Batch = dict[str, Tensor]


def batch_of(index: int) -> Batch:
    generator = torch.Generator().manual_seed(index)
    return {"x": torch.randn(2, WIDTH, generator=generator), "y": torch.randn(2, WIDTH, generator=generator)}


GROUPS = [[batch_of(10 * step + i) for i in range(ACCUMULATION)] for step in range(STEPS)]


class Block(nn.Module):
    """A residual layer; what tests change is derived from it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Four blocks and a head; `run` is what tests override."""

    def __init__(self, block: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(number) for number in range(4)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return {"loss": F.mse_loss(self.head(self.run(x)), y)}


def built(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make().train()


@contextmanager
def training(make: Callable[[], nn.Module], **harmony: Any) -> Iterator[tuple[nn.Module, HarmonyEngine]]:
    """An engine over a fresh model, one layer in each pack."""
    model = built(make)
    config = config_of(ACCUMULATION, None, {"pack_layers": 1, **harmony})
    with engine_for(model, adamw, config) as engine:
        yield model, engine


def assert_equals_plain(
    make: Callable[[], nn.Module], bitwise: bool = True, groups: Any = GROUPS, **harmony: Any
) -> nn.Module:
    """Losses, weights and buffers after some steps; returns the engine's model.

    Args:
        bitwise: False where a tensor has several consumers, whose gradients are added up in another order.
    """
    plain = built(make)
    losses = train_plainly(plain, groups, adamw(plain.parameters()), clip=None, seed_of=seed_of)
    with training(make, **harmony) as (model, engine):
        actual = [engine.train_batch(iter(group)).item() for group in groups]
    assert_same(model, plain, bitwise)
    expected = [torch.tensor(group).mean().item() for group in losses]
    assert actual == (expected if bitwise else pytest.approx(expected, rel=1e-6))
    return model
