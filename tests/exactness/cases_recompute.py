"""State that a forward pass leaves, and that a recomputation meets again."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.exactness.case import ALL, PAIRS, Found, case
from tests.exactness.models import WIDTH, Block, Net, adamw, by_both_loops, of_logits, own_loss, trained, under
from tests.exactness.sides import Side

# ---- state that forward updates and uses


@case(*PAIRS)
def spectral_norm(side: Side) -> Found:
    """Every block's linear is under torch.nn.utils.parametrizations.spectral_norm."""
    return by_both_loops(side, Net(lambda: under(nn.utils.parametrizations.spectral_norm)), adamw)


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
    return by_both_loops(side, Net(Centered), adamw)


class Scaled(Block):
    """Multiplies by a buffer that each call has changed in place before, and backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(0.9)
        return super().forward(x) * self.scale


@case(*PAIRS)
def buffer_changed_and_kept_for_backward(side: Side) -> Found:
    """`self.scale.mul_(0.9)` in forward, a registered buffer, and the result is multiplied by it."""
    return by_both_loops(side, Net(Scaled), adamw)


class Replaced(Centered):
    def forward(self, x: Tensor) -> Tensor:
        self.mu = 0.9 * self.mu + 0.1 * x.detach().mean(0)
        return Block.forward(self, x - self.mu)


@case(*PAIRS)
def buffer_replaced_in_forward(side: Side) -> Found:
    """`self.mu = 0.9 * self.mu + 0.1 * x.mean(0)` in forward, a registered buffer."""
    return by_both_loops(side, Net(Replaced), adamw)


class Remembering(nn.Module):
    """Goes on from the state that its last call left."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.register_buffer("state", torch.zeros(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.cell(x, self.state)
        self.state = hidden.detach()
        return hidden


@case(*PAIRS)
def recurrent_state_in_a_buffer(side: Side) -> Found:
    """Recurrent blocks keep their state, detached, in a buffer that the next micro-batch begins with."""
    return by_both_loops(side, Net(Remembering), adamw)


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
                self.codes.data[nearest] = 0.9 * quantized + 0.1 * x
        return x + (quantized - x).detach()


@case(*PAIRS)
def codebook(side: Side) -> Found:
    """Vector quantization whose codes are updated in forward by an exponential average, through `.data`."""
    return by_both_loops(side, Net(Codebook), adamw)


class Normalized(Block):
    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.statistics = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.statistics(x))


def in_both_modes(side: Side, look: bool) -> Found:
    model = Net(Normalized)

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        engine.train(engine.micro_steps % 2 == 1)
        model.blocks[1].dropout.train(engine.micro_steps % 3 == 0)
        loss = engine(x, labels)
        if look:
            loss.item()
        return loss

    return trained(side, model, adamw, loss, steps=3, rows=4)


@case()
def both_modes_within_a_group(side: Side) -> Found:
    """Every second micro-batch runs in eval mode, with statistics gathered before it; one dropout has its own mode."""
    return in_both_modes(side, look=False)


@case(*ALL)
def both_modes_within_a_group_and_losses_looked_at(side: Side) -> Found:
    """The same, and each loss is looked at."""
    return in_both_modes(side, look=True)


class Gate(Block):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x) * gate


class Gated(Net):
    """Fills its buffer anew in each forward pass, for its blocks."""

    gate: Tensor

    def __init__(self) -> None:
        super().__init__(Gate)
        self.register_buffer("gate", torch.ones(WIDTH))

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.gate.copy_(x.mean(0).sigmoid())
        x = self.front(x)
        for block in self.blocks:
            x = block(x, self.gate)
        return x


@case(*PAIRS)
def buffer_filled_for_the_blocks(side: Side) -> Found:
    """The model's forward copies a mean of its input into a buffer, which every block is given."""
    return trained(side, Gated(), adamw, own_loss, steps=3)


class Rectified(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.relu_())


@case(*PAIRS)
def input_rectified_in_place(side: Side) -> Found:
    """A block begins with `x.relu_()` of what it is given, which its linear layer keeps for backward."""
    return by_both_loops(side, Net(Rectified), adamw)


class SelfClamping(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


@case(*PAIRS)
def weights_clamped_in_forward(side: Side) -> Found:
    """A block clamps its own weight in forward, under no_grad."""
    return by_both_loops(side, Net(SelfClamping), adamw)


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

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        rows = (2, 5, 3, 7, 1, 8)[engine.micro_steps % 6]
        return engine(x[:rows], labels[:rows])

    return trained(side, Net(Caching), adamw, loss, steps=3, rows=8)


# ---- random numbers


class Noisy(Block):
    def forward(self, x: Tensor) -> Tensor:
        if torch.rand(()) < 0.5:
            return x
        return (
            super().forward(x + torch.randn_like(x) + torch.from_numpy(np.random.randn(WIDTH)).float())
            * random.random()
        )


@case(*PAIRS)
def random_numbers_of_all_kinds(side: Side) -> Found:
    """Blocks drop paths by torch.rand(()) < 0.5, and draw from torch.randn_like, np.random.randn and Python's random."""
    return by_both_loops(side, Net(Noisy), adamw)


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
    return by_both_loops(side, StochasticDepth(), adamw)


# ---- torch.utils.checkpoint


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
    return by_both_loops(side, Net(partial(CheckpointedInside, dropout=0.3)), adamw)


@case(*PAIRS)
def reentrant_checkpoint_inside_blocks(side: Side) -> Found:
    """The reentrant kind inside every block's forward, with dropout."""
    return by_both_loops(side, Net(partial(ReentrantInside, dropout=0.3)), adamw)


class CheckpointedBlocks(Net):
    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


@case(*PAIRS)
def reentrant_checkpoint_of_the_first_layers(side: Side) -> Found:
    """The reentrant kind around blocks whose input needs no gradient: plain PyTorch trains none of them."""
    return by_both_loops(side, CheckpointedBlocks(), adamw)


# ---- autocast


class Uncast(Block):
    """Normalizes in fp32 whatever the loop's autocast says."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


@case(*PAIRS)
def autocast_disabled_in_blocks(side: Side) -> Found:
    """`with torch.autocast("cpu", torch.bfloat16):` around forward and loss; blocks run under autocast(enabled=False)."""

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return of_logits(engine, x, labels)

    return trained(side, Net(Uncast), adamw, loss)


@case(*PAIRS)
def autocast_around_everything(side: Side) -> Found:
    """The whole loop runs under autocast (without its cache, which plain PyTorch would train on), backward and step too."""
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return by_both_loops(side, Net(Uncast), adamw)


@case()
def autocast_for_every_second_micro_batch(side: Side) -> Found:
    """Every second micro-batch of a group runs under autocast; the losses are the model's."""

    def loss(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=engine.micro_steps % 2 == 0):
            return engine(x, labels)

    return trained(side, Net(), adamw, loss)
