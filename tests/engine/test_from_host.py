"""Micro-batches that cannot be cut and do not fit: all that is between layers waits on the host, and no bit changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import DoesNotFitError
from tests.engine.drive import LossOf, config_of, engine_for, loop_plainly, loop_with, sgd

pytestmark = pytest.mark.fixed_times

TOKENS, WIDTH, STEPS = 64, 16, 3
SMALLEST = {"residency": "off", "pack_layers": 1, "stash": "host", "keep_graphs": False, "prefetch": False}


class Block(nn.Module):
    """An MLP; with `mixes`, each row gets a part of the mean of all rows."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.mixes = mixes
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(x)))
        return x + x.mean(0, keepdim=True) if self.mixes else x


class Stack(nn.Module):
    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block(mixes) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def one_pass(call: Any, x: list[Tensor]) -> Tensor:
    return call(x[0]).square().sum()


def two_passes(call: Any, x: list[Tensor]) -> Tensor:
    return (call(x[0]) * call(x[1])).sum()


def of_large_loss(call: Any, x: list[Tensor]) -> Tensor:
    """Return a loss that takes more than any layer call."""
    return (call(x[0])[..., None] * torch.ones(40, device=x[0].device)).tanh().sum()


def data(rows: int, accumulation: int = 1) -> list[list[Tensor]]:
    source = torch.Generator().manual_seed(7)
    return [[torch.randn(rows, TOKENS, WIDTH, generator=source) for _ in range(2)] for _ in range(STEPS * accumulation)]


def smallest_bytes(model: nn.Module, batches: list[list[Tensor]], accumulation: int, program: LossOf) -> int:
    """Return the device bytes of the smallest plan with what waits between layers on the device."""
    with engine_for(model, sgd, config_of(accumulation, harmony=SMALLEST)) as engine:
        loop_with(engine, batches[:accumulation], program)
        return engine.memory_report().planned_peak_bytes


@pytest.mark.parametrize(("program", "accumulation"), [(one_pass, 3), (two_passes, 1)])
def test_micro_batches_of_one_row_take_no_more_than_those_of_two(program: LossOf, accumulation: int) -> None:
    batches = data(1, accumulation)
    budget = smallest_bytes(Stack(), batches, accumulation, program) - 3_000
    plain, model = Stack(), Stack()
    expected = loop_plainly(plain, batches, accumulation, program, clip=1.0)
    config = config_of(accumulation, clip=1.0, harmony={"device_memory_gib": budget / 2**30})
    with engine_for(model, sgd, config) as engine:
        losses, ratios = loop_with(engine, batches, program)
        assert engine.plan is not None and engine.plan.policy.slices_from_host and not engine.plan.policy.backward_rows
        memory = engine.memory_report()
        assert memory.device_peak_bytes <= memory.planned_peak_bytes <= budget
    assert losses == expected
    assert set(ratios) == {1.0}
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_layers_whose_rows_depend_on_each_other_count_their_loss() -> None:
    """Which is all that such a micro-batch takes: nothing else can save it."""
    batches = data(4)
    whole = smallest_bytes(Stack(mixes=True), batches, 1, of_large_loss)
    config = config_of(1, harmony={"device_memory_gib": 0.9 * whole / 2**30})
    with (
        engine_for(Stack(mixes=True), sgd, config) as engine,
        pytest.raises(DoesNotFitError, match="the loss takes most"),
    ):
        loop_with(engine, batches, of_large_loss)


@pytest.mark.parametrize(
    ("rows", "way_out"),
    [(1, r"shorten the rows \(a micro-batch has one already\)"), (2, "lower train_micro_batch_size")],
)
def test_the_error_advises_smaller_micro_batches_where_there_are_any(rows: int, way_out: str) -> None:
    budget = 0.9 * smallest_bytes(Stack(), data(rows), 1, of_large_loss)
    config = config_of(1, harmony={"device_memory_gib": budget / 2**30})
    with engine_for(Stack(), sgd, config) as engine, pytest.raises(DoesNotFitError, match=way_out):
        loop_with(engine, data(rows), of_large_loss)
