"""Plain PyTorch with the model's own gradient checkpointing."""

from __future__ import annotations

from harmony_ds.bench.engines import _accumulation
from harmony_ds.bench.engines._accumulation import Accumulation
from harmony_ds.bench.task import Task


def unavailable(task: Task) -> str | None:
    model = task.subject.model
    if not getattr(model, "supports_gradient_checkpointing", False):
        return f"{type(model).__name__} has no gradient checkpointing of its own"
    return _accumulation.unavailable(task)


def build(task: Task) -> Accumulation:
    return Accumulation(task, checkpointing=True)
