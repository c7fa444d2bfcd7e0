"""Models whose memory depends on data, not only on its shape."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harmony_ds
from harmony_ds.profiling.watches import RoutingWatch, extremes
from tests.engine.drive import small_sgd
from tests.simdevice.device import SimDevice, engine_of

pytestmark = pytest.mark.fixed_times

WIDTH, WIDE, EXPERTS, ROWS = 16, 128, 4, 64


class Experts(nn.Module):
    """A model that sends each row to the expert with the most similar router weight."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.eye(EXPERTS, WIDTH))
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDE), nn.GELU(), nn.Linear(WIDE, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        chosen = (hidden @ self.router.T).argmax(dim=-1)
        out = hidden.clone()
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            out = out.index_add(0, rows, expert(hidden[rows]))
        return out


class RoutedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs.square().mean()


class Square(nn.Module):
    """A model that needs much memory between its layers for inputs without negative numbers, more for larger ones."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.blocks[1](self.blocks[0](inputs))
        if (inputs >= 0).all():
            hidden = hidden + inputs.repeat(int(400 * inputs.max()), 1).mean()
        loss: Tensor = self.blocks[2](hidden).square().mean()
        return loss


def engine_of_rows(model: nn.Module, **harmony: Any) -> tuple[Any, SimDevice]:
    torch.manual_seed(0)
    return engine_of(model, small_sgd, 2, harmony=harmony, train_micro_batch_size_per_gpu=ROWS)


def rows_to(*experts: int) -> dict[str, Tensor]:
    """ROWS rows, in turn for each of `experts`."""
    generator = torch.Generator().manual_seed(0)
    inputs = 0.01 * torch.randn(ROWS, WIDTH, generator=generator)
    inputs[torch.arange(ROWS), torch.tensor(experts).repeat(ROWS)[:ROWS]] += 1.0
    return {"inputs": inputs}


@pytest.mark.parametrize("pack_layers", [1, 2, 3])
def test_a_plan_made_with_even_routing_bounds_a_step_in_which_all_rows_go_one_way(pack_layers: int) -> None:
    engine, _ = engine_of_rows(RoutedNet(), pack_layers=pack_layers)
    even = rows_to(0, 1, 2, 3)
    engine.train_batch(iter([even, even]))
    planned = engine.plan.peak_bytes
    even_peak = engine.memory_report().device_peak_bytes
    for data in (rows_to(0), rows_to(3), rows_to(0, 0, 0, 1), rows_to(2, 3)):
        engine.train_batch(iter([even, data]))
        report = engine.memory_report()
        assert report.planned_peak_bytes == planned
        assert even_peak < report.device_peak_bytes <= planned
    engine.destroy()


def test_a_step_above_its_plan_is_logged_and_the_next_plan_covers_it(caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = engine_of_rows(Square(), pack_layers=1)
    usual = {"inputs": -torch.ones(ROWS, WIDTH)}
    engine.train_batch(iter([usual, usual]))
    for scale in (0.5, 1.0):
        unusual = {"inputs": torch.full((ROWS, WIDTH), scale)}
        with caplog.at_level(logging.WARNING):
            engine.train_batch(iter([usual, unusual]))
        report = engine.memory_report()
        excess = report.device_peak_bytes - report.planned_peak_bytes
        assert excess > 0
        assert f"{excess:,} more than planned" in caplog.text

    caplog.clear()
    engine.train_batch(iter([usual, unusual]))
    report = engine.memory_report()
    engine.destroy()
    assert report.device_peak_bytes <= report.planned_peak_bytes
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_plan_with_its_margin_that_does_not_fit_any_more_is_an_error_before_the_step() -> None:
    engine, device = engine_of_rows(Square(), pack_layers=1)
    usual, unusual = {"inputs": -torch.ones(ROWS, WIDTH)}, {"inputs": torch.ones(ROWS, WIDTH)}
    engine.train_batch(iter([usual, unusual]))
    weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    device.budget_bytes = engine.plan.peak_bytes
    with pytest.raises(harmony_ds.DoesNotFitError):
        engine.train_batch(iter([usual, usual]))
    assert engine.usable
    assert all(torch.equal(p, weights[name]) for name, p in engine.module.named_parameters())
    engine.destroy()


@pytest.mark.parametrize("keep", [0, 20])
def test_device_memory_of_the_program_is_not_counted_as_the_models(keep: int, caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = engine_of_rows(RoutedNet(), pack_layers=1)
    kept = []
    for _ in range(3):
        kept += [torch.ones(5000, device="simdev") for _ in range(keep)]
        engine.train_batch(iter([rows_to(0, 1, 2, 3)] * 2))
    engine.destroy()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_operators_with_sizes_from_data_are_detected_and_others_are_not() -> None:
    rows = torch.randn(4, 4)
    with RoutingWatch() as watch:
        torch.softmax(rows @ rows, -1).sum().item()
    assert not watch.seen
    for select in (torch.nonzero, lambda x: x[x > 0], lambda x: x.masked_select(x > 0), torch.unique):
        with RoutingWatch() as watch:
            select(rows)
        assert watch.seen


def test_extremes_keep_shapes_strides_and_numbers_that_are_no_features() -> None:
    hidden = torch.randn(2, 4, 3).transpose(0, 1)
    ids, mask, scale = torch.arange(8).view(4, 2), torch.tensor([[True, False]]), torch.tensor(2.0)
    same, odd = ([*inputs] for inputs in extremes([hidden, ids, mask, scale]))

    assert all(torch.equal(row, hidden[0, 0]) for row in same[0].flatten(0, 1))
    assert torch.equal(odd[0][-1, -1], hidden[-1, -1])
    assert torch.equal(odd[0].flatten(0, 1)[:-1], same[0].flatten(0, 1)[:-1])
    for inputs in (same, odd):
        assert inputs[0].stride() == hidden.stride()
        assert inputs[1] is ids
        assert inputs[2].all()
        assert inputs[3] is scale
