"""Heads, and what is none: whether a call treats tokens alike is proved on a device with values and on one without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harmony_ds.model.token_proof import ModuleCall, prove
from harmony_ds.model.token_rules import TokensMixedError

WIDTH = 8
TOKENS, FEWER = 257, 251
Run = Callable[[Tensor], Any]


class Calling(nn.Module):
    """Calls a function, or a module."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(x)


def treats_tokens_alike(run: Run, like: Tensor, dim: int) -> bool:
    """Whether that is proved; `like`: an argument with one token."""
    shape = list(like.shape)
    shape[dim] = TOKENS
    calling = Calling(run)
    call = ModuleCall.taken_apart(calling, calling.forward, (like.new_zeros(shape).requires_grad_(),), {})
    try:
        prove(call, dim, [FEWER])
    except TokensMixedError:
        return False
    return True


def module(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.narrow, self.widen = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 2), nn.Linear(2, 32)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base(x) + 2.0 * self.widen(self.narrow(x))
        return made


ALIKE: dict[str, Callable[[], Run]] = {
    "a linear layer": lambda: nn.Linear(WIDTH, 32),
    "without bias": lambda: nn.Linear(WIDTH, 32, bias=False),
    "BERT's head": lambda: module(nn.Linear(WIDTH, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 32)),
    "a normed head": lambda: module(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 32)),
    "a soft cap": lambda: lambda x: torch.tanh(x / 30.0) * 30.0,
    "values of other dtypes": lambda: lambda x: x.bfloat16().float().softmax(-1),
    "an adapter beside": Adapted,
    "a scale by width": lambda: lambda x: x * x.shape[-1] ** -0.5,
    "flat tokens": lambda: lambda x: F.linear(x.flatten(0, 1), torch.ones(4, WIDTH)).view(1, -1, 4),
    "its own mean": lambda: lambda x: x - x.mean(-1, keepdim=True),
}


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * gradient.mean()


def with_capacity(x: Tensor) -> Tensor:
    return x.masked_fill(torch.arange(x.shape[1]).view(1, -1, 1) > 4, 0.0)


MIXED: dict[str, Run] = {
    "a mean over tokens": lambda x: x - x.mean(1, keepdim=True),
    "a softmax over tokens": lambda x: x.softmax(1),
    "a shift": lambda x: torch.cat([x[:, 1:], x[:, :1]], 1),
    "a roll": lambda x: x.roll(1, 1),
    "a sum so far": lambda x: x.cumsum(1),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    "how many there are": lambda x: x / x.shape[1],
    "the largest first": lambda x: x.sort(1).values,
    "where a token lies": lambda x: x + torch.arange(x.shape[1]).view(1, -1, 1),
    "a capacity": with_capacity,
    "batch normalization": lambda x: F.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2),
    "random numbers": lambda x: F.dropout(x, 0.5),
    "a function whose backward pass is Python": Scaled.apply,
    "fewer tokens": lambda x: x[:, ::2],
    "one result": lambda x: x.sum(),
    "what the values say": lambda x: x[x.sum(-1) > 0],
    "an error": lambda x: x @ x,
    "a number of the values": lambda x: x * float(x.sum()),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ALIKE)
def test_tokens_that_are_treated_alike(name: str, device: str) -> None:
    with torch.device(device):
        run = ALIKE[name]()
        assert treats_tokens_alike(run, torch.zeros(1, 1, WIDTH), 1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", MIXED)
def test_tokens_that_depend_on_each_other(name: str, device: str) -> None:
    with torch.device(device):
        assert not treats_tokens_alike(MIXED[name], torch.zeros(1, 1, WIDTH), 1)


def test_tokens_may_lie_in_the_first_dimension() -> None:
    assert treats_tokens_alike(nn.Linear(WIDTH, 32), torch.zeros(1, WIDTH), 0)
    assert not treats_tokens_alike(lambda x: x - x.mean(0), torch.zeros(1, WIDTH), 0)
