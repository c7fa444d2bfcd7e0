"""DeepSpeed ZeRO-2 with the optimizer offloaded: ZeRO-Offload."""

from __future__ import annotations

from harmony_ds.bench.engines._deepspeed import Traffic, ZeroOffload, by_formula, elements, offload, unavailable
from harmony_ds.bench.task import Task

__all__ = ["build", "unavailable"]


def traffic(task: Task) -> Traffic:
    """Weights stay; after the first micro-batch, sums of gradients come back to be added to; out once more in fp32."""
    width, count, micro_batches = task.settings.compute_dtype.itemsize, elements(task), task.accumulation
    again = width * count * (micro_batches - 1)
    out = width * count * micro_batches if micro_batches > 1 else 0
    return by_formula(width * count, again, out + 4 * count)


def build(task: Task) -> ZeroOffload:
    zero = {"stage": 2, "contiguous_gradients": True, "overlap_comm": True, "offload_optimizer": offload(task)}
    return ZeroOffload(task, zero, traffic(task))
