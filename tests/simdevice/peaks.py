"""The measured peak of a training step on the test device, and the planned one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from harmony_ds.reporting.reports import SwapReport
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.plan import Plan
from tests import simdevice
from tests.engine.drive import config_of, engine_for, family, small_sgd
from tests.inside import planner_of
from tests.simdevice.device import SimDevice

GROUP = 3


@dataclass(frozen=True)
class Case:
    """One way to train a model of `tests.families`. `pack_layers`: None lets the engine choose."""

    model: str
    batch: int
    pack_layers: int | None
    stash: str
    prefetch: bool
    budget_bytes: int | None = None
    sizes: tuple[int, int] | None = None
    tokens: int | None = None

    def __str__(self) -> str:
        packs = "auto" if self.pack_layers is None else self.pack_layers
        return f"{self.model}-b{self.batch}-p{packs}-{self.stash}-{'ahead' if self.prefetch else 'late'}" + (
            "" if self.sizes is None else f"-rows{self.sizes[0]}-{self.sizes[1]}"
        )


@dataclass(frozen=True)
class Peak:
    """Planned and measured bytes."""

    planned_bytes: int
    measured_bytes: int
    plan: Plan
    costs: CostTable
    swaps: SwapReport

    @property
    def ratio(self) -> float:
        return self.planned_bytes / self.measured_bytes


def train(case: Case) -> Peak:
    """Trains one step over GROUP equal micro-batches, under a hard limit if there is a budget."""
    one = family(case.model)
    batch = {key: _resized(value, case.batch) for key, value in one.batch(0).items()}
    harmony: dict[str, Any] = {"stash": case.stash, "prefetch": case.prefetch}
    if case.pack_layers is not None:
        harmony["pack_layers"] = case.pack_layers
    if case.sizes is not None:
        harmony["micro_batch"] = {"forward": case.sizes[0], "backward": case.sizes[1]}
    config = config_of(GROUP, None, harmony, train_micro_batch_size_per_gpu=case.batch)
    if case.tokens is not None:
        config["harmony"]["tokens"] = case.tokens
    device = SimDevice(case.budget_bytes)
    try:
        with engine_for(one.build(0.0), small_sgd, config, device=device) as engine:
            engine.train_batch(iter([batch] * GROUP))
            report = engine.memory_report()
            costs, _ = planner_of(engine).costs
            assert engine.plan is not None
            return Peak(report.planned_peak_bytes, report.device_peak_bytes, engine.plan, costs, engine.swap_report())
    finally:
        simdevice.set_limit(None)


def _resized(value: Any, batch: int) -> Any:
    """`value` for `batch` samples, repeated as often as that takes."""
    if not isinstance(value, Tensor):
        return value
    copies = -(-batch // value.shape[0])
    return value.repeat(copies, *[1] * (value.dim() - 1))[:batch].contiguous()
