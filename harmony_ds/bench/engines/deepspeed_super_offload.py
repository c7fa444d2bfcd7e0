"""DeepSpeed's SuperOffload: ZeRO-3, the host's Adam in a process of its own beside the backward pass."""

from __future__ import annotations

from harmony_ds.bench.engines._deepspeed import ZeroOffload, by_formula, elements, offload, only_on_cuda
from harmony_ds.bench.task import Task

unavailable = only_on_cuda


def build(task: Task) -> ZeroOffload:
    """Weights stay on the device; gradients in and out for every micro-batch."""
    zero = {"stage": 3, "overlap_comm": True, "offload_optimizer": offload(task, super_offload=True)}
    width, count = task.settings.compute_dtype.itemsize, elements(task)
    once = width * count * task.accumulation
    return ZeroOffload(task, zero, by_formula(width * count, once, once + 4 * count))
