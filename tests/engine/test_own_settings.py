"""Settings that the code of a micro-batch makes on modules are its own: what is refused, joined and evaluated.

(What is equal to plain PyTorch is in tests/exactness.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import UnsupportedError
from tests.engine.drive import config_of, engine_for, loop_plainly, weights_of
from tests.exactness.cases_adapters import Stack, TakenBack, inputs
from tests.families import build_seeded
from tests.oracle import assert_same

pytestmark = pytest.mark.fixed_times

WIDTH, ACCUMULATION = 8, 3


def sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def steps_of(count: int) -> list[list[Tensor]]:
    return [[inputs(step * ACCUMULATION + number) for number in range(ACCUMULATION)] for step in range(count)]


def plainly(build: Callable[[], Stack], steps: list[list[Tensor]]) -> Stack:
    model = build_seeded(build)
    batches = [x for group in steps for x in group]
    loop_plainly(model, batches, ACCUMULATION, lambda call, x: call(x), sgd, seeded=True)
    return model


def test_it_is_joined_with_its_likes() -> None:
    plain, model = plainly(TakenBack, steps_of(2)), build_seeded(TakenBack)
    with engine_for(model, sgd, config_of(ACCUMULATION, None, {"pack_layers": 1, "micro_batch": 6})) as engine:
        for group in steps_of(2):
            engine.train_batch(group)
        for name, weight in weights_of(plain).items():
            torch.testing.assert_close(weights_of(model)[name], weight, rtol=1e-5, atol=1e-6)


class Thawed(Stack):
    """Sets the adapter that is not trained, with gradients on."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.adapters["b"].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.set_adapter("b")
        return self.body(x).mean()


def test_gradients_of_what_is_not_trained_are_refused_by_name() -> None:
    model = build_seeded(Thawed)
    before = weights_of(model)
    with engine_for(model, sgd, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine:
        with pytest.raises(UnsupportedError, match=r"layers\.\d\.adapters\.b\.\w+, which is not trained"):
            engine.train_batch(*steps_of(1))
        engine.finish_updates()
        assert_same(weights_of(model), before, bitwise=True)


def test_an_error_leaves_settings_as_they_were() -> None:
    class Failing(Stack):
        def forward(self, x: Tensor) -> Tensor:
            self.set_adapter("b")
            if x[0, 0] > 90:
                raise ValueError("too large")
            loss = self.body(x).mean()
            self.set_adapter("a")
            return loss

    model = build_seeded(Failing)
    with engine_for(model, sgd, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine:
        engine.train_batch(*steps_of(1))
        (bad,) = steps_of(1)
        bad[1][0, 0] = 91.0
        with pytest.raises(ValueError, match="too large"):
            engine.train_batch(bad)
        assert all(layer.active == ["a"] for layer in model.layers)


class OtherwiseInEvaluation(Stack):
    """Uses the other adapter where it is evaluated, which is not measured again."""

    def forward(self, x: Tensor) -> Tensor:
        before = self.set_adapter("a" if self.training else "b", flags=False)
        loss = self.body(x).mean()
        self.set_adapter(before, flags=False)
        return loss


def test_evaluation_has_settings_of_its_own() -> None:
    model = build_seeded(OtherwiseInEvaluation)
    batches = [inputs(number) for number in range(ACCUMULATION)]
    with engine_for(model, sgd, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine:
        engine.train_batch(batches)
        engine.eval()
        found = engine.eval_batch(iter(batches))
    with torch.no_grad():
        assert found.item() == torch.stack([model(batch) for batch in batches]).mean().item()


class Outside(Stack):
    """Freezes a parameter that it uses between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.requires_grad_(bool(x[0, 0] > 0))
        return (self.body(x) * self.scale).mean()


def test_to_freeze_what_code_between_layers_uses_is_refused_by_name() -> None:
    assert len({bool(inputs(number)[0, 0] > 0) for number in range(ACCUMULATION)}) == 2
    with (
        engine_for(build_seeded(Outside), sgd, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine,
        pytest.raises(UnsupportedError, match="forward sets requires_grad of scale"),
    ):
        engine.train_batch(*steps_of(1))
