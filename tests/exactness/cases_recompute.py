"""State that a forward pass leaves behind, and that a recomputation meets again."""

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


@case(*PAIRS)
def spectral_norm_by_hooks(side: Side) -> Found:
    """The older torch.nn.utils.spectral_norm, a forward pre-hook, in every block."""

    def block() -> nn.Module:
        return nn.Sequential(nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())

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


class Attribute(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mu = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.mu = 0.9 * self.mu + 0.1 * x.detach().mean(0)
        return super().forward(x - self.mu)


@case(*PAIRS)
def tensor_attribute_replaced_in_forward(side: Side) -> Found:
    """The same with a plain tensor attribute, not a buffer."""
    model = Net(Attribute)
    return {**trained(side, model), **{f"mu {i}": block.mu for i, block in enumerate(model.blocks)}}


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / (1.0 + 1.0 / self.calls)


@case(*PAIRS)
def counter_used_in_forward(side: Side) -> Found:
    """`self.calls += 1` in forward of a block, which warms up with it."""
    model = Net(Counting)
    return {**trained(side, model), "calls": torch.tensor([block.calls for block in model.blocks])}


class Counted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        self.calls += 1
        return super().forward(x / self.calls, labels)


@case(*PAIRS)
def counter_of_the_model(side: Side) -> Found:
    """`self.calls += 1` in the model's own forward, outside the blocks, which divides by it."""
    model = Counted()
    return {**trained(side, model), "calls": model.calls}


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
                self.codes[nearest] = 0.9 * quantized + 0.1 * x
        return x + (quantized - x).detach()


@case(*PAIRS)
def codebook(side: Side) -> Found:
    """Vector quantization whose codes are updated in forward by an exponential average."""
    return trained(side, Net(Codebook))


@case(*PAIRS)
def batch_norm_by_count(side: Side) -> Found:
    """BatchNorm with momentum=None: the average over all batches, by num_batches_tracked."""

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None))

    return trained(side, Net(block), rows=4)


class CodebookByData(Codebook):
    def forward(self, x: Tensor) -> Tensor:
        x = Block.forward(self, x)
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        quantized = self.codes[nearest]
        self.codes.data[nearest] = 0.9 * quantized + 0.1 * x.detach()
        return x + (quantized - x).detach()


@case(*PAIRS)
def codebook_by_data(side: Side) -> Found:
    """The codebook, its codes written through `.data`, which raises no version."""
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

    def __init__(self, by_data: bool = False, between: bool = False) -> None:
        super().__init__(Block if between else Gate)
        self.by_data, self.between = by_data, between
        self.gate: Tensor
        self.register_buffer("gate", torch.ones(WIDTH))

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            (self.gate.data if self.by_data else self.gate).copy_(x.mean(0).sigmoid())
        x = self.front(x)
        for block in self.blocks:
            x = block(x * self.gate) if self.between else block(x, self.gate)
        return x


@case(*PAIRS)
def buffer_filled_for_the_blocks(side: Side) -> Found:
    """The model's forward copies a mean of its input into a buffer, which every block is given."""
    model = Gated()
    engine = side.initialize(model, adamw(model))
    for x, y in batches(3 * side.accumulation):
        engine.backward(engine(x, labels=y))
        engine.step()
    return weights(model)


@case(*PAIRS)
def buffer_filled_by_data_for_the_blocks(side: Side) -> Found:
    """The same through `.data`."""
    return trained(side, Gated(by_data=True))


@case(*PAIRS)
def buffer_filled_and_used_between_blocks(side: Side) -> Found:
    """The same buffer, multiplied with between the blocks."""
    return trained(side, Gated(between=True))


@case(*PAIRS)
def buffer_filled_by_data_and_used_between_blocks(side: Side) -> Found:
    """The same through `.data`."""
    return trained(side, Gated(by_data=True, between=True))


class Rectified(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.relu_())


@case(*PAIRS)
def input_rectified_in_place(side: Side) -> Found:
    """A block begins with `x.relu_()` of what it is given, which its linear layer keeps for backward."""
    return trained(side, Net(Rectified))


class Observed(Block):
    """Fake quantization with the range seen so far."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch.maximum(self.largest, x.abs().max(), out=self.largest)
        return super().forward(torch.fake_quantize_per_tensor_affine(x, float(self.largest) / 127 + 1e-8, 0, -128, 127))


@case(*PAIRS)
def quantization_observer(side: Side) -> Found:
    """Quantization-aware training: a block keeps the largest value seen, and rounds by it."""
    return trained(side, Net(Observed))


class ActNorm(nn.Module):
    """Parameters that the first batch initializes."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.initialized = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.initialized:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.std(0) + 0.1))
            self.initialized = True
        return (x + self.shift) * self.scale


@case(*PAIRS)
def parameters_initialized_by_the_first_batch(side: Side) -> Found:
    """ActNorm: the first forward writes the parameters of the layer from its input."""
    return trained(side, Net(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), ActNorm())))


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
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.cache:
            self.cache[len(x)] = torch.linspace(0, 1, len(x))[:, None]
        return super().forward(x + self.cache[len(x)])


@case(*PAIRS)
def cache_of_constants(side: Side) -> Found:
    """A block makes a table of positions at its first call, and keeps it on itself."""
    return trained(side, Net(Caching))


class Weighting(Net):
    """Multiplies by a table of its own between the blocks, from the block `at` on."""

    at = 0

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def grow(self, rows: int) -> Tensor:
        if self.table is None or self.table.shape[0] < rows:
            self.table = torch.ones(rows, rows).tril() / rows
        return self.table[:rows, :rows]

    def body(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number >= self.at:
                x = self.grow(len(x)) @ x
        return x


def trained_on_several_lengths(side: Side, model: nn.Module) -> Found:
    engine = side.initialize(model, adamw(model))
    losses = []
    for i, (x, y) in enumerate(batches(3 * side.accumulation, rows=8)):
        rows = (2, 5, 3, 7, 1, 8)[i % 6]
        losses.append(engine(x[:rows], labels=y[:rows]))
        engine.backward(losses[-1])
        engine.step()
    return {**weights(model), "losses": torch.stack([loss.detach() + 0 for loss in losses])}


@case(*ALL)
def cache_that_grows(side: Side) -> Found:
    """The model makes a table anew when a longer micro-batch comes, with other values; shorter ones take a part of it."""
    return trained_on_several_lengths(side, Weighting())


@case(*ALL)
def cache_that_grows_behind_a_layer(side: Side) -> Found:
    """The same, made behind the second block."""
    model = Weighting()
    model.at = 1
    return trained_on_several_lengths(side, model)


@case(*PAIRS)
def cache_that_is_filled_in_place(side: Side) -> Found:
    """The same in a table of its full size, of which longer micro-batches fill more."""

    class Filling(Weighting):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.filled = torch.zeros(8, 8), 0

        def grow(self, rows: int) -> Tensor:
            assert self.table is not None
            if self.filled < rows:
                self.table[:rows, :rows] = torch.ones(rows, rows).tril() / rows
                self.filled = rows
            return self.table[:rows, :rows]

    return trained_on_several_lengths(side, Filling())


class Remembering(Block):
    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        before, self.last = self.last, x.detach()
        return super().forward(x if before is None else 0.5 * (x + before))


@case(*PAIRS)
def last_input_remembered(side: Side) -> Found:
    """A block mixes in its input of the call before, kept on an attribute, detached."""
    return trained(side, Net(Remembering))


class Queue(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(4, WIDTH))
        self.register_buffer("end", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x) + self.queue.mean(0)
        with torch.no_grad():
            self.queue[int(self.end) % 4] = x[0]
            self.end += 1
        return out


@case(*PAIRS)
def queue_of_features(side: Side) -> Found:
    """A block keeps the features of the last four calls in a buffer (MoCo's queue) and uses them."""
    return trained(side, Net(Queue))


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


class OwnGenerator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn(x.shape, generator=self.generator))


@case(*PAIRS)
def random_of_a_generator(side: Side) -> Found:
    """Blocks draw noise from a torch.Generator of their own."""
    return trained(side, Net(OwnGenerator))


class OwnRandom(Block):
    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * float(self.random.random()))


@case(*PAIRS)
def random_of_a_numpy_generator(side: Side) -> Found:
    """Blocks draw from np.random.default_rng of their own."""
    return trained(side, Net(OwnRandom))


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
    def __init__(self, reentrant: bool, dropout: float) -> None:
        super().__init__(partial(Block, dropout=dropout))
        self.reentrant = reentrant

    def body(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@case(*PAIRS)
def checkpoint_around_blocks(side: Side) -> Found:
    """torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) around every block."""
    return trained(side, Checkpointed(False, 0.0))


@case(*PAIRS)
def reentrant_checkpoint_around_blocks(side: Side) -> Found:
    """torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True) around every block."""
    return trained(side, Checkpointed(True, 0.0))


@case(*PAIRS)
def checkpoint_around_blocks_with_dropout(side: Side) -> Found:
    """The non-reentrant kind around blocks with dropout."""
    return trained(side, Checkpointed(False, 0.3))


@case(*PAIRS)
def reentrant_checkpoint_around_blocks_with_dropout(side: Side) -> Found:
    """The reentrant kind around blocks with dropout."""
    return trained(side, Checkpointed(True, 0.3))


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
def checkpoint_sequential(side: Side) -> Found:
    """torch.utils.checkpoint.checkpoint_sequential over the blocks, in two segments."""

    class Segmented(Net):
        def body(self, x: Tensor) -> Tensor:
            blocks = list(self.blocks)
            return torch.utils.checkpoint.checkpoint_sequential(blocks, 2, self.front(x), use_reentrant=False)

    return trained(side, Segmented())


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
def autocast_disabled_in_the_model(side: Side) -> Found:
    """The same, and the model's forward calls its blocks under autocast(enabled=False)."""

    class Disabling(Net):
        def body(self, x: Tensor) -> Tensor:
            x = self.front(x)
            with torch.autocast("cpu", enabled=False):
                x = x.float()
                for block in self.blocks:
                    x = block(x)
            return x

    return cast(side, Disabling())


@case(*PAIRS)
def autocast_enabled_in_the_model(side: Side) -> Found:
    """The model's forward enables autocast for its blocks; the loop knows nothing of it."""

    class Enabling(Net):
        def body(self, x: Tensor) -> Tensor:
            x = self.front(x)
            with torch.autocast("cpu", torch.bfloat16):
                for block in self.blocks:
                    x = block(x)
            return x.float()

    return trained(side, Enabling())


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
