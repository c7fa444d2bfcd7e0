"""Engines in a row: a gradient is divided once, where it enters the chain, and goes on through all that is before."""

# ruff: noqa: PLC3002

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import HarmonyEngine
from harmony_ds.errors import UnsupportedError
from tests.engine.drive import assert_same, config_of, engine_for, random_rows, sgd

pytestmark = pytest.mark.filterwarnings("ignore:a loss or an output was looked at")
ACCUMULATION = 3


class Around(nn.Module):
    """Gives its layers' output, plus its argument by a way that no layer is on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layers(x.detach())
        return hidden + x


def networks(count: int) -> list[nn.Module]:
    torch.manual_seed(7)
    first = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    later = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(count - 1)]
    return [first, *later]


def inputs(number: int) -> Tensor:
    return random_rows(number, 2, 3)


@contextlib.contextmanager
def engines_of(models: list[nn.Module], accumulation: list[int]) -> Iterator[list[HarmonyEngine]]:
    with contextlib.ExitStack() as stack:
        each = zip(models, accumulation, strict=True)
        yield [stack.enter_context(engine_for(model, sgd, config_of(steps))) for model, steps in each]


Chain = Callable[[list[Any], Tensor, nn.Module], Tensor]


def past_the_layers(e: list[Any], x: Tensor, _: nn.Module) -> Tensor:
    output: Tensor = e[1](e[0](x))
    output.sum().item()  # its forward pass runs, so that the program's own backward pass comes to its output
    return output.pow(2).sum()


CHAINS: dict[str, tuple[int, Chain]] = {
    "two": (2, lambda e, x, _: e[1](e[0](x)).sum()),
    "three": (3, lambda e, x, _: e[2](e[1](e[0](x))).sum()),
    "a module between": (2, lambda e, x, module: e[1](module(e[0](x))).pow(2).mean()),
    "a module after": (2, lambda e, x, module: module(e[1](e[0](x))).pow(2).mean()),
    "the first in the loss, too": (2, lambda e, x, _: (lambda h: e[1](h).sum() + h.pow(2).sum())(e[0](x))),
    "the module in the loss, too": (2, lambda e, x, m: (lambda h: e[1](h).sum() + h.pow(2).sum())(m(e[0](x)))),
    "beside each other": (3, lambda e, x, _: (lambda h: (e[1](h) * e[2](h)).sum())(e[0](x))),
    "past the layers": (1, past_the_layers),  # and `Around`
}


def plainly(models: list[nn.Module], loss_of: Chain, accumulation: int, between: nn.Module) -> list[nn.Module]:
    """Copies of the models after a step in plain PyTorch."""
    plain, between = copy.deepcopy(models), copy.deepcopy(between)
    for i in range(accumulation):
        (loss_of(plain, inputs(i), between) / accumulation).backward()
    for model in plain:
        sgd(model.parameters()).step()
    return plain


def compare(models: list[nn.Module], plain: list[nn.Module]) -> None:
    for model, expected in zip(models, plain, strict=True):
        assert_same(model, expected, bitwise=False)


@pytest.mark.parametrize("by_engine", [False, True])
@pytest.mark.parametrize("chain", CHAINS)
def test_gradients_are_divided_once(chain: str, by_engine: bool) -> None:
    count, loss_of = CHAINS[chain]
    models = networks(count) + ([Around()] if count == 1 else [])
    between = nn.Linear(4, 4)
    plain = plainly(models, loss_of, ACCUMULATION, between)
    with engines_of(models, [ACCUMULATION] * len(models)) as engines:
        for i in range(ACCUMULATION):
            loss = loss_of(engines, inputs(i), between)
            if by_engine:
                engines[-1].backward(loss, retain_graph="too" in chain)
            else:
                loss.backward(retain_graph="too" in chain)
            for engine in engines:
                engine.step()
    compare(models, plain)


def test_a_group_of_train_batch_is_divided_once() -> None:
    models = networks(2)
    plain = plainly(models, lambda e, x, _: e[1](e[0](x)).pow(2).sum(), 2, nn.Identity())
    with engines_of(models, [2, 2]) as (first, second):
        second.train_batch([first(inputs(i)) for i in range(2)], lambda output: output.pow(2).sum())
        first.step()
        first.step()
    compare(models, plain)


def test_other_accumulation_steps_are_refused_for_loss_backward() -> None:
    with engines_of(networks(2), [2, 3]) as (first, second):
        before = {name: value.clone() for name, value in first.module.state_dict().items()}
        with pytest.raises(UnsupportedError, match="gradient_accumulation_steps are 3 and 2"):
            second(first(inputs(0))).sum().backward()
        assert_same(first.module, before, bitwise=True)


def test_other_accumulation_steps_are_those_of_the_engine_that_propagates() -> None:
    models, plain = networks(2), networks(2)
    (plain[1](plain[0](inputs(0))).sum() / 3).backward()
    with engines_of(models, [1, 3]) as (first, second):
        second.backward(second(first(inputs(0))).sum())
        for model, expected in zip(models, plain, strict=True):
            for parameter, same in zip(model.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, same.grad)
        first.step()


def test_engine_backward_in_one_thread_changes_nothing_in_another() -> None:
    """While a thread is in `engine.backward`, another one's `loss.backward()` is divided as always."""
    models, plain = networks(1), networks(1)
    (plain[0](inputs(0)).sum() / 2).backward()
    entered, done = threading.Event(), threading.Event()

    def hold(gradient: Tensor) -> Tensor:
        entered.set()
        assert done.wait(60)
        return gradient

    with engines_of([*networks(1), *models], [2, 2]) as (one, other):
        output = one(inputs(1))
        output.sum().item()
        loss = (output * 1.0).sum()
        held = torch.zeros((), requires_grad=True) * 1.0
        held.register_hook(hold)
        thread = threading.Thread(target=lambda: one.backward(loss + held))
        thread.start()
        assert entered.wait(60)
        other(inputs(0)).sum().backward()
        done.set()
        thread.join()
        for parameter, expected in zip(models[0].parameters(), plain[0].parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad)
