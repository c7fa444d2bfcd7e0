"""DeepSpeed, in a process for each device. An engine here is a row: a zero_optimization block, and its bytes.

The formulas are checked by counting DeepSpeed's copies: `python -m benchmarks.zero3_traffic.run`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor

from harmony_ds.bench.engines.adapter import Adapter, Loop, checkpoint
from harmony_ds.bench.workload import Workload
from harmony_ds.distributed.process_group import init_distributed


@dataclass(frozen=True, slots=True)
class Zero:
    """One way of offloading.

    Attributes:
        block: the zero_optimization block, but for the offloaded kinds.
        offload: by kind ("optimizer", "param"), options beside the device.
        weights: how often weights are copied to the device in a step of so many micro-batches (a third time where layers
            are recomputed, which is not counted).
        gradients_in, gradients_out: how many times sums of gradients come and go; they go once more in fp32.
    """

    block: Mapping[str, Any]
    offload: Mapping[str, Mapping[str, Any]]
    weights: Callable[[int], int]
    gradients_in: Callable[[int], int]
    gradients_out: Callable[[int], int]

    def config(self, workload: Workload) -> dict[str, Any]:
        """Return the zero_optimization block, with page-locked host memory where there is a GPU."""
        place = {"device": "cpu", "pin_memory": workload.device == "cuda"}
        offloaded = {f"offload_{kind}": {**place, **more} for kind, more in self.offload.items()}
        return {**self.block, "overlap_comm": True, **offloaded}

    def traffic(self, workload: Workload) -> dict[str, Any]:
        """Return the bytes of one step by formula. Call it before the engine is built: ZeRO-3 empties parameters."""
        elements = sum(parameter.numel() for parameter in workload.subject.model.parameters())
        once, count = workload.settings.compute_dtype.itemsize * elements, workload.accumulation
        return {
            "how": "by formula",
            "host_to_device": {"weights": self.weights(count) * once, "gradients": self.gradients_in(count) * once},
            "device_to_host": {"gradients": self.gradients_out(count) * once + 4 * elements},
        }


class ZeroOffload(Loop):
    """A DeepSpeed engine, called once per micro-batch, with the model's own gradient checkpointing."""

    def __init__(self, workload: Workload, zero: Zero) -> None:
        super().__init__(workload)
        if workload.device == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed's engine wants it, however it was initialized
        init_distributed()
        self._checkpointing = checkpoint(self.model)
        self._traffic = zero.traffic(workload) if workload.devices == 1 else None
        config = {key: value for key, value in workload.config().items() if key != "harmony"}
        self._config = {**config, "zero_optimization": zero.config(workload)}
        self.model, *_ = import_module("deepspeed").initialize(model=self.model, config=self._config)

    def backward(self, loss: Tensor, micro_batches: int) -> None:
        self.model.backward(loss)
        self.model.step()

    def report(self) -> dict[str, Any]:
        optimizer = self.model.optimizer
        settings = {
            "ds_config": self._config,
            "optimizer": type(getattr(optimizer, "optimizer", optimizer)).__name__,
            "gradient_checkpointing": self._checkpointing,
        }
        return {"settings": settings, **({"traffic": self._traffic} if self._traffic else {})}


ZEROS = {
    # Weights stay on the device; after the first micro-batch, sums of gradients come back to be added to.
    "deepspeed-zero2-offload": Zero(
        {"stage": 2}, {"optimizer": {}}, lambda _: 1, lambda count: count - 1, lambda count: count if count > 1 else 0
    ),
    "deepspeed-zero3-offload": Zero(
        {"stage": 3}, {"optimizer": {}, "param": {}}, lambda count: 2 * count, lambda count: count, lambda count: count
    ),
}
ENGINES = {name: Adapter(partial(ZeroOffload, zero=zero)) for name, zero in ZEROS.items()}
