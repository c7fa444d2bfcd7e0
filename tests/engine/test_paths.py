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
from torch.nn import functional as F

from harmony_ds import HarmonyEngine, ModelError
from tests.engine.drive import adamw, config_of, engine_for, weights_of
from tests.oracle import assert_same

pytestmark = pytest.mark.fixed_times

WIDTH = 6
STEPS, ACCUMULATION = 3, 3
Batch = dict[str, Tensor]


def batch_of(index: int) -> Batch:
    generator = torch.Generator().manual_seed(index)
    return {"x": torch.randn(2, WIDTH, generator=generator), "y": torch.randn(2, WIDTH, generator=generator)}


GROUPS = [[batch_of(10 * step + i) for i in range(ACCUMULATION)] for step in range(STEPS)]


class Block(nn.Module):
    """A residual layer; what tests change is derived from it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Four blocks and a head; `run` is what tests override."""

    def __init__(self, block: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(number) for number in range(4)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return {"loss": F.mse_loss(self.head(self.run(x)), y)}


def built(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make().train()


@contextmanager
def training(make: Callable[[], nn.Module]) -> Iterator[tuple[nn.Module, HarmonyEngine]]:
    """An engine over a fresh model, one layer in each pack."""
    model = built(make)
    config = config_of(ACCUMULATION, None, {"pack_layers": 1})
    with engine_for(model, adamw, config) as engine:
        yield model, engine


def assert_refused(make: Callable[[], nn.Module], match: str) -> None:
    """Training ends with an error before a weight has changed."""
    with training(make) as (model, engine):
        before = weights_of(model)
        with pytest.raises(ModelError, match=match):
            engine.train_batch(iter(GROUPS[0]))
        engine.finish_updates()
        assert_same(model, before, bitwise=True)


# ---- activations that a hook or a closure carries out of a layer


class CapturingNet(Net):
    """The loss takes an activation that a hook on a module inside a block has seen."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        seen: list[Tensor] = []
        handle = self.blocks[1].linear.register_forward_hook(lambda module, given, made: seen.append(made))
        loss = super().forward(x, y)["loss"]
        handle.remove()
        return {"loss": loss + 0.1 * seen[0].pow(2).mean()}


def test_an_activation_that_a_hook_carries_out_is_refused_by_the_layers_name() -> None:
    assert_refused(CapturingNet, match=r"blocks\.1")


# ---- inputs that are changed in place


class GivenBlock(Block):
    """Plain PyTorch saves neither of its arguments for the backward pass."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.relu(x)) + shift)


class WrittenLaterNet(Net):
    """Writes into what it has given to its blocks, after each call, but not for the first micro-batch."""

    def __init__(self) -> None:
        super().__init__(GivenBlock)
        self.entry = nn.Linear(WIDTH, WIDTH)

    def run(self, x: Tensor) -> Tensor:
        writes = not torch.equal(x, GROUPS[0][0]["x"])
        x, shift = self.entry(x), torch.zeros(1)
        for block in self.blocks:
            made = block(x, shift)
            if writes:
                x += made
                shift += 0.5
        return x * 2


def test_an_input_changed_in_place_after_its_layer_that_was_not_when_the_model_was_measured_is_refused() -> None:
    assert_refused(WrittenLaterNet, "was changed in place after the layer was called")


# ---- layers that change something when they run


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


def test_hidden_state_is_refused_by_the_layers_name() -> None:
    assert_refused(lambda: Net(HiddenCounterBlock), r"layer blocks\.0 was run twice")


def test_attributes_that_measuring_sets_are_restored() -> None:
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
        assert settings == {"seen": 6}  # forward, and again in the backward pass
        assert shapes == [torch.Size([2, WIDTH])] * 6
        assert model.blocks[0].latest == 2


class Recurrent(Net):
    """Layers exchange the weight lists of an LSTM with the weights themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def run(self, x: Tensor) -> Tensor:
        return super().run(self.lstm(x[:, None])[0][:, 0])


@pytest.mark.parametrize("make", [Recurrent, lambda: Net(SpectralBlock)], ids=["LSTM", "spectral norm"])
def test_side_effects_within_a_layer_cost_no_grouping(make: Callable[[], nn.Module]) -> None:
    with training(make) as (_, engine):
        engine.train_batch(iter(GROUPS[0]))
        assert engine.swap_report().ratio == 1.0
