"""harmony_ds under the workload's device memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from harmony_ds.bench.engines.adapter import Adapter
from harmony_ds.bench.workload import Batch, Workload
from harmony_ds.engine import initialize


class Harmony:
    """One `train_batch` per step; updates may go on in the background until `drain`."""

    def __init__(self, workload: Workload) -> None:
        self._config: dict[str, Any] = workload.config()
        own = {"device": workload.device, "seed": workload.seed, "device_memory_gib": workload.memory_gib}
        self._config["harmony"] = {**self._config.get("harmony", {}), **own}
        self._engine, *_ = initialize(model=workload.subject.model, config=self._config)

    def step(self, batches: list[Batch]) -> Tensor:
        return self._engine.train_batch(iter(batches))

    def drain(self) -> None:
        self._engine._state.runtime.updater.wait_all()  # `finish_updates` would copy resident packs to the host, too
        self._engine._state.device.now_ms()

    def report(self) -> dict[str, Any]:
        """Return the settings, the plan, and the bytes it moved as the engine's ledger counted them."""
        memory, swaps, planned = self._engine.memory_report(), self._engine.swap_report(), self._engine.plan_report()
        sent = {"sent_bytes": planned.sent_bytes} if self._engine.world_size > 1 else {}
        return {
            "settings": {"ds_config": self._config},
            "plan": planned.choices[0].reason,
            "predicted_step_ms": planned.predicted_step_ms,
            "planned_peak_bytes": memory.planned_peak_bytes,
            "device_peak_bytes": memory.device_peak_bytes,
            "between_devices": planned.moved_bytes,
            **sent,
            "traffic": {
                "how": "counted by the engine",
                "host_to_device": swaps.host_to_device,
                "device_to_host": swaps.device_to_host,
            },
        }


ENGINES = {"harmony": Adapter(Harmony)}
