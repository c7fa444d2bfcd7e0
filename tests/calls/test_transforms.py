"""`torch.func` over an engine is refused by name; over its model it works as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

from harmony_ds import ModelError, UnsupportedError
from tests.engine.drive import adamw, config_of, engine_for, seed_of
from tests.engine.test_paths import ACCUMULATION, GROUPS, WIDTH, Net, built
from tests.oracle import assert_same, train_plainly

Function = Callable[[Tensor], Tensor]
Y = torch.ones(2, WIDTH)
X = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)


def dual(function: Function) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(X, X.cos()))).tangent


TRANSFORMS: dict[str, Callable[[Function], Any]] = {
    "grad": lambda f: grad(f)(X),
    "vmap": lambda f: vmap(f)(torch.stack([X, X + 1])),
    "jvp": lambda f: jvp(f, (X,), (X.cos(),))[1],
    "dual_level": dual,
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms(transform: Callable[[Function], Any]) -> None:
    plain, model = built(Net), built(Net)
    with engine_for(model, adamw, config_of(ACCUMULATION)) as engine:
        with pytest.raises(UnsupportedError, match=r"the engine was called inside .* engine\.module"):
            transform(lambda x: engine(x=x, y=Y)["loss"])
        expected = transform(lambda x: plain(x=x, y=Y)["loss"])
        assert torch.equal(transform(lambda x: engine.module(x=x, y=Y)["loss"]), expected)
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
