"""Engines that measure bytes alone: the machine's rates and the times of layer calls are constants.

Four fifths of what a tiny engine takes is measuring, and a plan that follows measured times differs from run to run.
Tests of measuring, planning and timing are marked `real_times`, and have neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from harmony_ds.device.base import Device
from harmony_ds.optim.host_optimizer import HostOptimizer
from harmony_ds.profiling import profiler
from harmony_ds.profiling.sample import Sample
from harmony_ds.profiling.timing import Timing
from harmony_ds.runtime import executor
from harmony_ds.scheduler.costs import CallCost, CostTable
from harmony_ds.scheduler.profile import Machine
from harmony_ds.step import group_plans
from tests.scheduler.validate import composed

Patch = Callable[[Any, str, Any], None]
FORWARD_MS = 0.2
BACKWARD_MS = 0.5
_time = Timing.time


def install(patch: Patch = setattr) -> None:
    """Make every engine of this process cheap; `patch` is `setattr`, or a MonkeyPatch's, which takes it back."""
    patch(profiler, "measure_rates", constant_rates)
    patch(Timing, "time", constant_times)
    patch(group_plans, "compose_step", composed)  # not cheap, but every step that a test runs is checked
    patch(executor, "collection_within_steps", lambda: nullcontext)  # to count what conftest has frozen takes 40 ms


def constant_rates(
    device: Device,
    optimizer: HostOptimizer | None,
    weight_dtype: torch.dtype,
    swaps: Sequence[tuple[int, float]],
    threads: int | None = None,
) -> Machine:
    """Rates of one core and its memory, as `measure_rates` would give them."""
    return Machine(
        name=f"{device.name} with constant rates",
        copies_overlap=device.copies_overlap,
        swap_in_bytes_per_ms=4e6,
        swap_out_bytes_per_ms=4e6,
        link_bytes_per_ms=8e6,
        update_elements_per_ms=5e5,
        norm_elements_per_ms=2e6,
        host_bytes_per_ms=1e7,
        device_update_elements_per_ms=5e5,
        device_bytes=device.budget_bytes,
    )


def constant_times(timing: Timing, costs: CostTable, sample: Sample) -> CostTable:
    """Return the same time for every layer call, in place of `Timing.time`; without a clock, its own result."""
    if not timing.device.has_values:  # an estimate: its times are computed
        return _time(timing, costs, sample)
    return replace(costs, costs=tuple(map(_timed, costs.costs)), head_ms=0.05, tail_ms=0.1)


def _timed(cost: CallCost) -> CallCost:
    if not cost.needs_backward:
        return replace(cost, forward_ms=FORWARD_MS, fused_ms=FORWARD_MS)
    return replace(
        cost,
        forward_ms=FORWARD_MS,
        backward_ms=BACKWARD_MS,
        fused_ms=BACKWARD_MS,
        propagate_ms=BACKWARD_MS - FORWARD_MS,
    )
