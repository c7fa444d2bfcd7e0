"""DeepSpeed ZeRO-3 with parameters and optimizer offloaded."""

from __future__ import annotations

from harmony_ds.bench.engines._deepspeed import Traffic, ZeroOffload, by_formula, elements, offload, unavailable
from harmony_ds.bench.task import Task

__all__ = ["build", "unavailable"]


def traffic(task: Task) -> Traffic:
    """Per micro-batch weights in twice (a third time, not counted here, where layers are recomputed), gradients in and
    out; gradients out once more in fp32.
    """
    width, count, micro_batches = task.settings.compute_dtype.itemsize, elements(task), task.accumulation
    once = width * count * micro_batches
    return by_formula(2 * once, once, once + 4 * count)


def zero3(task: Task) -> dict[str, object]:
    """DeepSpeed's defaults but for page-locked memory."""
    return {
        "stage": 3,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "offload_optimizer": offload(task),
        "offload_param": offload(task),
    }


def build(task: Task) -> ZeroOffload:
    return ZeroOffload(task, zero3(task), traffic(task))
