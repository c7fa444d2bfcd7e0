"""State that a forward pass leaves behind, and that a recomputation meets again."""

from __future__ import annotations

import random

from torch import Tensor, nn

from tests.exactness.case import Found, case
from tests.exactness.models import WIDTH, Block, Net, adamw, batches, train, weights
from tests.exactness.sides import Side


@case(accumulation=(1, 4))
def spectral_norm(side: Side) -> Found:
    """Every block's linear is under torch.nn.utils.parametrizations.spectral_norm."""

    def block() -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())

    model = Net(block)
    engine = side.initialize(model, adamw(model))
    losses = train(engine, batches(3 * side.accumulation))
    return {**weights(model), "losses": losses}


class RandomScale(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + random.random())


@case(accumulation=(1, 4))
def random_of_python(side: Side) -> Found:
    """Blocks draw from Python's random in forward."""
    model = Net(RandomScale)
    engine = side.initialize(model, adamw(model))
    train(engine, batches(3 * side.accumulation))
    return weights(model)
