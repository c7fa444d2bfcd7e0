"""A frozen model, without an optimizer, as an engine that gradients go through to what is before it."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

import harmony_ds
from harmony_ds.errors import UsageError
from tests.engine.drive import SEED, assert_same, config_of, engine_for, sgd

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
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(number))


def train_plainly(first: nn.Module, model: nn.Module, last: nn.Module | None = None) -> None:
    optimizers = [sgd(one.parameters()) for one in (first, last) if one is not None]
    for step in range(STEPS):
        hidden = first(inputs(step))
        torch.manual_seed(harmony_ds.micro_batch_seed(SEED, step, 0))
        output = model(hidden)
        (output if last is None else last(output)).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("way", ["engine.backward", "loss.backward", "read first"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_module_before_it_is_trained_as_in_plain_pytorch(way: str, dropout: float) -> None:
    before, plain = prompt(), prompt()
    train_plainly(plain, frozen(dropout))
    optimizer = sgd(before.parameters())
    with engine_for(frozen(dropout), None, config_of(1, harmony={"pack_layers": 1})) as engine:
        for step in range(STEPS):
            loss = engine(before(inputs(step))).pow(2).mean()
            if way == "read first":
                loss.item()
            if way == "engine.backward":
                engine.backward(loss)
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert len(engine._steps.open.micro_batches) == 0  # nothing is kept of micro-batches that are over
    assert_same(before, plain, bitwise=True)


def test_engines_before_and_after_it_are_trained() -> None:
    first, last, plain = prompt(), nn.Linear(4, 4), (prompt(), nn.Linear(4, 4))
    plain[1].load_state_dict(last.state_dict())
    train_plainly(plain[0], frozen(), plain[1])
    with (
        engine_for(first, sgd, config_of(1)) as before,
        engine_for(frozen(), None, config_of(1)) as between,
        engine_for(last, sgd, config_of(1)) as after,
    ):
        for step in range(STEPS):
            after.backward(after(between(before(inputs(step)))).pow(2).mean())
            before.step()
            after.step()
    assert_same(first, plain[0], bitwise=False)
    assert_same(last, plain[1], bitwise=False)


def test_accumulation_divides_once_and_several_passes_join() -> None:
    before, plain = prompt(), prompt()
    model = frozen()
    ((model(plain(inputs(0))) - model(plain(inputs(1)))).pow(2).mean() / 2).backward()
    (model(plain(inputs(2))).pow(2).mean() / 2).backward()
    with engine_for(frozen(), None, config_of(2)) as engine:
        (engine(before(inputs(0))) - engine(before(inputs(1)))).pow(2).mean().backward()
        engine(before(inputs(2))).pow(2).mean().backward()
    for parameter, expected in zip(before.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


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
