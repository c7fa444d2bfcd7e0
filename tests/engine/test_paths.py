"""Values that enter or leave a layer by another way than its arguments and results, or change when it runs: as in plain
PyTorch, or an error that names the layer.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harmony_ds import HarmonyEngine, ModelError
from tests.engine.drive import adamw, config_of, engine_for, seed_of, weights_of
from tests.oracle import assert_same, train_plainly

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
def training(make: Callable[[], nn.Module], **harmony: Any) -> Iterator[tuple[nn.Module, HarmonyEngine]]:
    """An engine over a fresh model, one layer in each pack."""
    model = built(make)
    config = config_of(ACCUMULATION, None, {"pack_layers": 1, **harmony})
    with engine_for(model, adamw, config) as engine:
        yield model, engine


def assert_equals_plain(
    make: Callable[[], nn.Module], bitwise: bool = True, groups: Any = GROUPS, **harmony: Any
) -> nn.Module:
    """Losses, weights and buffers after some steps; returns the engine's model.

    Args:
        bitwise: False where a tensor has several consumers, whose gradients are added up in another order.
    """
    plain = built(make)
    losses = train_plainly(plain, groups, adamw(plain.parameters()), clip=None, seed_of=seed_of)
    with training(make, **harmony) as (model, engine):
        actual = [engine.train_batch(iter(group)).item() for group in groups]
    assert_same(model, plain, bitwise)
    expected = [torch.tensor(group).mean().item() for group in losses]
    assert actual == (expected if bitwise else pytest.approx(expected, rel=1e-6))
    return model


def assert_refused(
    make: Callable[[], nn.Module], match: str, error: type[Exception] = ModelError, **harmony: Any
) -> None:
    """Training ends with `error` before a weight has changed."""
    with training(make, **harmony) as (model, engine):
        before = weights_of(model)
        with pytest.raises(error, match=match):
            engine.train_batch(iter(GROUPS[0]))
        engine.finish_updates()
        assert_same(model, before, bitwise=True)


class TwiceBlock(Block):
    """Returns one tensor twice."""

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        return x, {"again": x}


class ChangingNet(Net):
    """Writes in place into what a block returned, and goes on from what it returned beside."""

    def run(self, x: Tensor) -> Tensor:
        x = x.clone()
        for block in self.blocks:
            x, other = block(x)
            x.mul_(2)
            x = torch.tanh(other["again"]) + 1
        return x


def test_one_tensor_that_a_layer_returns_twice_is_one_tensor_in_slices() -> None:
    assert_equals_plain(lambda: ChangingNet(TwiceBlock), bitwise=False, micro_batch=1)


class HalvesBlock(Block):
    """Returns parts of one tensor."""

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        return x[:, :2], x[:, 2:]


class HalvesNet(Net):
    """Writes into one of them."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            few, more = block(x)
            few += 1
            x = torch.tanh(torch.cat([few, more], 1))
        return x


@pytest.mark.parametrize("residency", ["off", "kept"])
def test_results_in_one_memory_are_not_written_to(residency: str) -> None:
    with pytest.raises(ModelError, match="shares its memory with another"):
        assert_equals_plain(lambda: HalvesNet(HalvesBlock), residency=residency, device_memory_gib=1.0)


class SharingBlock(Block):
    """Leaves a tensor for later blocks in a dictionary, or reads it there."""

    def forward(self, x: Tensor, shared: Any) -> Tensor:  # type: ignore[override]
        if "keys" in shared:
            return torch.tanh(self.linear(x) + shared["keys"][0] * shared["keys"][1])
        shared["keys"] = torch.tanh(self.linear(x)), x * 2
        return x + 1


class SharingNet(Net):
    """A Gemma 3n: the first block of each forward fills what the others read."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(SharingBlock)
        self.make = make

    def run(self, x: Tensor) -> Tensor:
        shared = self.make()
        for block in self.blocks:
            x = block(x, shared=shared)
        return x * shared["keys"][0]


@pytest.mark.parametrize("residency", ["off", "kept"])
@pytest.mark.parametrize("make", [dict, UserDict])
def test_tensors_that_a_layer_puts_into_a_dictionary_are_there_for_later_layers(
    make: Callable[[], Any], residency: str
) -> None:
    assert_equals_plain(lambda: SharingNet(make), bitwise=False, residency=residency, device_memory_gib=1.0)


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


# ---- torch.utils.checkpoint


def test_a_reentrant_checkpoint_gives_no_gradient_without_an_argument_that_needs_one() -> None:
    class First(Net):
        def run(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return x

    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        model = assert_equals_plain(First)
    assert torch.equal(model.blocks[0].linear.weight, built(First).blocks[0].linear.weight)


# ---- inputs that are changed in place


class GivenBlock(Block):
    """Plain PyTorch saves neither of its arguments for the backward pass."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.relu(x)) + shift)


class WrittenBehindNet(Net):
    """Writes into what it has given to its blocks, after each call; `later`: not for the first micro-batch."""

    def __init__(self, later: bool = False) -> None:
        super().__init__(GivenBlock)
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.later = later

    def run(self, x: Tensor) -> Tensor:
        writes = not (self.later and torch.equal(x, GROUPS[0][0]["x"]))
        x, shift = self.entry(x), torch.zeros(1)
        for block in self.blocks:
            made = block(x, shift)
            if writes:
                x += made
                shift += 0.5
        return x * 2


@pytest.mark.parametrize(
    "harmony",
    [{}, {"pack_layers": 2}, {"residency": "kept", "device_memory_gib": 1.0}, {"micro_batch": 1}],
    ids=["swapped", "two in a pack", "graphs kept", "slices"],
)
def test_inputs_of_layers_may_be_changed_in_place_after_them(harmony: dict[str, Any]) -> None:
    assert_equals_plain(WrittenBehindNet, bitwise="micro_batch" not in harmony, **harmony)


def test_an_input_changed_in_place_after_its_layer_that_was_not_when_the_model_was_measured_is_refused() -> None:
    assert_refused(lambda: WrittenBehindNet(later=True), "was changed in place after the layer was called")


# ---- micro-batches that end early


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
    assert_refused(lambda: Net(HiddenCounterBlock), r"layer blocks\.0 was run twice", ModelError)


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
