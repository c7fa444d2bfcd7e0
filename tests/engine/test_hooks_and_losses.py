"""A loop's own loss where forward hooks and attributes of modules keep tensors, which the loss may be made of, or not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from harmony_ds import BatchError, ModelError, UnsupportedError
from tests.engine.drive import config_of, engine_for, loop_plainly, loop_with, sgd
from tests.oracle import assert_same

pytestmark = pytest.mark.fixed_times

ACCUMULATION, STEPS = 2, 3


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(4)
        super().__init__(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)), nn.Linear(6, 5))
        self.kept: list[Tensor] = []
        self.step = 0


class Attribute(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.extra = y.square().mean()
        return y


def statistics(model: Net) -> None:
    for layer in model:
        layer.register_forward_hook(lambda module, args, output: model.kept.append(output.detach().mean()))


def features(model: Net) -> None:
    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        model.kept[:] = [output]

    model[1].register_forward_hook(keep)


def pruned(model: Net) -> None:
    prune.l1_unstructured(model[0][0], "weight", 0.4)


def nothing(model: Net) -> None:
    pass


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(6)
    return [
        (torch.randn(2, 6, generator=generator), torch.randint(5, (2,), generator=generator))
        for _ in range(ACCUMULATION * STEPS)
    ]


def of_outputs(call: Any, net: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(call(x), y)


def of_outputs_by_steps(call: Any, net: Net, x: Tensor, y: Tensor) -> Tensor:
    return -call(x).log_softmax(-1).gather(1, y[:, None]).squeeze(1).mean()


def of_features(call: Any, net: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(call(x), y) + 0.5 * net.kept[0].square().mean()


def of_an_attribute(call: Any, net: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(call(x), y) + 0.5 * net.extra


CASES: dict[str, tuple[type[Net], Callable[[Net], None], Callable[..., Tensor], bool]] = {
    "statistics": (Net, statistics, of_outputs, True),
    "statistics, by steps": (Net, statistics, of_outputs_by_steps, True),
    "features that the loss does not use": (Net, features, of_outputs, True),
    "features, engine.backward": (Net, features, of_features, False),
    "pruned": (Net, pruned, of_outputs, True),
    "an attribute that the loss does not use": (Attribute, nothing, of_outputs, True),
    "an attribute, engine.backward": (Attribute, nothing, of_an_attribute, False),
}


@pytest.mark.parametrize(
    ("name", "by_loss"),
    [(name, by_loss) for name in CASES for by_loss in ([False] if "engine.backward" in name else [False, True])],
)
def test_a_loss_of_outputs_alone_is_grouped_after_the_first_step(
    name: str, by_loss: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cls, change, make_loss, groups = CASES[name]
    plain, model = cls(), cls()
    change(plain)
    change(model)
    expected = loop_plainly(plain, batches(), ACCUMULATION, lambda call, batch: make_loss(call, plain, *batch))
    with (
        engine_for(model, sgd, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine,
        caplog.at_level(logging.WARNING, "harmony_ds"),
    ):
        losses, ratios = loop_with(engine, batches(), lambda call, batch: make_loss(call, model, *batch), by_loss)
    assert losses == expected
    assert_same(model, plain, bitwise=True)
    assert [ratio == 1.0 for ratio in ratios[1:]] == [groups] * (STEPS - 1), ratios
    assert ("runs alone" in caplog.text) is not groups
    hooks = any(module._forward_hooks for module in model.modules())
    assert caplog.text.count("is of an earlier step") == int(hooks and groups)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("cls", "change", "of_more"), [(Net, features, of_features), (Attribute, nothing, None)])
def test_a_loss_that_is_made_of_more_later_is_refused(
    cls: type[Net], change: Callable[[Net], None], of_more: Any, apart: bool
) -> None:
    model = cls()
    change(model)
    with engine_for(model, sgd, config_of(1, None, {"pack_layers": 1})) as engine:
        for x, y in batches()[:3]:
            engine.backward(of_outputs(engine, model, x, y))
            engine.step()
        x, y = batches()[3]
        if apart:
            engine.backward(of_outputs(engine, model, x, y))
            with pytest.raises((ModelError, RuntimeError), match=r"propagated through|a second time"):
                engine.backward(model.kept[0].mean() if of_more else model.extra)
        else:
            with pytest.raises(BatchError, match="an earlier forward pass has left"):
                (of_more or of_an_attribute)(engine, model, x, y)
            outputs = engine(x)
            with pytest.warns(RuntimeWarning, match="looked at"):
                F.cross_entropy(outputs, y).item()
            more = model.kept[0].square().mean() if of_more else model.extra
            engine.backward(F.cross_entropy(outputs, y) + more)  # forward has run
            engine.step()


def test_what_another_micro_batch_of_the_step_has_left_is_refused_too() -> None:
    model = Attribute()
    with engine_for(model, sgd, config_of(2, None, {"pack_layers": 1})) as engine:
        for x, y in batches()[:2]:
            engine.backward(of_outputs(engine, model, x, y))
            engine.step()
        first, second = batches()[2:4]
        loss = of_outputs(engine, model, *first)
        with pytest.warns(RuntimeWarning, match="looked at"):
            loss.item()
        with pytest.raises(BatchError, match="an earlier forward pass has left"):
            of_an_attribute(engine, model, *second)
        total = loss + of_outputs(engine, model, *second)  # a sum of losses leads to layers by outputs alone
        engine.backward(total)


@pytest.mark.parametrize(
    ("cls", "change", "of_more"), [(Net, features, of_features), (Attribute, nothing, of_an_attribute)]
)
def test_gradients_that_cannot_be_divided_are_refused(
    cls: type[Net], change: Callable[[Net], None], of_more: Callable[..., Tensor]
) -> None:
    model = cls()
    change(model)
    with engine_for(model, sgd, config_of(2, None, {"pack_layers": 1})) as engine:
        x, y = batches()[0]
        with pytest.raises(UnsupportedError, match=r"Call engine\.backward"):
            of_more(engine, model, x, y).backward()
