"""A call's micro-batch runs later than it was called, and sees what the call saw."""

from __future__ import annotations

import contextvars
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from harmony_ds import CallChangedError, HarmonyEngine
from tests.engine.drive import config_of, engine_for, seed_of
from tests.families import build_seeded
from tests.oracle import assert_same

WIDTH = 8
ACCUMULATION = 3
STEPS = 2
FLAVOUR: contextvars.ContextVar[float] = contextvars.ContextVar("flavour", default=1.0)
Call = Callable[..., Tensor]
Before = Callable[[nn.Module, int], Any]


class Settings:
    def __init__(self) -> None:
        self.scale = 1.0
        self.parts = [1.0, 2.0]
        self.rope = {"theta": 1.0}


class Layer(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.settings = settings
        self.k = 1.0
        self.mask = torch.ones(WIDTH)
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.k * self.settings.scale * self.settings.parts[0] * self.settings.rope["theta"]
        return x + torch.tanh(self.dropout(self.linear(x)) * scale * self.mask + self.shift) * FLAVOUR.get()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()
        self.layers = nn.ModuleList(Layer(self.settings) for _ in range(4))
        self.gain = 1

    def forward(self, x: Tensor, extra: Any = None) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.gain
        if extra is not None:
            x = x + extra["add"][0]
        return x.square().mean()


def inputs(index: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(index))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def drive(train: Callable[[nn.Module, Call, Callable[[Tensor], None], Callable[[], None]], list[Any]]) -> None:
    """Runs one loop twice, over the plain model and over the engine, and compares weights and losses.

    `train` is given the model, what calls it, what propagates back from a loss, and what ends a micro-batch.
    """
    plain = build_seeded(Model)
    optimizer = sgd(plain.parameters())
    count = 0

    def call(*args: Any, **kwargs: Any) -> Tensor:
        torch.manual_seed(seed_of(*divmod(count, ACCUMULATION)))
        loss: Tensor = plain(*args, **kwargs)
        return loss

    def end() -> None:
        nonlocal count
        count += 1
        if count % ACCUMULATION == 0:
            optimizer.step()
            optimizer.zero_grad()

    expected = [loss.item() for loss in train(plain, call, lambda loss: (loss / ACCUMULATION).backward(), end)]
    model = build_seeded(Model)
    with engine_for(model, sgd, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine:
        losses = train(model, engine, engine.backward, engine.step)
        actual = [loss.item() for loss in losses]
    assert actual == expected
    assert_same(model, plain, bitwise=True)


def each(before: Before) -> None:
    """The ordinary loop, with `before(model, number)` ahead of each call."""

    def train(model: nn.Module, call: Call, backward: Callable[[Tensor], Any], end: Callable[[], None]) -> list[Any]:
        losses = []
        for number in range(STEPS * ACCUMULATION):
            before(model, number)
            loss = call(inputs(number))
            backward(loss)
            end()
            losses.append(loss)
        return losses

    drive(train)


# ---- inputs


def test_a_buffer_that_the_loop_fills_again() -> None:
    def train(model: nn.Module, call: Call, backward: Callable[[Tensor], Any], end: Callable[[], None]) -> list[Any]:
        buffer, array = torch.empty(2, WIDTH), np.zeros(WIDTH, dtype=np.float32)
        extra: dict[str, list[Tensor]] = {"add": []}
        losses = []
        for number in range(STEPS * ACCUMULATION):
            buffer.copy_(inputs(number))
            array[:] = number
            extra["add"][:] = [torch.from_numpy(array)]
            losses.append(call(buffer, extra))
            backward(losses[-1])
            end()
            extra["add"].clear()
        return losses

    drive(train)


def test_an_iterator_that_fills_one_buffer_again() -> None:
    def batches() -> Iterator[Tensor]:
        buffer = torch.empty(2, WIDTH)
        for number in range(STEPS * ACCUMULATION):
            yield buffer.copy_(inputs(number))

    plain = build_seeded(Model).eval()
    optimizer = sgd(plain.parameters())
    for number, batch in enumerate(batches()):
        (plain(batch) / ACCUMULATION).backward()
        if number % ACCUMULATION == ACCUMULATION - 1:
            optimizer.step()
            optimizer.zero_grad()
    model = build_seeded(Model).eval()
    with engine_for(model, sgd, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine:
        given = batches()
        for _ in range(STEPS):
            engine.train_batch(given)
    assert_same(model, plain, bitwise=True)


def test_one_tensor_in_two_places_stays_one() -> None:
    seen = []

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.linear(x), y)

    with engine_for(build_seeded(Pair), sgd, config_of(1)) as engine:
        seen = engine._group._queue
        x = inputs(0)
        loss = engine(x, x)
        (left, right), _ = seen[0].micro_batch.inputs
        assert left is right and left is not x
        engine.backward(loss)
        engine.step()


# ---- modes, attributes, surroundings


def set_mode(model: nn.Module, number: int) -> None:
    model.train(number % 2 == 0)


def set_one_mode(model: Any, number: int) -> None:
    model.layers[1].dropout.train(number % 3 == 0)


def set_attribute(model: Any, number: int) -> None:
    model.gain = 1 + number
    model.layers[number % 4].k = 0.5 * number


def set_setting(model: Any, number: int) -> None:
    model.settings.scale = 1.0 + number


def set_item(model: Any, number: int) -> None:
    model.settings.parts[0] = 1.0 + number
    model.settings.rope["theta"] = 2.0 - number


def set_tensor(model: Any, number: int) -> None:
    model.layers[0].mask = torch.full((WIDTH,), float(number))


def set_probability(model: Any, number: int) -> None:
    for layer in model.layers:
        layer.dropout.p = 0.1 * number


@pytest.mark.parametrize(
    "before", [set_mode, set_one_mode, set_attribute, set_setting, set_item, set_tensor, set_probability]
)
def test_what_the_loop_sets_between_calls(before: Before) -> None:
    each(before)


def test_what_is_set_after_the_last_call_is_not_seen_and_stays() -> None:
    def train(model: Any, call: Call, backward: Callable[[Tensor], Any], end: Callable[[], None]) -> list[Any]:
        losses = []
        for number in range(STEPS * ACCUMULATION):
            losses.append(call(inputs(number)))
            backward(losses[-1])
            model.gain, model.settings.scale = 7, float(number)
            end()
            assert (model.gain, model.settings.scale) == (7, float(number))
            model.gain = 1
        return losses

    drive(train)


def test_context_variables_are_those_of_the_call() -> None:
    each(lambda model, number: FLAVOUR.set(1.0 + number))
    FLAVOUR.set(1.0)
