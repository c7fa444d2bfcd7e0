"""What the program has outside the model, and a loss leads to, is as it was when the model has been measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import HarmonyEngine
from tests.engine.drive import assert_same, config_of, engine_for, random_rows, sgd

pytestmark = pytest.mark.filterwarnings("ignore:a loss or an output was looked at")
ACCUMULATION = 2


class Net(nn.Module):
    """Two layers; the first one, and the code between them, may use a module that is not the model's."""

    def __init__(self, outside: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = Around(outside), nn.Linear(8, 8)
        self.between = [outside]

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.between[0] is not None:
            hidden = hidden + self.between[0](hidden)
        output: Tensor = self.second(hidden)
        return output


class Around(nn.Linear):
    def __init__(self, outside: nn.Module | None) -> None:
        super().__init__(8, 8)
        self.outside = [outside]

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output if self.outside[0] is None else output + self.outside[0](x)


def head() -> nn.Linear:
    torch.manual_seed(4)
    return nn.Linear(8, 8)


def inputs(number: int) -> Tensor:
    return random_rows(number, 2, 8)


def groups() -> list[list[Tensor]]:
    return [[inputs(ACCUMULATION * step + i) for i in range(ACCUMULATION)] for step in range(2)]


LossOf = Callable[[Any, Tensor], Tensor]
Drive = Callable[[HarmonyEngine, list[Tensor], LossOf, LossOf], None]
"""Of an engine, a group, its loss from the model's output, and from the model."""


def by_train_batch(engine: HarmonyEngine, group: list[Tensor], of_output: LossOf, of_model: LossOf) -> None:
    engine.train_batch(group, lambda output: of_output(output, group[0]))


def by_train_group(engine: HarmonyEngine, group: list[Tensor], of_output: LossOf, of_model: LossOf) -> None:
    engine.train_group(group, lambda batch: of_model(engine.module, batch) / ACCUMULATION)


def by_engine_backward(engine: HarmonyEngine, group: list[Tensor], of_output: LossOf, of_model: LossOf) -> None:
    for x in group:
        engine.backward(of_model(engine, x))
        engine.step()


def by_loss_backward(engine: HarmonyEngine, group: list[Tensor], of_output: LossOf, of_model: LossOf) -> None:
    for x in group:
        (of_model(engine, x) / 1.0).backward()
        engine.step()


WAYS: dict[str, Drive] = {
    "train_batch": by_train_batch,
    "train_group": by_train_group,
    "engine.backward": by_engine_backward,
    "loss.backward": by_loss_backward,
}


@pytest.mark.parametrize("used", ["after the model", "in a layer and between layers"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_a_module_outside_are_those_of_plain_pytorch(way: str, used: str) -> None:
    after = used == "after the model"

    def of_output(head: nn.Module, output: Tensor) -> Tensor:
        return (head(output) if after else output).pow(2).mean()

    ours, plain = head(), head()
    model, same = (Net(), Net()) if after else (Net(ours), Net(plain))
    optimizer = sgd(same.parameters())
    seen: list[Tensor] = []
    with engine_for(model, sgd, config_of(ACCUMULATION)) as engine:
        handle = ours.weight.register_hook(seen.append)
        complete: list[Tensor] = []
        ours.bias.register_post_accumulate_grad_hook(complete.append)
        for group in groups():
            for x in group:
                (of_output(plain, same(x)) / ACCUMULATION).backward()
            optimizer.step()
            optimizer.zero_grad()
            WAYS[way](
                engine,
                group,
                lambda output, _: of_output(ours, output),
                lambda model, x: of_output(ours, model(x)),
            )
            undivided = ACCUMULATION if after and way == "loss.backward" else 1
            for parameter, expected in zip(ours.parameters(), plain.parameters(), strict=True):
                assert parameter.grad is not None and expected.grad is not None
                torch.testing.assert_close(parameter.grad, expected.grad * undivided)
            ours.zero_grad()
            plain.zero_grad()
        assert len(seen) == len(complete) == 2 * ACCUMULATION
        handle.remove()
    assert_same(model, same, bitwise=False)


def test_a_gradient_that_was_there_stays_the_same_object() -> None:
    ours = head()
    before = torch.full_like(ours.weight, 0.25)
    ours.weight.grad = before
    ours.bias.requires_grad_(False)
    calls: list[Tensor] = []

    def loss_of(output: Tensor) -> Tensor:
        calls.append(output)
        if len(calls) > 3:  # one pass has measured bytes, and two times
            raise ValueError("the step itself")
        loss: Tensor = ours(output).pow(2).mean()
        return loss

    with engine_for(Net(), sgd, config_of(1)) as engine, pytest.raises(ValueError, match="the step itself"):
        engine.train_batch([inputs(0)], loss_of)
    assert ours.weight.grad is before
    assert torch.equal(before, torch.full_like(before, 0.25))
    assert ours.bias.grad is None


def test_host_parameters_in_a_loss_function_get_their_gradient_once() -> None:
    model, plain = Net(), Net()
    optimizer = sgd(plain.parameters())
    with engine_for(model, sgd, config_of(ACCUMULATION)) as engine:
        weight = model.second.weight
        for group in groups():
            for x in group:
                ((plain(x).pow(2).mean() + plain.second.weight.pow(2).sum()) / ACCUMULATION).backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.train_batch(group, lambda output: output.pow(2).mean() + weight.pow(2).sum())
    assert_same(model, plain, bitwise=False)


def test_a_graph_that_was_there_is_propagated_through_once() -> None:
    """A loss function may use what was computed before, whose graph measuring must not free."""
    ours, plain = head(), head()
    target, same_target = torch.tanh(ours(inputs(7))), torch.tanh(plain(inputs(7)))
    model, same = Net(), Net()
    (same(inputs(0)) - same_target).pow(2).mean().backward()
    with engine_for(model, sgd, config_of(1)) as engine:
        engine.train_batch([inputs(0)], lambda output: (output - target).pow(2).mean())
    for parameter, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


def test_another_engine_that_a_loss_function_leads_to_gets_its_gradient_once() -> None:
    """Measuring one engine propagates from a loss that leads to the outputs of another one."""
    models, plain = [Net(), head()], [Net(), head()]
    (plain[0](inputs(0)) - plain[1](inputs(7))).pow(2).mean().backward()
    with engine_for(models[0], sgd, config_of(1)) as engine, engine_for(models[1], sgd, config_of(1)) as other:
        target = other(inputs(7))
        target.sum().item()
        engine.train_batch([inputs(0)], lambda output: (output - target).pow(2).mean())
        for parameter, expected in zip(models[1].parameters(), plain[1].parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad)
