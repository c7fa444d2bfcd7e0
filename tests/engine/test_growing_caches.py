"""A model's own cache that a longer micro-batch makes anew: shorter ones of the same step go on with theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import HarmonyEngine, ModelError
from tests.engine.drive import config_of, engine_for
from tests.families import build_seeded
from tests.inside import planner_of
from tests.oracle import assert_same

WIDTH = 8
STEPS = ((2, 5, 3), (7, 1, 4), (3, 9, 8))
PLANS: list[dict[str, Any]] = [
    {"pack_layers": 1},
    {"pack_layers": 2},
    {"residency": "kept", "device_memory_gib": 1.0, "pack_layers": 1},
]
KNOWN: dict[str, Tensor] = {}


def weighting(length: int) -> Tensor:
    """Not the beginning of the one for a greater length."""
    return torch.tril(torch.ones(length, length)) / length


class Early(nn.Module):
    """Makes its weighting before the first layer, and reads it between all."""

    at = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.weighting: Tensor | None = None

    def grow(self, length: int) -> Tensor:
        if self.weighting is None or self.weighting.shape[0] < length:
            self.weighting = weighting(length)
        return self.weighting[:length, :length]

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number >= self.at:
                x = self.grow(length) @ x
        return x.square().mean()


class Late(Early):
    """Makes it when later micro-batches have begun."""

    at = 2


class InDictionary(Early):
    def grow(self, length: int) -> Tensor:
        if "weighting" not in KNOWN or KNOWN["weighting"].shape[0] < length:
            KNOWN["weighting"] = weighting(length)
        return KNOWN["weighting"][:length, :length]


class Attending(nn.Module):
    """A layer that finds the weighting of the model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.known = [model]

    def forward(self, x: Tensor) -> Tensor:
        return self.known[0].weighting[: x.shape[1], : x.shape[1]] @ torch.tanh(self.linear(x))


class ReadByLayers(Early):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attending(self) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        self.grow(x.shape[1])
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class InPlace(Early):
    def __init__(self) -> None:
        super().__init__()
        self.weighting = torch.zeros(16, 16)
        self.filled = 0

    def grow(self, length: int) -> Tensor:
        assert self.weighting is not None
        if self.filled < length:
            self.weighting[:length, :length] = weighting(length)
            self.filled = length
        return self.weighting[:length, :length]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def inputs(step: int, place: int) -> Tensor:
    return torch.randn(2, STEPS[step][place], WIDTH, generator=torch.Generator().manual_seed(10 * step + place))


Train = Callable[[HarmonyEngine, int], list[float]]


def familiar(engine: HarmonyEngine, step: int) -> list[float]:
    losses = []
    for place in range(3):
        losses.append(engine(inputs(step, place)))
        engine.backward(losses[-1])
        engine.step()
    return [loss.item() for loss in losses]


def looking(engine: HarmonyEngine, step: int) -> list[float]:
    losses = []
    for place in range(3):
        loss = engine(inputs(step, place))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def by_train_batch(engine: HarmonyEngine, step: int) -> list[float]:
    return [3 * engine.train_batch(iter([(inputs(step, place),) for place in range(3)])).item()]


def plainly(model: nn.Module, count: int = len(STEPS)) -> list[list[float]]:
    KNOWN.clear()
    optimizer, losses = sgd(model.parameters()), []
    for step in range(count):
        own = [model(inputs(step, place)) for place in range(3)]
        for loss in own:
            (loss / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in own])
    return losses


def trained(build: Callable[[], nn.Module], harmony: dict[str, Any], train: Train) -> tuple[nn.Module, Sequence[Any]]:
    KNOWN.clear()
    model = build_seeded(build)
    with engine_for(model, sgd, config_of(3, None, harmony)) as engine:
        losses = [train(engine, step) for step in range(len(STEPS))]
        assert planner_of(engine).measuring.sequential is None
    return model, losses


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning")
@pytest.mark.parametrize("train", [familiar, looking, by_train_batch])
@pytest.mark.parametrize("harmony", PLANS, ids=["packs of 1", "packs of 2", "graphs kept"])
@pytest.mark.parametrize("build", [Early, Late, InDictionary, ReadByLayers])
def test_micro_batches_of_several_lengths_read_what_they_would_alone(
    build: type[Early], harmony: dict[str, Any], train: Train
) -> None:
    plain = build_seeded(build)
    expected = plainly(plain)
    model, losses = trained(build, harmony, train)
    if train is by_train_batch:
        assert [own for (own,) in losses] == pytest.approx([sum(own) for own in expected], rel=1e-6)
    else:
        assert losses == expected
    assert_same(model, plain, bitwise=True)
    if build is not InDictionary:
        assert torch.equal(model.weighting, plain.weighting)


def test_evaluation_grows_it_too() -> None:
    plain, model = build_seeded(Late), build_seeded(Late)
    with torch.no_grad():
        expected = torch.stack([plain(inputs(1, place)) for place in (1, 0, 2)]).mean()
    with engine_for(model, sgd, config_of(3, None, PLANS[0])) as engine:
        found = engine.eval_batch(iter([(inputs(1, place),) for place in (1, 0, 2)]))
    assert found.item() == expected.item()
    assert torch.equal(model.weighting, plain.weighting)


def test_one_that_is_filled_in_place_while_others_read_it_is_refused_by_name() -> None:
    with (
        pytest.raises(ModelError, match="writes in place into what weighting holds"),
        engine_for(build_seeded(InPlace), sgd, config_of(3, None, PLANS[0])) as engine,
    ):
        familiar(engine, 0)


def test_one_that_the_first_micro_batch_fills_in_place_is_as_in_plain_pytorch() -> None:
    plain, model = build_seeded(InPlace), build_seeded(InPlace)
    expected, optimizer = [], sgd(plain.parameters())
    for _ in range(2):
        loss = plain(inputs(0, 1))
        loss.backward()
        expected.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    with engine_for(model, sgd, config_of(3, None, PLANS[0])) as engine:
        found = []
        for _ in range(6):
            loss = engine(inputs(0, 1))
            engine.backward(loss)
            engine.step()
            found.append(loss)
        assert [loss.item() for loss in found[::3]] == expected
    assert_same(model, plain, bitwise=False)
