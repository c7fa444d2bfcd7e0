"""DeepSpeed's ZenFlow: the important gradients are applied on the device, the others later on the host."""

from __future__ import annotations

from harmony_ds.bench.engines._deepspeed import ZeroOffload, by_formula, elements, offload, only_on_cuda
from harmony_ds.bench.task import Task

EXACT = False  # most gradients are applied a step or more late

unavailable = only_on_cuda


def build(task: Task) -> ZeroOffload:
    """ZenFlow takes its `update_interval` for the accumulation steps, so it is given as many."""
    zero = {
        "stage": 2,
        "overlap_comm": True,
        "offload_optimizer": offload(task),
        "zenflow": {
            "topk_ratio": 0.05,
            "select_strategy": "step",
            "select_interval": 1,
            "update_interval": task.accumulation,
            "overlap_step": True,
        },
    }
    width, count, micro_batches = task.settings.compute_dtype.itemsize, elements(task), task.accumulation
    again = width * count * (micro_batches - 1)
    return ZeroOffload(task, zero, by_formula(width * count, again, width * count * micro_batches + 4 * count))
