"""Code that runs within a forward pass alone, an evaluation or a measurement cannot have gradients that wait to be run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import HarmonyEngine
from harmony_ds.errors import UsageError
from tests.engine.drive import config_of, engine_for, sgd
from tests.step.drive import Tiny

ACTS: list[Callable[[], object]] = []
"""What forward does besides. It is no attribute of the model, which must not change within a step."""
X = torch.ones(2, 4)
LONGER = torch.ones(8, 4)
GROUP = 3


class Acting(Tiny):
    """A model whose forward reads or writes something of the program's."""

    def forward(self, x: Tensor) -> Tensor:
        for act in ACTS:
            act()
        return super().forward(x)


def read(weight: nn.Parameter) -> object:
    return weight.grad


def write(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(1.0)


def drop(weight: nn.Parameter) -> None:
    weight.grad = None


def read_a_loss(engine: HarmonyEngine) -> None:
    engine(X).item()


def evaluate(engine: HarmonyEngine) -> None:
    engine.eval_batch([X] * GROUP)


def measure(engine: HarmonyEngine) -> None:
    engine(LONGER)


def train(engine: HarmonyEngine, disturb: Callable[[], None]) -> Tensor:
    """Take one step; `disturb` comes when a micro-batch waits for its backward pass."""
    engine.backward(engine(X))
    disturb()
    for _ in range(GROUP - 1):
        engine.backward(engine(X))
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    weight: Tensor = engine.module.first.weight.detach().clone()
    return weight


@pytest.mark.parametrize("act", [read, write, drop])
@pytest.mark.parametrize("run", [read_a_loss, evaluate, measure])
@pytest.mark.filterwarnings("ignore")
def test_gradients_that_wait_to_be_run_are_refused_within_a_run(
    run: Callable[[HarmonyEngine], None], act: Callable[[nn.Parameter], object]
) -> None:
    with engine_for(Acting(), sgd, config_of(GROUP)) as engine:
        undisturbed = train(engine, lambda: None)
    with engine_for(Acting(), sgd, config_of(GROUP)) as engine:
        weight = engine.module.first.weight

        def disturb() -> None:
            ACTS.append(lambda: act(weight))
            try:
                with pytest.raises(UsageError, match="1 micro-batches wait for their backward passes"):
                    run(engine)
            finally:
                ACTS.clear()

        assert torch.equal(train(engine, disturb), undisturbed)


@pytest.mark.filterwarnings("ignore")
def test_gradients_that_have_accumulated_are_read_within_a_forward_pass() -> None:
    seen = []
    with engine_for(Acting(), sgd, config_of(GROUP)) as engine:
        weight = engine.module.first.weight
        engine.backward(engine(X))
        expected = weight.grad.clone()
        loss = engine(X)
        ACTS.append(lambda: seen.append(weight.grad.clone()))
        try:
            loss.item()
        finally:
            ACTS.clear()
    assert len(seen) == 1 and torch.equal(seen[0], expected)
