"""A frozen model, without an optimizer, as an engine that gradients go through to what is before it."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from harmony_ds.errors import UsageError
from tests.engine.drive import assert_same, config_of, engine_for, loop_plainly, random_rows, sgd, squares

pytestmark = pytest.mark.filterwarnings("ignore:a loss or an output was looked at")
STEPS = 3


def prompt() -> nn.Module:
    torch.manual_seed(4)
    return nn.Linear(3, 8)


def frozen(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(8, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)]
    return nn.Sequential(*layers).requires_grad_(False)


def inputs(number: int) -> Tensor:
    return random_rows(number, 2, 3)


@pytest.mark.parametrize("way", ["engine.backward", "loss.backward", "read first"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_module_before_it_is_trained_as_in_plain_pytorch(way: str, dropout: float) -> None:
    before, plain = prompt(), nn.Sequential(prompt(), frozen(dropout))
    loop_plainly(plain, [inputs(step) for step in range(STEPS)], 1, squares, seeded=True)
    optimizer = sgd(before.parameters())
    with engine_for(frozen(dropout), None, config_of(1, harmony={"pack_layers": 1})) as engine:
        for step in range(STEPS):
            loss = squares(engine, before(inputs(step)))
            if way == "read first":
                loss.item()
            if way == "engine.backward":
                engine.backward(loss)
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert len(engine._steps.open.micro_batches) == 0  # nothing is kept of micro-batches that are over
    assert_same(before, plain[0], bitwise=True)


class Noted(nn.Sequential):
    """Keeps weak references to its inputs."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.seen: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(weakref.ref(x))
        made: Tensor = super().forward(x)
        return made


@pytest.mark.parametrize("use", ["read", "dropped", "beside one that is propagated back from"])
def test_nothing_is_kept_of_passes_that_nothing_can_come_of_any_more(use: str) -> None:
    before, model = prompt(), Noted(*frozen(0.5))
    held, found = [], []
    with engine_for(model, None, config_of(1, harmony={"pack_layers": 1})) as engine:
        for number in range(6):
            hidden = before(inputs(number))
            output = engine(hidden if use.startswith("beside") else hidden.detach())
            if use == "read":
                found.append(output.sum().item())
            elif use.startswith("beside"):
                another = engine(before(inputs(number)))
                output.pow(2).mean().backward()
                del another
            held.append(len(engine._steps.open.micro_batches))
            del output, hidden
        assert max(held[2:]) <= 2
        assert sum(one() is not None for one in model.seen) <= 2
    assert len(set(found)) == len(found)  # each has random numbers of its own


def test_a_model_that_would_get_gradients_needs_an_optimizer() -> None:
    model = frozen()
    model[0].requires_grad_(True)
    with engine_for(model, None, config_of(1)) as engine:
        loss = engine(prompt()(inputs(0))).pow(2).mean()
        with pytest.raises(UsageError, match="must provide optimizer"):
            engine.backward(loss)
        with pytest.raises(UsageError, match="must provide optimizer"):
            loss.backward()
