"""Tensors that enter or leave a layer by another way than its arguments and results: what they carry is what it is in
plain PyTorch, or an error that names the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harmony_ds import HarmonyEngine, ModelError
from tests.engine.drive import adamw, config_of, engine_for, seed_of, sgd, weights_of
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


def assert_equals_plain(make: Callable[[], nn.Module], **harmony: Any) -> nn.Module:
    """Losses, weights and buffers after some steps; returns the engine's model."""
    plain = built(make)
    losses = train_plainly(plain, GROUPS, adamw(plain.parameters()), clip=None, seed_of=seed_of)
    with training(make, **harmony) as (model, engine):
        actual = [engine.train_batch(iter(group)).item() for group in GROUPS]
    assert_same(model, plain, bitwise=True)
    assert actual == [torch.tensor(group).mean().item() for group in losses]
    return model


def assert_refused(make: Callable[[], nn.Module], match: str, error: type[Exception] = ModelError) -> None:
    """Training ends with `error` before a weight has changed."""
    with training(make) as (model, engine):
        before = weights_of(model)
        with pytest.raises(error, match=match):
            for group in GROUPS:
                engine.train_batch(iter(group))
        engine.finish_updates()
        assert_same(model, before, bitwise=True)


# ---- the caller's own graph


def test_measuring_leaves_no_gradient_on_an_input() -> None:
    plain = built(Net)
    inputs = [[{**batch, "x": batch["x"].clone().requires_grad_()} for batch in group] for group in GROUPS]
    expected = [[{**batch, "x": batch["x"].clone().requires_grad_()} for batch in group] for group in GROUPS]
    train_plainly(plain, expected, sgd(plain.parameters()), clip=None, seed_of=seed_of)
    model = built(Net)
    with engine_for(model, sgd, config_of(ACCUMULATION)) as engine:
        for group in inputs:
            engine.train_batch(iter(group))
    for ours, theirs in zip(inputs, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a["x"].grad, b["x"].grad)
    assert_same(model, plain, bitwise=True)


def test_a_trainable_module_in_front_of_the_engine_gets_its_gradients_and_no_others() -> None:
    fronts, models = [built(lambda: nn.Linear(WIDTH, WIDTH)) for _ in range(2)], [built(Net), built(Net)]
    for step, batch in enumerate(GROUPS[0]):
        models[0].zero_grad()
        models[0](x=fronts[0](batch["x"]), y=batch["y"])["loss"].backward()
        sgd(models[0].parameters()).step()
        del step
    with engine_for(models[1], sgd, config_of(1)) as engine:
        for batch in GROUPS[0]:
            loss = engine(x=fronts[1](batch["x"]), y=batch["y"])["loss"]
            engine.backward(loss)
            engine.step()
    assert_same(models[1], models[0], bitwise=True)
    for a, b in zip(fronts[1].parameters(), fronts[0].parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


# ---- activations that a hook or a closure carries out of a layer


class CapturingNet(Net):
    """The loss takes an activation that a hook on an inner module of block `of` has seen."""

    def __init__(self, of: int, detached: bool = False) -> None:
        super().__init__()
        self.of = of
        self.detached = detached
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, y: Tensor) -> Any:
        seen: list[Tensor] = []

        def look(module: nn.Module, given: Any, made: Tensor) -> None:
            seen.append(made.detach() if self.detached else made)

        handle = self.blocks[self.of].linear.register_forward_hook(look)
        loss = super().forward(x, y)["loss"]
        handle.remove()
        return {"loss": loss + 0.1 * seen[0].pow(2).mean()}


def test_an_activation_that_a_hook_carries_out_without_its_graph() -> None:
    assert_equals_plain(lambda: CapturingNet(1, detached=True))


def test_an_activation_that_a_hook_carries_out_is_refused_by_the_layers_name() -> None:
    assert_refused(lambda: CapturingNet(1), match=r"blocks\.1")
