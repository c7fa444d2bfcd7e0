"""A micro-batch whose forward pass failed when its loss was read can be read again, or the program goes on without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import BatchError, HarmonyEngine
from tests.engine.drive import config_of, engine_for, random_rows, seed_of, sgd, weights_of
from tests.families import build_seeded
from tests.oracle import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning")


class Picky(nn.Module):
    """Two layers with dropout. `troubles` are raised, each once, by forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.troubles: list[BaseException] = []

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.dropout(torch.tanh(self.first(inputs)), 0.5, train=True)
        if self.troubles:
            raise self.troubles.pop()
        return self.second(hidden).square().mean()


BATCHES = [random_rows(seed, 2, 4) for seed in range(3)]


def loop(engine: HarmonyEngine) -> None:
    for batch in BATCHES[1:]:
        engine.backward(engine(batch))
        engine.step()


def at_once(engine: HarmonyEngine) -> None:
    engine.train_batch(BATCHES[1:])


def by_group(engine: HarmonyEngine) -> None:
    engine.train_group(BATCHES[1:], lambda batch: engine.module(batch) / 2)


@pytest.mark.parametrize("go_on", [loop, at_once, by_group])
def test_a_program_goes_on_without_it_as_if_it_had_not_been_called(go_on: Callable[[HarmonyEngine], None]) -> None:
    model, plain = build_seeded(Picky), build_seeded(Picky)
    optimizer = sgd(plain.parameters())
    with engine_for(model, sgd, config_of(2)) as engine:
        for step in range(2):
            if step:
                failed = engine(BATCHES[0])
                model.troubles.append(ValueError("a batch that the model cannot take"))
                with pytest.raises(ValueError, match="cannot take"):
                    failed.item()
                with torch.no_grad():
                    model.first.weight.mul_(0.5)
                    plain.first.weight.mul_(0.5)
            go_on(engine)
            for place, batch in enumerate(BATCHES[1:]):
                torch.manual_seed(seed_of(step, place))
                (plain(batch) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(weights_of(model), weights_of(plain), bitwise=True)


def test_it_can_be_read_again_and_trained() -> None:
    model, plain = build_seeded(Picky), build_seeded(Picky)
    with engine_for(model, sgd, config_of(1)) as engine:
        loop(engine)
        start = weights_of(model)
        loss = engine(BATCHES[0])
        model.troubles.append(ValueError("a batch that the model cannot take"))
        with pytest.raises(ValueError, match="cannot take"):
            loss.item()
        assert loss.item() > 0
        engine.backward(loss)
        engine.step()
        found = weights_of(model)
    plain.load_state_dict(start)
    torch.manual_seed(seed_of(2, 0))
    plain(BATCHES[0]).backward()
    sgd(plain.parameters()).step()
    assert_same(found, weights_of(plain), bitwise=True)


def written(engine: HarmonyEngine) -> None:
    with torch.no_grad():
        engine.module.first.weight.add_(1.0)


def called(engine: HarmonyEngine) -> None:
    engine(BATCHES[1])


@pytest.mark.parametrize("go_on", [written, called])
@pytest.mark.parametrize("use", [lambda engine, loss: loss.item(), lambda engine, loss: engine.backward(loss)])
def test_it_is_gone_once_the_program_has_gone_on(go_on: Callable[[HarmonyEngine], None], use: Any) -> None:
    model = build_seeded(Picky)
    with engine_for(model, sgd, config_of(1)) as engine:
        failed = engine(BATCHES[0])
        model.troubles.append(ValueError("a batch that the model cannot take"))
        with pytest.raises(ValueError, match="cannot take"):
            failed.item()
        go_on(engine)
        with pytest.raises(BatchError, match="its forward pass failed, and the program went on without it"):
            use(engine, failed)


def test_one_that_was_propagated_back_from_still_waits() -> None:
    model = build_seeded(Picky)
    with engine_for(model, sgd, config_of(2)) as engine:
        loss = engine(BATCHES[0])
        engine.backward(loss)
        model.troubles.append(ValueError("a batch that the model cannot take"))
        with pytest.raises(ValueError, match="cannot take"):
            loss.item()
        with pytest.raises(BatchError, match=r"still queued \(1\)"):
            engine.train_batch(BATCHES[1:])


@pytest.mark.parametrize("propagate", ["engine", "loss", "both"])
def test_a_loss_is_propagated_once_as_in_plain_pytorch_unless_its_graph_is_retained(propagate: str) -> None:
    with engine_for(build_seeded(Picky), sgd, config_of(1)) as engine:
        loss = engine(BATCHES[0])
        first: Callable[[], object] = loss.backward if propagate == "loss" else partial(engine.backward, loss)
        second: Callable[[], object] = partial(engine.backward, loss) if propagate == "engine" else loss.backward
        first()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            second()
        engine.step()
        once = weights_of(engine)
    with engine_for(build_seeded(Picky), sgd, config_of(1)) as engine:
        engine.backward(engine(BATCHES[0]))
        engine.step()
        assert_same(weights_of(engine), once, bitwise=True)
