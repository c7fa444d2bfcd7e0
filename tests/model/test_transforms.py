"""`torch.func` over the model of an engine works as in plain PyTorch; it cannot replace parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from harmony_ds import ModelError
from tests.engine.drive import adamw, config_of, engine_for, seed_of
from tests.engine.residual_net import ACCUMULATION, GROUPS, WIDTH, Net, built
from tests.oracle import assert_same, train_plainly

Y = torch.ones(2, WIDTH)
X = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)


def test_transform_of_the_module() -> None:
    plain, model = built(Net), built(Net)
    with engine_for(model, adamw, config_of(ACCUMULATION)) as engine:
        expected = grad(lambda x: plain(x=x, y=Y)["loss"])(X)
        assert torch.equal(grad(lambda x: engine.module(x=x, y=Y)["loss"])(X), expected)
        _train_alike(engine, model, plain)


def test_functional_call() -> None:
    plain, model = built(Net), built(Net)
    weights = {name: 2 * p.detach() for name, p in plain.named_parameters()}

    def loss(called: nn.Module, weights: dict[str, Tensor]) -> Tensor:
        made: Tensor = functional_call(called, weights, kwargs={"x": X, "y": Y})["loss"]
        return made

    with engine_for(model, adamw, config_of(ACCUMULATION)) as engine:
        with pytest.raises(ModelError, match="is replaced, but an engine trains this model"):
            loss(engine, {f"module.{name}": weight for name, weight in weights.items()})
        with pytest.raises(ModelError, match="is replaced, but an engine trains this model"):
            grad(lambda w: loss(engine.module, w))(weights)
        _train_alike(engine, model, plain)


def _train_alike(engine: Any, model: nn.Module, plain: nn.Module) -> None:
    for group in GROUPS:
        engine.train_batch(iter(group))
    engine.finish_updates()
    train_plainly(plain, GROUPS, adamw(plain.parameters()), clip=None, seed_of=seed_of)
    assert_same(model, plain, bitwise=True)
