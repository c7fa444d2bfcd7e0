"""What forward reads beside its arguments and its own modules: other layers, settings, functions, generators."""

from __future__ import annotations

import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.exactness import settings_read
from tests.exactness.case import ALL, PAIRS, Found, case
from tests.exactness.models import WIDTH, Block, Net, batches, sgd, weights
from tests.exactness.settings_read import Settings
from tests.exactness.sides import Side


class Scored(Net):
    """Returns its loss, so that a call of the engine could be put off."""

    def forward(self, x: Tensor, labels: Tensor, *more: Any) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(x), labels)


def trained(
    side: Side,
    model: nn.Module,
    before: Callable[[int], Any] = lambda i: None,
    give: Callable[[int], Any] = lambda i: (),
) -> Found:
    """The familiar loop; `before` each call something is done, and `give` gives more arguments."""
    engine = side.initialize(model, sgd(model))
    losses = []
    for i, (x, y) in enumerate(batches(3 * side.accumulation)):
        before(i)
        loss = engine(x, y, *give(i))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return {**weights(model), "losses": torch.stack([loss + 0 for loss in losses])}


# ---- attributes of other layers


class Keeping(Block):
    """A value residual: adds what the block kept that it knows."""

    kept: Tensor
    known: Any = ()

    def value(self) -> Tensor | None:
        return self.known[0].kept if self.known else None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = torch.tanh(self.linear(x))
        other = self.value()
        return x + self.norm(self.kept if other is None else self.kept + other)


def knowing(know: Callable[[Keeping, Scored], Any], block: type[Keeping] = Keeping) -> Scored:
    """All blocks but the first know of it what `know` makes."""
    model = Scored(block)
    first: Any = model.blocks[0]
    for other in list(model.blocks)[1:]:
        other.known = know(first, model)
    return model


@case(*ALL)
def first_block_known_in_a_tuple(side: Side) -> Found:
    """`self.known = (first_block,)`; a block adds `self.known[0].kept`, which that left there with its graph."""
    return trained(side, knowing(lambda first, model: (first,)))


@case(*PAIRS)
def first_block_known_in_a_list(side: Side) -> Found:
    """The same in a list."""
    return trained(side, knowing(lambda first, model: [first]))


@case(*PAIRS)
def first_block_known_by_a_weak_reference(side: Side) -> Found:
    """The same by a `weakref.ref`."""

    class Weak(Keeping):
        def value(self) -> Tensor | None:
            return self.known().kept if self.known else None

    return trained(side, knowing(lambda first, model: weakref.ref(first), Weak))


@case(*PAIRS)
def model_known_by_its_blocks(side: Side) -> Found:
    """Blocks know the whole model (`[model]`), and read the first block's `kept` through it."""

    class Rooted(Keeping):
        def value(self) -> Tensor | None:
            return self.known[0].blocks[0].kept if self.known else None

    return trained(side, knowing(lambda first, model: [model], Rooted))


@case(*PAIRS)
def block_before_known(side: Side) -> Found:
    """Every block knows the one before it, and adds what that kept."""
    model = Scored(Keeping, depth=4)
    blocks: list[Any] = list(model.blocks)
    for one, before in zip(blocks[1:], blocks, strict=False):
        one.known = (before,)
    return trained(side, model)


@case(*PAIRS)
def block_before_the_last_known(side: Side) -> Found:
    """A block reads what the one before the one before it kept: `self.known[0].known[0].kept`."""

    class Farther(Keeping):
        def value(self) -> Tensor | None:
            return self.known[0].known[0].kept if self.known and self.known[0].known else None

    model = Scored(Farther, depth=4)
    blocks: list[Any] = list(model.blocks)
    for one, before in zip(blocks[1:], blocks, strict=False):
        one.known = (before,)
    return trained(side, model)


@case(*PAIRS)
def detached_value_of_another_block(side: Side) -> Found:
    """The first block keeps `kept.detach()`; later ones read it, and again when they are recomputed."""

    class Detached(Keeping):
        def value(self) -> Tensor | None:
            value = super().value()
            return None if value is None else value.detach()

    return trained(side, knowing(lambda first, model: (first,), Detached))


@case(*PAIRS)
def other_block_written_to(side: Side) -> Found:
    """Later blocks add to the first one's list, which the model's forward sums and clears."""

    class Adding(Keeping):
        def __init__(self) -> None:
            super().__init__()
            self.sums: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            x = Block.forward(self, x)
            (self.known[0] if self.known else self).sums.append(x.pow(2).mean())
            return x

    class Summing(Scored):
        def forward(self, x: Tensor, labels: Tensor, *more: Any) -> Tensor:
            first: Any = self.blocks[0]
            first.sums.clear()
            return super().forward(x, labels) + 0.1 * torch.stack(first.sums).sum()

    model = Summing(Adding)
    blocks: list[Any] = list(model.blocks)
    for other in blocks[1:]:
        other.known = (blocks[0],)
    return trained(side, model)


@case(*PAIRS)
def mask_of_the_model_read_by_its_blocks(side: Side) -> Found:
    """The model's forward sets `self.mask`; blocks read it through `[model]`."""

    class Masking(Block):
        known: Any = ()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.known[0].mask

    class Masked(Scored):
        mask: Tensor

        def forward(self, x: Tensor, labels: Tensor, *more: Any) -> Tensor:
            self.mask = (x > 0).float()
            return super().forward(x, labels)

    model = Masked(Masking)
    blocks: list[Any] = list(model.blocks)
    for block in blocks:
        block.known = [model]
    return trained(side, model)


HIDDEN: Any = threading.local()


@case(*PAIRS)
def value_of_another_block_out_of_sight(side: Side) -> Found:
    """The first block puts a tensor with its graph into a `threading.local()`, and later ones take it from there."""

    class Hiding(Block):
        first = False

        def forward(self, x: Tensor) -> Tensor:
            kept = torch.tanh(self.linear(x))
            if self.first:
                HIDDEN.kept = kept
            return x + self.norm(kept + HIDDEN.kept)

    model = Scored(Hiding)
    first: Any = model.blocks[0]
    first.first = True
    return trained(side, model)


# ---- settings


class ScaledByModule(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * settings_read.SCALE


class ScaledByFunction(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * settings_read.scale()


class ScaledByClassInModule(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * settings_read.Settings.scale


class ScaledByClass(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * Settings.scale


class ScaledByMethod(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * Settings.doubled()


class ScaledByImport(Block):
    def forward(self, x: Tensor) -> Tensor:
        from tests.exactness import settings_read as inside

        return super().forward(x) * inside.SCALE


def set_scale(i: int) -> None:
    settings_read.SCALE = settings_read.Settings.scale = 1.0 + 0.1 * i


@case(*ALL)
def setting_of_a_module(side: Side) -> Found:
    """`settings.SCALE = ...` before each micro-batch; blocks read `settings.SCALE`."""
    return trained(side, Scored(ScaledByModule), set_scale)


@case(*PAIRS)
def setting_by_a_function_of_its_module(side: Side) -> Found:
    """The same, read by `settings.scale()`."""
    return trained(side, Scored(ScaledByFunction), set_scale)


@case(*PAIRS)
def setting_of_a_class_in_a_module(side: Side) -> Found:
    """`settings.Settings.scale`, an attribute of a class."""
    return trained(side, Scored(ScaledByClassInModule), set_scale)


@case(*PAIRS)
def setting_of_a_class(side: Side) -> Found:
    """`from settings import Settings`; blocks read `Settings.scale`."""
    return trained(side, Scored(ScaledByClass), set_scale)


@case(*PAIRS)
def setting_by_a_method_of_its_class(side: Side) -> Found:
    """The same, read by a class method."""
    return trained(side, Scored(ScaledByMethod), set_scale)


@case(*PAIRS)
def setting_imported_in_forward(side: Side) -> Found:
    """`from package import settings` within forward."""
    return trained(side, Scored(ScaledByImport), set_scale)


@case(*ALL)
def setting_of_the_thread(side: Side) -> Found:
    """`HERE.scale = ...` of a `threading.local()` before each micro-batch; blocks read it, and the model between them."""

    class Scaling(Scored):
        def forward(self, x: Tensor, labels: Tensor, *more: Any) -> Tensor:
            return super().forward(x * HIDDEN.scale, labels, *more)

    class ScaledByThread(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * HIDDEN.scale

    def set_scale_here(i: int) -> None:
        HIDDEN.scale = 1.0 + 0.1 * i

    vars(HIDDEN).clear()
    return trained(side, Scaling(ScaledByThread), set_scale_here)


@case(*PAIRS)
def setting_within_a_context(side: Side) -> Found:
    """`with scaled(2.0): loss = engine(x)`, every second time; the context sets a module's global and puts it back."""

    @contextmanager
    def scaled(value: float) -> Iterator[None]:
        before, settings_read.SCALE = settings_read.SCALE, value
        try:
            yield
        finally:
            settings_read.SCALE = before

    settings_read.SCALE = 1.0
    model = Scored(ScaledByModule)
    engine = side.initialize(model, sgd(model))
    for i, (x, y) in enumerate(batches(3 * side.accumulation)):
        with scaled(1.0 + i % 2):
            loss = engine(x, y)
        engine.backward(loss)
        engine.step()
    return weights(model)


@case(*PAIRS)
def setting_and_losses_looked_at(side: Side) -> Found:
    """A module's global is set before each micro-batch, and each loss is looked at: layers are recomputed later."""
    model = Scored(ScaledByModule)
    engine = side.initialize(model, sgd(model))
    seen = []
    for i, (x, y) in enumerate(batches(3 * side.accumulation)):
        set_scale(i)
        loss = engine(x, y)
        seen.append(loss.item())
        engine.backward(loss)
        engine.step()
    return {**weights(model), "seen": torch.tensor(seen)}


@case(*PAIRS)
def settings_that_take_turns(side: Side) -> Found:
    """Two objects with settings take turns as `model.config`; blocks read what they hold."""

    class Config:
        def __init__(self, scale: float) -> None:
            self.scale = scale

    class Configured(Block):
        config: Any = Config(1.0)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.config.scale

    model, configs = Scored(Configured), (Config(1.0), Config(1.5))

    def turn(i: int) -> None:
        for block in model.blocks:
            block.config = configs[i % 2]  # type: ignore[assignment]

    return {**trained(side, model, turn), "scales": torch.tensor([config.scale for config in configs])}


class Activated(Block):
    activation: Any = staticmethod(torch.tanh)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.activation(self.linear(self.norm(x))))


@case(*PAIRS)
def library_function_patched(side: Side) -> Found:
    """`mock.patch.object(F, "gelu", F.relu)` around every second call."""
    model = Scored(Activated)
    engine = side.initialize(model, sgd(model))
    for i, (x, y) in enumerate(batches(3 * side.accumulation)):
        with mock.patch.object(F, "gelu", F.relu if i % 2 else F.gelu):
            loss = engine(x, y)
        engine.backward(loss)
        engine.step()
    return weights(model)


@case(*PAIRS)
def environment_variable(side: Side) -> Found:
    """`os.environ["SCALE"]` and `os.getenv("SCALE")` in forward, set before each micro-batch."""

    class Environed(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(os.environ["EXACTNESS_SCALE"])

    class Asking(Scored):
        def forward(self, x: Tensor, labels: Tensor, *more: Any) -> Tensor:
            return super().forward(x * float(os.getenv("EXACTNESS_SCALE", "1")), labels)

    def set_it(i: int) -> None:
        os.environ["EXACTNESS_SCALE"] = str(1.0 + 0.1 * i)

    try:
        return trained(side, Asking(Environed), set_it)
    finally:
        os.environ.pop("EXACTNESS_SCALE", None)


# ---- functions


@case(*PAIRS)
def function_among_attributes(side: Side) -> Found:
    """`block.activation = lambda h: h * w` before each call, with the loop's own `w`."""
    model = Scored(Activated)
    engine = side.initialize(model, sgd(model))
    for i, (x, y) in enumerate(batches(3 * side.accumulation)):
        w = 1.0 + 0.1 * i
        for block in model.blocks:
            block.activation = lambda h: h * w  # type: ignore[assignment]  # noqa: B023
        engine.backward(engine(x, y))
        engine.step()
    return weights(model)


FLAGS = {"scale": 1.0}


def flagged(x: Tensor) -> Tensor:
    return x * FLAGS["scale"]


@case(*PAIRS)
def function_reads_a_global(side: Side) -> Found:
    """Blocks hold a function that reads a dictionary among the globals, which the loop changes."""
    model = Scored(Activated)
    for block in model.blocks:
        block.activation = flagged  # type: ignore[assignment]
    return trained(side, model, lambda i: FLAGS.update(scale=1.0 + 0.1 * i))


class Called(Scored):
    def forward(self, x: Tensor, labels: Tensor, *more: Any) -> Tensor:
        return super().forward(more[0](x), labels)


@case(*ALL)
def function_given(side: Side) -> Found:
    """`engine(x, y, lambda h: h * w)` with the loop's own `w`."""
    model = Called()
    engine = side.initialize(model, sgd(model))
    for i, (x, y) in enumerate(batches(3 * side.accumulation)):
        w = 1.0 + 0.1 * i
        engine.backward(engine(x, y, lambda h: h * w))  # noqa: B023
        engine.step()
    return weights(model)


@case(*PAIRS)
def function_given_that_layers_call(side: Side) -> Found:
    """The function is called by every block, and again when it is recomputed; losses are looked at."""

    class Calling(Block):
        def forward(self, x: Tensor, function: Any) -> Tensor:  # type: ignore[override]
            return super().forward(function(x))

    class Passing(Scored):
        def forward(self, x: Tensor, labels: Tensor, *more: Any) -> Tensor:
            x = self.front(x)
            for block in self.blocks:
                x = block(x, more[0])
            return F.cross_entropy(self.head(x), labels)

    model = Passing(Calling)
    engine = side.initialize(model, sgd(model))
    seen = []
    for i, (x, y) in enumerate(batches(3 * side.accumulation)):
        w = 1.0 + 0.1 * i
        loss = engine(x, y, lambda h: h * w)  # noqa: B023
        if i % 2:
            seen.append(loss.item())
        engine.backward(loss)
        engine.step()
    return {**weights(model), "seen": torch.tensor(seen)}


@case(*PAIRS)
def method_given(side: Side) -> Found:
    """`engine(x, y, schedule.apply)`, a method of an object that the loop changes."""

    class Schedule:
        scale = 1.0

        def apply(self, x: Tensor) -> Tensor:
            return x * self.scale

    schedule = Schedule()

    def advance(i: int) -> None:
        schedule.scale = 1.0 + 0.1 * i

    return trained(side, Called(), advance, lambda i: (schedule.apply,))


@case(*PAIRS)
def hook_reads_a_variable(side: Side) -> Found:
    """A forward hook scales a block's output by a variable of the loop."""
    model = Scored()
    w = 1.0
    model.blocks[0].register_forward_hook(lambda module, args, output: output * w)
    engine = side.initialize(model, sgd(model))
    for i, (x, y) in enumerate(batches(3 * side.accumulation)):
        w = 1.0 + 0.1 * i
        engine.backward(engine(x, y))
        engine.step()
    return weights(model)


# ---- generators


class Noisy(Block):
    """Adds noise of a generator of its own."""

    generator: Any

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn(x.shape, generator=self.generator))


class NoisyBetween(Scored):
    """Adds noise before its first layer."""

    generator: Any = None

    def noise(self, x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=self.generator)

    def forward(self, x: Tensor, labels: Tensor, *more: Any) -> Tensor:
        return super().forward(x + 0.1 * self.noise(x), labels)


@case(*ALL)
def generator_of_a_block(side: Side) -> Found:
    """Every block draws from a `torch.Generator` of its own, which goes on."""
    model = Scored(Noisy)
    for i, block in enumerate(model.blocks):
        block.generator = torch.Generator().manual_seed(i)
    found = trained(side, model)
    return {**found, "next": torch.rand(3, generator=model.blocks[0].generator)}


@case(*PAIRS)
def generator_of_a_block_replaced(side: Side) -> Found:
    """Before each call every block gets a new generator."""
    model = Scored(Noisy)

    def replace(i: int) -> None:
        for j, block in enumerate(model.blocks):
            block.generator = torch.Generator().manual_seed(10 * i + j)

    replace(100)
    return trained(side, model, replace)


@case(*PAIRS)
def generator_of_the_model_seeded(side: Side) -> Found:
    """`model.generator.manual_seed(i)` before each call; drawn from between layers."""
    model = NoisyBetween()
    model.generator = torch.Generator()
    return trained(side, model, model.generator.manual_seed)


@case(*PAIRS)
def generator_of_numpy(side: Side) -> Found:
    """`model.generator = np.random.default_rng(0)`; the loop draws from it too."""

    class Numbered(NoisyBetween):
        def noise(self, x: Tensor) -> Tensor:
            return torch.from_numpy(self.generator.standard_normal(x.shape)).float()

    model = Numbered()
    model.generator = np.random.default_rng(0)
    seen = []
    found = trained(side, model, lambda i: seen.append(model.generator.random()))
    return {**found, "seen": torch.tensor(seen)}


@case(*PAIRS)
def older_generators(side: Side) -> Found:
    """Blocks draw from a `np.random.RandomState` and a `random.Random` in a list."""

    class Both(Block):
        generators: Any

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.generators[0].uniform(0.9, 1.1) + self.generators[1].random())

    model = Scored(Both)
    for i, block in enumerate(model.blocks):
        block.generators = [np.random.RandomState(i), random.Random(i)]
    found = trained(side, model)
    return {**found, "next": torch.tensor(model.blocks[0].generators[1].random())}


GENERATOR = torch.Generator()


@case(*PAIRS)
def generator_among_the_globals(side: Side) -> Found:
    """All blocks draw from one generator among the globals."""

    class Drawing(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + 0.1 * torch.randn(x.shape, generator=GENERATOR))

    GENERATOR.manual_seed(7)
    return trained(side, Scored(Drawing))


@case(*PAIRS)
def generator_given(side: Side) -> Found:
    """`engine(x, y, generator)`: forward draws from a generator that it is given."""

    class Given(NoisyBetween):
        def forward(self, x: Tensor, labels: Tensor, *more: Any) -> Tensor:
            self.generator = more[0]
            return super().forward(x, labels)

    generator = torch.Generator()
    return trained(side, Given(), generator.manual_seed, lambda i: (generator,))


@case(*PAIRS)
def numpy_seeded_before_each_call(side: Side) -> Found:
    """`np.random.seed(i)` before each call; blocks draw from NumPy, and the loop after each call."""

    class Drawing(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + 0.1 * torch.from_numpy(np.random.randn(*x.shape)).float())

    model = Scored(Drawing)
    engine = side.initialize(model, sgd(model))
    seen = []
    for i, (x, y) in enumerate(batches(3 * side.accumulation)):
        np.random.seed(i)
        loss = engine(x, y)
        seen.append(np.random.rand())
        engine.backward(loss)
        engine.step()
    return {**weights(model), "seen": torch.tensor(seen)}


@case(*PAIRS)
def python_seeded_before_each_call(side: Side) -> Found:
    """`random.seed(i)` before each call; LayerDrop by Python's random numbers."""

    class Dropping(Scored):
        def forward(self, x: Tensor, labels: Tensor, *more: Any) -> Tensor:
            x = self.front(x)
            for block in self.blocks:
                x = block(x) * random.uniform(0.5, 1.0)
            return F.cross_entropy(self.head(x), labels)

    return trained(side, Dropping(), random.seed)


@case(*PAIRS)
def iterator_given(side: Side) -> Found:
    """`engine(x, y, (part for part in parts))`: an argument that can be gone through once."""

    class Summing(Scored):
        def forward(self, x: Tensor, labels: Tensor, *more: Any) -> Tensor:
            return super().forward(x + sum(more[0]), labels)

    return trained(side, Summing(), give=lambda i: ((torch.full((WIDTH,), 0.1 * k * i) for k in (1, 2)),))


@case(*PAIRS)
def iterator_of_the_model(side: Side) -> Found:
    """The model's forward takes the next number of `itertools.count()`-like iterator that it holds."""

    class Going(Scored):
        numbers: Any = None

        def forward(self, x: Tensor, labels: Tensor, *more: Any) -> Tensor:
            return super().forward(x * next(self.numbers), labels)

    model = Going()
    model.numbers = iter([1.0 + 0.01 * i for i in range(1000)])
    return trained(side, model)


# ---- in the backward pass


class _ByItsModule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module = module
        module.scale = float(x.mean())
        return x * module.scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.module.scale, None


class ScaledBothWays(Block):
    scale: float

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_ByItsModule.apply(x, self))


@case(*PAIRS)
def attribute_read_by_an_autograd_function(side: Side) -> Found:
    """A custom autograd.Function sets `module.scale` in forward, and reads it in its backward."""
    model = Net(ScaledBothWays)
    engine = side.initialize(model, sgd(model))
    for x, y in batches(3 * side.accumulation):
        engine.backward(engine(x, y))
        engine.step()
    return weights(model)
