"""Plain PyTorch: everything on the device, nothing recomputed."""

from __future__ import annotations

from harmony_ds.bench.engines._accumulation import Accumulation, unavailable
from harmony_ds.bench.task import Task

__all__ = ["build", "unavailable"]


def build(task: Task) -> Accumulation:
    return Accumulation(task, checkpointing=False)
