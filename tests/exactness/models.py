"""The models of most cases: a few blocks of the size of a hand, data for them, and what is looked at in the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.exactness.case import Found
from tests.exactness.sides import Side

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


class Given(Block):
    """Plain PyTorch saves neither of its arguments for backward."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:  # type: ignore[override]
        return torch.tanh(self.linear(torch.relu(x)) + shift)


class Neighbours(Block):
    """Mixes rows by a sparse matrix."""

    def forward(self, x: Tensor, matrix: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(torch.sparse.mm(matrix, x))


class Graph(Net):
    """Gives all blocks one sparse matrix."""

    def body(self, x: Tensor) -> Tensor:
        matrix = torch.eye(len(x)).to_sparse() * 0.5
        x = self.front(x)
        for block in self.blocks:
            x = block(x, matrix)
        return x


class Sigmoids(TorchFunctionMode):
    """Another nonlinearity in the place of tanh."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.sigmoid if func is torch.tanh else func)(*args, **(kwargs or {}))


def under(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """A block whose weight is computed by a normalization of torch's."""
    return nn.Sequential(norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Slow(torch.optim.SGD):
    """Updates that take a while, as those of large models do: what is read too early is stale."""

    def step(self, closure: object = None) -> None:
        time.sleep(0.01)
        super().step()


def slow(model: nn.Module) -> torch.optim.Optimizer:
    return Slow(model.parameters(), lr=0.1)


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


def of_logits(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
    """Return a loss that the loop computes, for which forward runs at once."""
    return F.cross_entropy(engine(x), labels)


def own_loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
    """Return the model's own loss, for which nothing runs before `step()`."""
    return engine(x, labels)


def trained(
    side: Side,
    model: nn.Module,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    loss_of: Callable[[Any, Tensor, Tensor], Tensor] = of_logits,
    steps: int = 2,
    rows: int = 2,
    **config: Any,
) -> Found:
    """Run the familiar loop for some steps; `loss_of` gets the engine, whose `micro_steps` counts, and a micro-batch."""
    engine = side.initialize(model, optimizer(model), **config)
    losses = []
    for x, y in batches(steps * side.accumulation, rows):
        loss = loss_of(engine, x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().clone())
    return {**weights(model), "losses": torch.stack(losses)}


def by_both_loops(
    side: Side, model: nn.Module, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd, rows: int = 2
) -> Found:
    """Two steps in the familiar loop, where each forward runs at once, and two by train_batch, in groups."""
    engine = side.initialize(model, optimizer(model))
    losses = train(engine, batches(2 * side.accumulation, rows))
    rest = iter([(x,) for x, _ in batches(2 * side.accumulation, rows, seed=2)])
    more = [engine.train_batch(rest, loss_fn=lambda logits: logits.pow(2).mean()) for _ in range(2)]
    return {**weights(model), "losses": torch.cat([losses, torch.stack(more)])}


def changed_between_steps(
    side: Side,
    model: nn.Module,
    change: Callable[[], object],
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 1,
) -> Found:
    """A step, `change`, and `steps` more in the familiar loop; the optimizer is AdamW unless one is given."""
    engine = side.initialize(model, optimizer or adamw(model))
    train(engine, batches(side.accumulation))
    change()
    losses = train(engine, batches(steps * side.accumulation, seed=2))
    return {**weights(model), "losses": losses}


def seen_after_steps(
    side: Side, model: nn.Module, look: Callable[[Any], Tensor], optimizer: Any = adamw, steps: int = 3, rows: int = 2
) -> Found:
    """Steps in the familiar loop; `look` gets the engine after each, and gives what the program sees."""
    engine = side.initialize(model, optimizer(model))
    seen = []
    for step in range(steps):
        train(engine, batches(side.accumulation, rows, seed=step))
        seen.append(look(engine))
    return {**weights(model), "seen": torch.stack(seen)}


@torch.no_grad()
def evaluated(engine: Any) -> Tensor:
    """The outputs of a micro-batch of its own."""
    return engine(batches(1)[0][0])


def weights(model: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Parameters and buffers."""
    return {prefix + name: t for name, t in [*model.named_parameters(), *model.named_buffers()]}
