"""A layer that changes something when it runs: its recomputation begins where its forward pass began."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from harmony_ds.errors import RecomputeError
from tests.engine.test_paths import GROUPS, WIDTH, Block, Net, assert_refused, training
from tests.inside import planner_of


class SpectralBlock(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.linear = nn.utils.parametrizations.spectral_norm(self.linear)


def _hidden_count(counts: list[int]) -> int:
    counts[0] += 1
    return counts[0]


class Hiding:
    """Looks like a tool, and counts."""

    def __new__(cls) -> Hiding:
        one = super().__new__(cls)
        one.counts = [0]
        return one


class HiddenCounterBlock(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.hiding = Hiding()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * _hidden_count(self.hiding.counts))


def test_state_that_nobody_can_see_is_refused_by_the_layers_name() -> None:
    assert_refused(lambda: Net(HiddenCounterBlock), r"layer blocks\.0 was run twice", RecomputeError)


class ClampingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


def test_a_layer_that_writes_into_its_own_parameters_is_refused() -> None:
    assert_refused(lambda: Net(ClampingBlock), r"blocks\.0 writes into the parameter blocks\.0\.linear\.weight")


def test_what_measuring_does_to_attributes_is_undone() -> None:
    class Remembering(Block):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.settings = {"seen": 0}
            self.shapes: list[torch.Size] = []

        def forward(self, x: Tensor) -> Tensor:
            self.settings["seen"] += 1
            self.shapes.append(x.shape)
            self.latest = x.shape[0]
            return super().forward(x)

    with training(lambda: Net(Remembering)) as (model, engine):
        settings, shapes = model.blocks[0].settings, model.blocks[0].shapes
        engine.train_batch(iter(GROUPS[0]))
        assert model.blocks[0].settings is settings
        assert model.blocks[0].shapes is shapes
        assert settings == {"seen": 3}
        assert shapes == [torch.Size([2, WIDTH])] * 3
        assert model.blocks[0].latest == 2


class Recurrent(Net):
    """Layers exchange the weight lists of an LSTM with the weights themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def run(self, x: Tensor) -> Tensor:
        return super().run(self.lstm(x[:, None])[0][:, 0])


@pytest.mark.parametrize("make", [Recurrent, lambda: Net(SpectralBlock)], ids=["LSTM", "spectral norm"])
def test_what_goes_on_within_a_layer_is_no_reason_to_run_one_after_another(make: Callable[[], nn.Module]) -> None:
    with training(make) as (_, engine):
        engine.train_batch(iter(GROUPS[0]))
        assert planner_of(engine).measuring.sequential is None
        assert engine.swap_report().ratio == 1.0
