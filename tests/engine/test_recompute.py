"""A layer that changes something when it runs: its recomputation begins where its forward pass began."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harmony_ds.errors import RecomputeError
from tests.engine.drive import adamw, loop, seed_of
from tests.engine.test_paths import GROUPS, WIDTH, Block, Net, assert_equals_plain, assert_refused, built, training
from tests.inside import assembly_of, planner_of
from tests.oracle import assert_same, train_plainly


class SpectralBlock(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.linear = nn.utils.parametrizations.spectral_norm(self.linear)


class OldSpectralBlock(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.linear = nn.utils.spectral_norm(self.linear)


class RunningMeanBlock(Block):
    """Subtracts a running mean that it has just updated."""

    def __init__(self, number: int, replaced: bool = False) -> None:
        super().__init__(number)
        self.replaced = replaced
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        new = x.detach().mean(0)
        if self.replaced:
            self.mean = 0.9 * self.mean + 0.1 * new
        else:
            self.mean.mul_(0.9).add_(new, alpha=0.1)
        return super().forward(x - self.mean)


class ReadingNormBlock(Block):
    """Reads the statistics that torch's own normalization gathers."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x) - self.norm.running_mean)


class CountingBlock(Block):
    """Does something else at each call."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x * (1 + 0.1 * self.calls))


class InitializingBlock(Block):
    """Takes its scale from the first input."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = x.detach().std()
        return super().forward(x / self.scale)


class ListBlock(Block):
    """Keeps the last three means in a list of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.history: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.history.append(x.detach().mean().item())
        del self.history[:-3]
        return super().forward(x - sum(self.history) / len(self.history))


STATEFUL: dict[str, Callable[[int], nn.Module]] = {
    "spectral norm": SpectralBlock,
    "the older spectral norm": OldSpectralBlock,
    "a running mean": RunningMeanBlock,
    "a replaced running mean": lambda number: RunningMeanBlock(number, replaced=True),
    "statistics of a batch norm": ReadingNormBlock,
    "a counter": CountingBlock,
    "a scale of the first input": InitializingBlock,
    "a list": ListBlock,
}


@pytest.mark.parametrize("name", STATEFUL)
def test_state_that_a_layer_goes_on_from(name: str) -> None:
    assert_equals_plain(lambda: Net(STATEFUL[name]))


def test_a_counter_has_counted_the_calls_of_the_model_and_no_others() -> None:
    model = assert_equals_plain(lambda: Net(CountingBlock))
    assert [block.calls for block in model.blocks] == [9] * 4


class PythonRandomBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * random.uniform(0.5, 1.5) + np.random.rand())


def seeded_losses(step: Callable[[], list[Any]]) -> tuple[list[Any], float, float]:
    """What `step` gives from seeded generators outside torch, and what they draw next."""
    random.seed(1)
    np.random.seed(1)
    return step(), random.random(), float(np.random.rand())


def test_pythons_and_numpys_random_numbers_are_drawn_once_in_the_order_of_the_calls() -> None:
    plain = built(lambda: Net(PythonRandomBlock))
    optimizer = adamw(plain.parameters())
    expected = seeded_losses(
        lambda: train_plainly(plain, GROUPS, optimizer, clip=None, seed_of=seed_of)  # nobody seeds those two
    )
    with training(lambda: Net(PythonRandomBlock)) as (model, engine):
        actual = seeded_losses(lambda: loop(engine, GROUPS))
        assert "Python's global random numbers" in planner_of(engine).measuring.sequential
    assert_same(model, plain, bitwise=True)
    assert actual == expected


COUNT = 0
SEEN: list[float] = []


class GlobalCounterBlock(Block):
    """Counts in global variables, which all blocks share."""

    def forward(self, x: Tensor) -> Tensor:
        global COUNT  # noqa: PLW0603
        COUNT += 1
        SEEN.append(float(COUNT))
        return super().forward(x * (1 + 0.1 * COUNT))


def test_global_variables_go_on_from_call_to_call() -> None:
    global COUNT  # noqa: PLW0603
    plain = built(lambda: Net(GlobalCounterBlock))
    expected = train_plainly(plain, GROUPS, adamw(plain.parameters()), clip=None, seed_of=seed_of)
    COUNT = 0
    counted = SEEN.copy()
    SEEN.clear()
    with training(lambda: Net(GlobalCounterBlock)) as (model, engine):
        actual = loop(engine, GROUPS, look=lambda i: True)
        assert "goes on from one forward pass to the next" in planner_of(engine).measuring.sequential
    assert_same(model, plain, bitwise=True)
    assert actual == expected
    assert counted == SEEN


def test_a_hook_within_a_layer_notes_each_call_once() -> None:
    seen: list[float] = []
    with training(Net) as (model, engine):
        model.blocks[1].linear.register_forward_hook(lambda m, args, out: seen.append(out.detach().norm().item()))
        for group in GROUPS:
            engine.train_batch(iter(group))
    plain = built(Net)
    expected: list[float] = []
    plain.blocks[1].linear.register_forward_hook(lambda m, args, out: expected.append(out.detach().norm().item()))
    train_plainly(plain, GROUPS, adamw(plain.parameters()), clip=None, seed_of=seed_of)
    assert seen == expected


def _hidden_count(counts: list[int]) -> int:
    counts[0] += 1
    return counts[0]


class Hiding:
    """Looks like a tool, and counts."""

    def __new__(cls) -> Hiding:
        return super().__new__(cls)

    def __init__(self) -> None:
        self.counts = [0]


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


class SteppingNet(Net):
    """Goes on from one forward pass to the next, between the layers."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.steps = 0
        self.seen: list[float] = []
        self.register_buffer("mean", torch.zeros(WIDTH))

    def run(self, x: Tensor) -> Tensor:
        if self.where == "a number":
            self.steps += 1
        elif self.where == "a list":
            self.seen.append(x.detach().mean().item())
        elif self.where == "a buffer":
            self.mean += x.detach().mean(0)
        return super().run(x)


@pytest.mark.parametrize(("where", "name"), [("a number", "steps"), ("a list", "seen"), ("a buffer", "mean")])
def test_what_goes_on_between_the_layers_is_a_reason_to_run_one_after_another(where: str, name: str) -> None:
    with training(lambda: SteppingNet(where)) as (_, engine):
        engine.train_batch(iter(GROUPS[0]))
        assert planner_of(engine).measuring.sequential == f"{name} goes on from one forward pass to the next"


@pytest.mark.parametrize("block", [Block, SpectralBlock, CountingBlock])
def test_what_goes_on_within_a_layer_is_none(block: Callable[[int], nn.Module]) -> None:
    with training(lambda: Net(block)) as (_, engine):
        engine.train_batch(iter(GROUPS[0]))
        assert planner_of(engine).measuring.sequential is None


def test_the_weight_lists_of_recurrent_layers_are_the_engines_doing() -> None:
    """Layers exchange them with the weights themselves: a forward pass that has an LSTM leaves nothing behind."""

    class Recurrent(Net):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 6, batch_first=True)

        def forward(self, x: torch.Tensor, **labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return super().forward(self.lstm(x[:, None])[0][:, 0], **labels)

    with training(Recurrent) as (_, engine):
        engine.train_batch(iter(GROUPS[0]))
        assert assembly_of(engine).runner.left == ()
        assert planner_of(engine).measuring.sequential is None
        assert engine.swap_report().ratio == 1.0
