"""Recomputed layers are compared with their forward passes in the first step of several micro-batches, and in no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds.model import layer_call
from tests.engine.drive import config_of, engine_for, sgd

ACCUMULATION = 8


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Flatten(0), nn.Linear(8, 1), nn.Flatten(0))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of outputs of each call that is kept for comparison."""
    seen: list[int] = []
    own = layer_call.norms_of

    def norms_of(outputs: list[Tensor]) -> Any:
        seen.append(len(outputs))
        return own(outputs)

    monkeypatch.setattr(layer_call, "norms_of", norms_of)
    return seen


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at")
@pytest.mark.parametrize("reads", [False, True])
def test_steps_of_single_micro_batches_compare_nothing(compared: list[int], reads: bool) -> None:
    with engine_for(net(), sgd, config_of(ACCUMULATION, harmony={"pack_layers": 1})) as engine:
        engine.set_gradient_accumulation_boundary(True)
        for _ in range(3):
            loss = engine(torch.ones(2, 4)).sum()
            if reads:
                loss.item()
            engine.backward(loss)
            engine.step()
        assert engine.global_steps == 3
    assert not compared


def test_the_first_step_of_several_micro_batches_compares_and_no_later_one(compared: list[int]) -> None:
    with engine_for(net(), sgd, config_of(2, harmony={"pack_layers": 1})) as engine:
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        assert not compared
        counts = []
        for _ in range(2):
            engine.train_batch([torch.ones(2, 4), torch.zeros(2, 4)], torch.sum)
            counts.append(len(compared))
    assert counts[0] > 0
    assert counts[1] == counts[0]
