"""harmony_ds on its CPU device, under a device memory budget that the weights exceed."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from workload import Batch, Workload

import harmony_ds


class Harmony:
    """One `train_batch` per step; updates may go on in the background until `drain`."""

    def __init__(self, workload: Workload) -> None:
        self._config: dict[str, Any] = {
            **workload.ds_config(),
            "harmony": {"device": "cpu", "device_memory_gib": workload.budget_gib, "seed": workload.seed},
        }
        self._engine, *_ = harmony_ds.initialize(model=workload.model(), config=self._config)

    def step(self, batches: list[Batch]) -> Tensor:
        return self._engine.train_batch(iter(batches))

    def drain(self) -> None:
        self._engine.finish_updates()

    def settings(self) -> dict[str, Any]:
        """The ds_config and, once a step has run, the plan and the bytes it moved."""
        chosen: dict[str, Any] = {"ds_config": self._config, "version": harmony_ds.__version__}
        plan = self._engine.plan
        if plan is None:
            return chosen
        memory, swaps = self._engine.memory_report(), self._engine.swap_report()
        return {
            **chosen,
            "packs": [len(pack.positions) for pack in plan.packs],
            "layer_calls": sum(len(pack.positions) for pack in plan.packs),
            "stash_on_host": plan.stash_on_host,
            "device_peak_bytes": memory.device_peak_bytes,
            "budget_bytes": memory.budget_bytes,
            "swap_bytes": swaps.swap_bytes,
            "swap_bytes_over_lower_bound": swaps.ratio,
        }


def build(workload: Workload) -> Harmony:
    return Harmony(workload)
