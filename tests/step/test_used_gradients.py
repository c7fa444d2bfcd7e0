"""Placeholders of used gradients are those of the gradients that the last step by hand has used, and of no others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from harmony_ds.step.used_gradients import UsedGradient
from tests.engine.drive import config_of, engine_for, sgd


class Branches(nn.Module):
    """One of two layers. `troubles` are raised, each once, by forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.v = nn.Linear(4, 4), nn.Linear(4, 4)
        self.troubles: list[BaseException] = []

    def forward(self, inputs: Tensor, through: str) -> Tensor:
        outputs: Tensor = self.get_submodule(through)(inputs)
        if self.troubles:
            raise self.troubles.pop()
        return outputs.square().mean()


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning")
def test_a_step_that_was_dropped_has_used_none() -> None:
    model = Branches()
    optimizer = sgd(model.parameters())
    inputs = torch.ones(2, 4)
    with engine_for(model, lambda _: optimizer, config_of(1)) as engine:
        engine(inputs, "u").backward()
        assert model.u.weight.grad is not None
        loss = engine(inputs, "v")
        loss.backward()
        model.troubles.append(ValueError("the model's own"))
        with pytest.raises(ValueError, match="the model's own"):
            _ = model.v.weight.grad
        engine(inputs, "v").backward()
        optimizer.step()
        assert isinstance(model.v.weight.grad, UsedGradient)
        assert model.u.weight.grad is None
