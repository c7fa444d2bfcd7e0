"""DeepSpeed ZeRO-2 with the optimizer offloaded."""

from __future__ import annotations

from workload import Workload
from zero_offload import ZeroOffload


def build(workload: Workload) -> ZeroOffload:
    """Page-locked memory is off, since there is no GPU; everything else is DeepSpeed's default."""
    zero = {
        "stage": 2,
        "contiguous_gradients": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    }
    return ZeroOffload(workload, zero)
