"""Rows that meet only in the loss, in several processes, of which one alone does not hold a layer call of all its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harmony_ds.profiling.measurement import Measurement
from harmony_ds.profiling.sample import Sample
from harmony_ds.scheduler.costs import CostTable
from tests.distributed.processes import run
from tests.engine.drive import config_of, engine_for, sgd
from tests.engine.test_in_batch_negatives import PROGRAMS, Encoder, data, two_inputs_joined, two_passes

pytestmark = pytest.mark.fixed_times

ROWS, STEPS = (48, 6), 2
"""Rows of a micro-batch in each process."""
BUDGET = 300_000
"""Holds a layer call of 6 rows, and none of 48."""


@dataclass(frozen=True)
class Trained:
    """What became of it in one process: the weights, the rows of a slice, the ratio of swaps."""

    weights: list[Tensor]
    backward_rows: int
    ratio: float


def measure_within_memory(self: Measurement, sample: Sample, own: Any = Measurement.measure) -> CostTable:
    """Measure as on a device that does not hold a layer call of 48 rows."""
    if sample.rows == max(ROWS) and not self._passes.rows.cuts:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    table: CostTable = own(self, sample)
    return table


def train(program: int, runs_out: bool) -> Trained:
    """Train on this process's rows. `runs_out`: where there are 48, measuring these runs out of memory."""
    measure = measure_within_memory if runs_out else Measurement.measure
    with patch.object(Measurement, "measure", measure):
        return train_on_own_rows(program)


def train_on_own_rows(program: int) -> Trained:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model, batches = Encoder(), data(ROWS[dist.get_rank()])
    with engine_for(model, sgd, config_of(1, 0.5, {"device_memory_gib": BUDGET / 2**30})) as engine:
        for batch in batches[:STEPS]:
            engine.backward(PROGRAMS[program](engine, batch))
            engine.step()
        assert engine.plan is not None
        assert engine.memory_report().device_peak_bytes <= BUDGET
        rows, ratio = engine.plan.policy.backward_rows, engine.swap_report().ratio
    return Trained([one.detach().clone() for one in model.parameters()], rows, ratio)


@pytest.mark.parametrize(("program", "runs_out"), [(two_inputs_joined, True), (two_passes, False), (two_passes, True)])
def test_slices_are_taken_in_all_processes_where_one_has_too_many_rows(program: Any, runs_out: bool) -> None:
    found = run(2, train, PROGRAMS.index(program), runs_out)
    plain = Encoder()
    optimizer = sgd(plain.parameters())
    for step in range(STEPS):
        for rows in ROWS:
            (program(plain, data(rows)[step]) / 2).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert found[0].backward_rows == found[1].backward_rows > 0
    for one in found:
        assert one.ratio == 1.0
        for own, expected in zip(one.weights, plain.parameters(), strict=True):
            assert (own - expected).norm() <= 1e-5 * expected.norm()
