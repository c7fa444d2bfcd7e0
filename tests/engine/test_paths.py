"""Values that enter or leave a layer by another way than its arguments and results, or change when it runs: errors name
the layer. (What is equal to plain PyTorch is in tests/exactness.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import HarmonyEngine, ModelError
from tests.engine.drive import adamw, config_of, engine_for, weights_of
from tests.exactness.models import WIDTH, Block, Given, Net, batches
from tests.families import build_seeded
from tests.oracle import assert_same

pytestmark = pytest.mark.fixed_times

ACCUMULATION = 3
GROUP = batches(ACCUMULATION)


@contextmanager
def training(make: Callable[[], nn.Module]) -> Iterator[tuple[Any, HarmonyEngine]]:
    """An engine over a fresh model, one layer in each pack."""
    model = build_seeded(make)
    with engine_for(model, adamw, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine:
        yield model, engine


def assert_refused(make: Callable[[], nn.Module], match: str) -> None:
    """Training ends with an error before a weight has changed."""
    with training(make) as (model, engine):
        before = weights_of(model)
        with pytest.raises(ModelError, match=match):
            engine.train_batch(iter(GROUP))
        engine.finish_updates()
        assert_same(model, before, bitwise=True)


class CapturingNet(Net):
    """The loss takes an activation that a hook on a module inside a block has seen."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        seen: list[Tensor] = []
        handle = self.blocks[1].linear.register_forward_hook(lambda module, given, made: seen.append(made))
        loss = super().forward(x, labels)
        handle.remove()
        return loss + 0.1 * seen[0].pow(2).mean()


def test_an_activation_that_a_hook_carries_out_is_refused_by_the_layers_name() -> None:
    assert_refused(CapturingNet, match=r"blocks\.1")


class WrittenLaterNet(Net):
    """Writes into what it has given to its blocks, after each call, but not for the first micro-batch."""

    def body(self, x: Tensor) -> Tensor:
        writes = not torch.equal(x, GROUP[0][0])
        x, shift = self.front(x), torch.zeros(1)
        for block in self.blocks:
            made = block(x, shift)
            if writes:
                x += made
                shift += 0.5
        return x * 2


def test_an_input_changed_in_place_after_its_layer_that_was_not_when_the_model_was_measured_is_refused() -> None:
    assert_refused(lambda: WrittenLaterNet(Given), "was changed in place after the layer was called")


# ---- layers that change something when they run


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
    def __init__(self) -> None:
        super().__init__()
        self.hiding = Hiding()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * _hidden_count(self.hiding.counts))


def test_hidden_state_is_refused_by_the_layers_name() -> None:
    assert_refused(lambda: Net(HiddenCounterBlock), r"layer blocks\.0 was run twice")


def test_attributes_that_measuring_sets_are_restored() -> None:
    class Remembering(Block):
        def __init__(self) -> None:
            super().__init__()
            self.settings = {"seen": 0}
            self.shapes: list[torch.Size] = []

        def forward(self, x: Tensor) -> Tensor:
            self.settings["seen"] += 1
            self.shapes.append(x.shape)
            self.latest = x.shape[0]
            return super().forward(x)

    with training(lambda: Net(Remembering)) as (model, engine):
        settings, shapes = model.blocks[0].settings, model.blocks[0].shapes
        engine.train_batch(iter(GROUP))
        assert model.blocks[0].settings is settings
        assert model.blocks[0].shapes is shapes
        assert settings == {"seen": 6}  # forward, and again in the backward pass
        assert shapes == [torch.Size([2, WIDTH])] * 6
        assert model.blocks[0].latest == 2
