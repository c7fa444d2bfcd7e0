"""Slices of rows that take their inputs from the host: the same bits on late streams, the planned bytes and peak."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from harmony_ds.scheduler.swaps import swaps_of
from tests.engine.drive import adamw, config_of, engine_for, family, small_sgd, train_groups, weights_of
from tests.inside import planner_of, take_from_host
from tests.model.test_slices import group_of
from tests.simdevice.device import SimDevice
from tests.simdevice.test_engine_late import late_engine

pytestmark = pytest.mark.fixed_times

NAMES = ("llama", "t5")
SLICES = {"micro_batch": {"forward": 3, "backward": 2}, "pack_layers": 1}
ROWS = (5, 4)


@pytest.mark.parametrize("name", NAMES)
def test_late_copies_of_slices_change_no_bit(name: str) -> None:
    one, models = family(name), []
    for from_host in (False, True):
        model: nn.Module = one.build(0.1)
        with late_engine(model, config_of(2, 0.5, SLICES), 1, adamw) as engine:
            if from_host:
                take_from_host(engine)
            train_groups(engine, [group_of(one, ROWS)] * 2)
            assert engine.plan is not None and engine.plan.policy.slices_from_host is from_host
        models.append(weights_of(model))
    there, here = models
    assert all(torch.equal(value, there[key]) for key, value in here.items())


class TokensFirst(nn.Module):
    """A model whose layers take (tokens, rows, width): a slice of rows is no run of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(ids.t().contiguous())
        for block in self.blocks:
            hidden = block(hidden) + hidden
        return {"loss": hidden.square().mean()}


def test_late_copies_of_slices_of_a_second_dimension_change_no_bit() -> None:
    models = []
    for from_host in (False, True):
        torch.manual_seed(0)
        model = TokensFirst().train()
        with late_engine(model, config_of(2, 0.5, SLICES), 1, adamw) as engine:
            if from_host:
                take_from_host(engine)
            groups = [[{"ids": torch.randint(32, (rows, 6))} for rows in ROWS] for _ in range(2)]
            train_groups(engine, groups)
            assert engine.plan is not None and engine.plan.policy.slices_from_host is from_host
            assert engine.plan.policy.backward_rows == 2
        models.append(weights_of(model))
    there, here = models
    assert all(torch.equal(value, there[key]) for key, value in here.items())


@pytest.mark.parametrize("tokens", ["off", 8])
@pytest.mark.parametrize(("name", "count"), [("llama", 1), ("t5", 3)])
def test_bytes_and_peak_of_slices_are_those_of_the_plan(name: str, count: int, tokens: str | int) -> None:
    one = family(name)
    config = config_of(count, None, {**SLICES, "tokens": tokens})
    with engine_for(one.build(0.0), small_sgd, config, device=SimDevice()) as engine:
        take_from_host(engine)
        train_groups(engine, [group_of(one, (5,) * count)])
        assert engine.plan is not None
        report, swaps = engine.memory_report(), engine.swap_report()
        planned = swaps_of(engine.plan, planner_of(engine).costs[0])
        there, back = planned.stash_out + planned.crossing_out, planned.stash_in + planned.crossing_in
        # What crossing tensors have brought back need not be copied again for the slices of the call that follows.
        assert 0.8 * back < swaps.host_to_device["activations"] <= back
        assert 0.8 * there < swaps.device_to_host["activations"] <= there
        assert swaps.ratio == 1.0
        assert report.device_peak_bytes <= report.planned_peak_bytes <= 1.15 * report.device_peak_bytes
