"""Patches of the engines that tests make, each with its reason.

An engine of a test measures its layers as a user's does. Its plan follows the times, and differs from run to run; weights
and losses do not. A test that looks at the plan itself, or at what follows from it (which packs are resident, what is
swapped when), is marked `fixed_times`. The machine's rates are constants, but in a test that is marked `real_rates`, in
what fixtures of a module make, and in programs that tests start.
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
from harmony_ds.step import plan_composer
from tests.scheduler.validate import composed

Patch = Callable[[Any, str, Any], None]
FORWARD_MS = 0.2
BACKWARD_MS = 0.5
_time = Timing.time


def check_every_step(patch: Patch = setattr) -> None:
    """Let every step that is composed be validated task by task; `patch` is `setattr`, or a MonkeyPatch's."""
    patch(plan_composer, "compose_step", composed)


def leave_collections(patch: Patch = setattr) -> None:
    """Let engines not ask how many objects are frozen, as conftest has frozen half a million: to count them takes 40 ms.

    The answer would be the same: a program that has frozen objects keeps its collections as they are.
    """
    patch(executor, "collection_within_steps", lambda: nullcontext)


def fix_rates(patch: Patch = setattr) -> None:
    """Let the machine's rates be constants: to measure them takes a second for each optimizer, and 13 for Muon."""
    patch(profiler, "measure_rates", constant_rates)


def fix_times(patch: Patch = setattr) -> None:
    """Let the machine's rates and the times of layer calls be constants, so that a plan is the same at every run."""
    fix_rates(patch)
    patch(Timing, "time", constant_times)


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
