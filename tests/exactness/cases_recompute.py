"""State that a forward pass leaves, and that a recomputation meets again."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.exactness.case import ALL, PAIRS, Found, case
from tests.exactness.models import WIDTH, Block, Net, adamw, batches, by_both_ways, weights
from tests.exactness.sides import Side


def trained(side: Side, model: nn.Module, rows: int = 2) -> Found:
    """Two steps in the familiar loop, and two by train_batch."""
    engine = side.initialize(model, adamw(model))
    losses = by_both_ways(engine, batches(4 * side.accumulation, rows=rows))
    return {**weights(model), "losses": losses}


# ---- state that forward updates and uses


@case(*PAIRS)
def spectral_norm(side: Side) -> Found:
    """Every block's linear is under torch.nn.utils.parametrizations.spectral_norm."""

    def block() -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())

    return trained(side, Net(block))


class Centered(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mu", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mu.lerp_(x.mean(0), 0.1)
        return super().forward(x - self.mu)


@case(*PAIRS)
def running_mean_used_in_forward(side: Side) -> Found:
    """A running mean is updated in place in forward, and subtracted."""
    return trained(side, Net(Centered))


class Replaced(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mu", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mu = 0.9 * self.mu + 0.1 * x.detach().mean(0)
        return super().forward(x - self.mu)


@case(*PAIRS)
def buffer_replaced_in_forward(side: Side) -> Found:
    """`self.mu = 0.9 * self.mu + 0.1 * x.mean(0)` in forward, a registered buffer."""
    return trained(side, Net(Replaced))


class CountedTensor(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


@case(*PAIRS)
def counter_as_a_buffer(side: Side) -> Found:
    """`self.calls += 1` on a buffer, which is only read by the loop, at the end."""
    return trained(side, Net(CountedTensor))


class Codebook(Block):
    """Vector quantization, its codes moved towards what they are chosen for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        quantized = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                self.buffer()[nearest] = 0.9 * quantized + 0.1 * x
        return x + (quantized - x).detach()

    def buffer(self) -> Tensor:
        return self.codes


class CodebookByData(Codebook):
    def buffer(self) -> Tensor:
        return self.codes.data


@case(*PAIRS)
def codebook(side: Side) -> Found:
    """Vector quantization whose codes are updated in forward by an exponential average."""
    return trained(side, Net(Codebook))


@case(*PAIRS)
def codebook_by_data(side: Side) -> Found:
    """The same, written to by `.data`."""
    return trained(side, Net(CodebookByData))


class Normalized(Block):
    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.statistics(x))


def in_both_modes(side: Side, look: bool) -> Found:
    model = Net(Normalized)
    engine = side.initialize(model, adamw(model))
    losses = []
    for i, (x, y) in enumerate(batches(3 * side.accumulation, rows=4)):
        engine.train(i % 2 == 1)
        loss = engine(x, labels=y)
        losses.append(loss.item() if look else loss.detach())
        engine.backward(loss)
        engine.step()
    return {**weights(model), "losses": torch.tensor(losses) if look else torch.stack(losses)}


@case()
def batch_norm_in_both_modes_within_a_group(side: Side) -> Found:
    """Every second micro-batch runs in eval mode, by the statistics that those before it have gathered."""
    return in_both_modes(side, look=False)


@case(*ALL)
def batch_norm_in_both_modes_and_losses_looked_at(side: Side) -> Found:
    """The same, and each loss is looked at."""
    return in_both_modes(side, look=True)


class Gate(Block):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x) * gate


class Gated(Net):
    """Fills its buffer anew in each forward pass, for its blocks."""

    def __init__(self, between: bool) -> None:
        super().__init__(Block if between else Gate)
        self.between = between
        self.gate: Tensor
        self.register_buffer("gate", torch.ones(WIDTH))

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.gate.copy_(x.mean(0).sigmoid())
        x = self.front(x)
        for block in self.blocks:
            x = block(x * self.gate) if self.between else block(x, self.gate)
        return x


@case(*PAIRS)
def buffer_filled_for_the_blocks(side: Side) -> Found:
    """The model's forward copies a mean of its input into a buffer, which every block is given."""
    model = Gated(between=False)
    engine = side.initialize(model, adamw(model))
    for x, y in batches(3 * side.accumulation):
        engine.backward(engine(x, labels=y))
        engine.step()
    return weights(model)


@case(*PAIRS)
def buffer_filled_and_used_between_blocks(side: Side) -> Found:
    """The same buffer, multiplied with between the blocks."""
    return trained(side, Gated(between=True))


class Rectified(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.relu_())


@case(*PAIRS)
def input_rectified_in_place(side: Side) -> Found:
    """A block begins with `x.relu_()` of what it is given, which its linear layer keeps for backward."""
    return trained(side, Net(Rectified))


class SelfClamping(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


@case(*PAIRS)
def weights_clamped_in_forward(side: Side) -> Found:
    """A block clamps its own weight in forward, under no_grad."""
    return trained(side, Net(SelfClamping))


class Caching(Block):
    """Keeps a table of positions, made anew for a micro-batch that is longer than those before."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < len(x):
            self.table = torch.arange(len(x))[:, None] / 8
        return super().forward(x + self.table[: len(x)])


@case(*PAIRS)
def table_of_positions(side: Side) -> Found:
    """A block makes a table of positions, keeps it on itself, and makes it anew when a longer micro-batch comes."""
    model = Net(Caching)
    engine = side.initialize(model, adamw(model))
    for i, (x, y) in enumerate(batches(3 * side.accumulation, rows=8)):
        rows = (2, 5, 3, 7, 1, 8)[i % 6]
        engine.backward(engine(x[:rows], labels=y[:rows]))
        engine.step()
    return weights(model)


# ---- random numbers


class PythonRandom(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + random.random())


@case(*PAIRS)
def random_of_python(side: Side) -> Found:
    """Blocks draw from Python's random in forward."""
    return trained(side, Net(PythonRandom))


class NumpyRandom(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.from_numpy(np.random.randn(WIDTH)).float())


@case(*PAIRS)
def random_of_numpy(side: Side) -> Found:
    """Blocks draw noise with np.random.randn in forward."""
    return trained(side, Net(NumpyRandom))


@case(*PAIRS)
def random_of_torch(side: Side) -> Found:
    """Blocks draw noise with torch.randn_like, and drop paths by torch.rand(()) < 0.5."""

    class Noisy(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x if torch.rand(()) < 0.5 else super().forward(x + torch.randn_like(x))

    return trained(side, Net(Noisy))


class StochasticDepth(Net):
    def body(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for block in self.blocks:
            if not self.training or random.random() < 0.7:
                x = block(x)
        return x


@case(*PAIRS)
def stochastic_depth_by_python(side: Side) -> Found:
    """The model skips blocks by Python's random, as LayerDrop does."""
    return trained(side, StochasticDepth())


@case(*PAIRS)
def scheduled_sampling_by_numpy(side: Side) -> Found:
    """The model's own forward draws np.random.rand() between the blocks."""

    class Sampled(Net):
        def body(self, x: Tensor) -> Tensor:
            return super().body(x * float(np.random.rand()))

    return trained(side, Sampled())


# ---- torch.utils.checkpoint


class Checkpointed(Net):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(partial(Block, dropout=0.3))
        self.reentrant = reentrant

    def body(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@case(*PAIRS)
def checkpoint_around_blocks_with_dropout(side: Side) -> Found:
    """torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) around every block, with dropout."""
    return trained(side, Checkpointed(reentrant=False))


@case(*PAIRS)
def reentrant_checkpoint_around_blocks_with_dropout(side: Side) -> Found:
    """The same with use_reentrant=True."""
    return trained(side, Checkpointed(reentrant=True))


class CheckpointedInside(Block):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(
            lambda h: self.dropout(torch.tanh(self.linear(self.norm(h)))), x, use_reentrant=self.reentrant
        )


class ReentrantInside(CheckpointedInside):
    reentrant = True


@case(*PAIRS)
def checkpoint_inside_blocks(side: Side) -> Found:
    """torch.utils.checkpoint inside every block's forward, with dropout."""
    return trained(side, Net(partial(CheckpointedInside, dropout=0.3)))


@case(*PAIRS)
def reentrant_checkpoint_inside_blocks(side: Side) -> Found:
    """The reentrant kind inside every block's forward, with dropout."""
    return trained(side, Net(partial(ReentrantInside, dropout=0.3)))


@case()
def whole_model_checkpointed(side: Side) -> Found:
    """The loop calls checkpoint(engine, x, use_reentrant=False)."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    for x, y in batches(2 * side.accumulation):
        logits = checkpoint(engine, x.requires_grad_(True), use_reentrant=False)
        engine.backward(F.cross_entropy(logits, y))
        engine.step()
    return weights(model)


# ---- autocast


class Uncast(Block):
    """Normalizes in fp32 whatever the loop's autocast says."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


@case(*PAIRS)
def autocast_around_the_call(side: Side) -> Found:
    """`with torch.autocast("cpu", torch.bfloat16):` around the forward only."""
    return cast(side, Net())


@case(*PAIRS)
def autocast_disabled_in_blocks(side: Side) -> Found:
    """The same, and blocks run under autocast(enabled=False)."""
    return cast(side, Net(Uncast))


@case(*PAIRS)
def autocast_around_everything(side: Side) -> Found:
    """The whole loop runs under autocast (without its cache, which plain PyTorch would train on), backward and step too."""
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return trained(side, Net(Uncast))


@case()
def autocast_for_every_second_micro_batch(side: Side) -> Found:
    """Every second micro-batch of a group runs under autocast; the losses are the model's."""
    model = Net()
    engine = side.initialize(model, adamw(model))
    for i, (x, y) in enumerate(batches(2 * side.accumulation)):
        with torch.autocast("cpu", torch.bfloat16, enabled=i % 2 == 0):
            loss = engine(x, labels=y)
        engine.backward(loss)
        engine.step()
    return weights(model)


def cast(side: Side, model: nn.Module) -> Found:
    """Two steps, the forward and the loss under autocast."""
    engine = side.initialize(model, adamw(model))
    losses: list[Any] = []
    for x, y in batches(2 * side.accumulation):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().float())
    return {**weights(model), "losses": torch.stack(losses)}
