"""The models of most cases: a few blocks of the size of a hand, data for them, and what is looked at in the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 6
CLASSES = 5


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))))


class Net(nn.Module):
    """Front, blocks, head: logits of `CLASSES` classes, or the loss if there are labels."""

    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = 3) -> None:
        super().__init__()
        self.front = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, CLASSES)

    def body(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.head(self.body(x))
        return logits if labels is None else F.cross_entropy(logits, labels)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def batches(count: int, rows: int = 2, width: int = WIDTH, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Inputs and labels of `count` micro-batches."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(rows, width, generator=generator), torch.randint(CLASSES, (rows,), generator=generator))
        for _ in range(count)
    ]


def train(engine: Any, micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The familiar loop over a model that returns logits; the losses."""
    losses = []
    for x, y in micro_batches:
        loss = F.cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def by_both_ways(engine: Any, micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The first half by the familiar loop, where each forward runs at once; the second by train_batch, in groups."""
    half = len(micro_batches) // 2
    losses = train(engine, micro_batches[:half])
    rest = iter([(x,) for x, _ in micro_batches[half:]])
    steps = half // engine.gradient_accumulation_steps()
    more = [engine.train_batch(rest, loss_fn=lambda logits: logits.pow(2).mean()) for _ in range(steps)]
    return torch.cat([losses, torch.stack(more)])


def weights(model: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Parameters and buffers."""
    return {prefix + name: t for name, t in [*model.named_parameters(), *model.named_buffers()]}
