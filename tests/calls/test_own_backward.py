"""Hooks that propagate back themselves, as deep equilibrium models do: inside a layer they work, through layers they are
refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import UnsupportedError
from tests.engine.drive import adamw, config_of, engine_for, seed_of
from tests.engine.test_paths import ACCUMULATION, GROUPS, WIDTH, built
from tests.oracle import assert_same, train_plainly


class Cell(nn.Module):
    """Contracts to a fixed point."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Linear(WIDTH, WIDTH)
        self.input = nn.Linear(WIDTH, WIDTH)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.3 * self.state(z) + self.input(x))


def by_grad(cell: Cell, x: Tensor, z: Tensor) -> None:
    """The hook of deep equilibrium models: the gradient solves a linear fixed point."""
    start = z.detach().requires_grad_()
    again = cell(start, x)

    def solve(gradient: Tensor) -> Tensor:
        y = gradient
        for _ in range(4):
            y = torch.autograd.grad(again, start, y, retain_graph=True)[0] + gradient
        return y

    z.register_hook(solve)


def by_backward(cell: Cell, x: Tensor, z: Tensor) -> None:
    """By `backward` in the place of `grad`, which adds to gradients of weights as well."""
    start = z.detach().requires_grad_()
    again = cell(start, x.detach())

    def solve(gradient: Tensor) -> Tensor:
        again.backward(gradient)
        assert start.grad is not None
        return gradient + start.grad

    z.register_hook(solve)


def by_calling(cell: Cell, x: Tensor, z: Tensor) -> None:
    """The cell is called in the hook."""
    start, given = z.detach().requires_grad_(), x.detach()

    def solve(gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            again = cell(start, given)
        return gradient + torch.autograd.grad(again, start, gradient)[0]

    z.register_hook(solve)


def by_itself(cell: Cell, x: Tensor, z: Tensor) -> None:
    """Through the tensor that it is on, once it has removed itself."""
    handle: list[Any] = []

    def solve(gradient: Tensor) -> Tensor:
        handle.pop().remove()
        return gradient + torch.autograd.grad(z, x, gradient, retain_graph=True)[0]

    handle.append(z.register_hook(solve))


Hook = Callable[[Cell, Tensor, Tensor], None]


class Equilibrium(nn.Module):
    """A fixed point of its cell, without the graph of the way there."""

    def __init__(self, hook: Hook) -> None:
        super().__init__()
        self.cell = Cell()
        self.hook = hook

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(6):
                z = self.cell(z, x)
        z = self.cell(z, x)
        if z.requires_grad:
            self.hook(self.cell, x, z)
        return z


class Model(nn.Module):
    def __init__(self, hook: Hook) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.solver = Equilibrium(hook)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.last(self.solver(self.first(x))) - y).pow(2).mean()}


@pytest.mark.parametrize("hook", [by_grad, by_backward, by_calling, by_itself])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_hook_that_differentiates_inside_a_layer_is_plain_pytorchs(hook: Hook, clip: float | None) -> None:
    plain, model = built(lambda: Model(hook)), built(lambda: Model(hook))
    config = config_of(ACCUMULATION, clip, {"layers": ["solver"], "pack_layers": 1, "residency": 0})
    with engine_for(model, adamw, config) as engine:
        for group in GROUPS:
            engine.train_batch(iter(group))
    train_plainly(plain, GROUPS, adamw(plain.parameters()), clip=clip, seed_of=seed_of)
    assert_same(model, plain, bitwise=hook is not by_backward)  # which adds to weights twice in each micro-batch


@pytest.mark.parametrize("hook", [by_grad, by_backward, by_calling, by_itself])
def test_a_hook_that_differentiates_through_layers_is_refused_with_what_to_do(hook: Hook) -> None:
    model = built(lambda: Model(hook))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with engine_for(model, adamw, config_of(ACCUMULATION)) as engine:
        with pytest.raises(UnsupportedError, match=r"hook.*\"harmony\": \{\"layers\": \[\"\.\.\.\"\]\}"):
            engine.train_batch(iter(GROUPS[0]))
        with pytest.raises(UnsupportedError, match=r"\"layers\""):
            engine.train_batch(iter(GROUPS[0]))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_hook_that_calls_itself_is_refused_before_the_stack_ends() -> None:
    class Removed(Equilibrium):
        def forward(self, x: Tensor) -> Tensor:
            z = self.cell(self.cell(torch.zeros_like(x), x), x)

            def solve(gradient: Tensor) -> Tensor:
                self.handle.remove()  # of another pass, by then
                return gradient + torch.autograd.grad(z, x, gradient, retain_graph=True)[0]

            if z.requires_grad:
                self.handle = z.register_hook(solve)
            return z

    class Other(Model):
        def __init__(self) -> None:
            super().__init__(by_grad)
            self.solver = Removed(by_grad)
            self.solver.handle = None

    config = config_of(ACCUMULATION, None, {"layers": ["solver"]})
    with (
        engine_for(built(Other), adamw, config) as engine,
        pytest.raises(UnsupportedError, match=r"calls itself without end.*local variable"),
    ):
        engine.train_batch(iter(GROUPS[0]))
