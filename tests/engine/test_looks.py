"""Losses that are looked at before their step, in every family: gradients of outputs on their way between layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harmony_ds import UnsupportedError
from tests.engine.drive import config_of, engine_for, groups_of, plainly
from tests.families import FAMILIES, MODULES, Family
from tests.oracle import assert_same, loss_in

ACCUMULATION = 3


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Rounding stays rounding: a sum over several layers is regrouped where one of its micro-batches ran on its own."""
    return torch.optim.SGD(parameters, lr=1e-2)


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning")
@pytest.mark.parametrize("family", [pytest.param(one, id=one.name) for one in FAMILIES + MODULES])
def test_looking_at_some_losses_changes_no_gradient(family: Family) -> None:
    groups = groups_of(family, 1, ACCUMULATION)
    dropout = 0.0 if family.name == "whisper" else 0.1  # it drops layers, too: see below
    plain, losses = plainly(family, dropout, groups, sgd, 0.5)
    model = family.build(dropout)
    with engine_for(model, sgd, config_of(ACCUMULATION, 0.5, {"pack_layers": 1})) as engine:
        for place, batch in enumerate(groups[0]):
            loss = loss_in(engine(**batch))
            if place != 1:
                assert loss.item() == losses[0][place]
            engine.backward(loss)
            engine.step()
    assert_same(model, plain, bitwise=False)


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning")
def test_another_way_through_the_model_beside_a_look_is_refused_by_name_and_training_goes_on() -> None:
    family = next(one for one in FAMILIES if one.name == "whisper")
    groups = groups_of(family, 1, ACCUMULATION)
    plain, _ = plainly(family, 0.1, groups, sgd, 0.5)
    model = family.build(0.1)
    with engine_for(model, sgd, config_of(ACCUMULATION, 0.5, {"pack_layers": 1})) as engine:
        *before, last = [loss_in(engine(**batch)) for batch in groups[0]]
        before[0].item()
        for loss in before:
            engine.backward(loss)
            engine.step()
        engine.backward(last)
        with pytest.raises(UnsupportedError, match="another way through the model"):
            engine.step()
        engine.train_batch(iter(groups[0]))
    assert_same(model, plain, bitwise=False)
