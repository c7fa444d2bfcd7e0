"""DeepSpeed, in a process for each device. An engine here is a row: a zero_optimization block, and its bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor

from harmony_ds.bench.engines.adapter import Adapter, Loop, checkpoint, only_on_cuda
from harmony_ds.bench.workload import Workload
from harmony_ds.parallel.distributed import init_distributed


@dataclass(frozen=True, slots=True)
class Zero:
    """One way of offloading.

    Attributes:
        block: of zero_optimization, beside what is offloaded.
        offload: of each offloaded kind, what stands beside the device.
        weights: how often they come in during a step of so many micro-batches (a third time where layers are recomputed,
            which is not counted).
        gradients_in, gradients_out: of how many micro-batches they come and go; out once more in fp32.
        zenflow: its block, but for `update_interval`, which it takes for the accumulation steps.
    """

    block: Mapping[str, Any]
    offload: Mapping[str, Mapping[str, Any]]
    weights: Callable[[int], int]
    gradients_in: Callable[[int], int]
    gradients_out: Callable[[int], int]
    zenflow: Mapping[str, Any] = field(default_factory=dict)

    def config(self, workload: Workload) -> dict[str, Any]:
        """The zero_optimization block; page-locked where there is a GPU."""
        place = {"device": "cpu", "pin_memory": workload.device == "cuda"}
        offloaded = {f"offload_{kind}": {**place, **more} for kind, more in self.offload.items()}
        zenflow = {"zenflow": {**self.zenflow, "update_interval": workload.accumulation}} if self.zenflow else {}
        return {**self.block, "overlap_comm": True, **offloaded, **zenflow}

    def traffic(self, workload: Workload) -> dict[str, Any]:
        """Bytes of one step by formula."""
        numbers = sum(parameter.numel() for parameter in workload.subject.model.parameters())
        once, count = workload.settings.compute_dtype.itemsize * numbers, workload.accumulation
        return {
            "how": "by formula",
            "host_to_device": {"weights": self.weights(count) * once, "gradients": self.gradients_in(count) * once},
            "device_to_host": {"gradients": self.gradients_out(count) * once + 4 * numbers},
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
        config = {key: value for key, value in workload.config().items() if key != "harmony"}
        self._config = {**config, "zero_optimization": zero.config(workload)}
        self.model, *_ = import_module("deepspeed").initialize(model=self.model, config=self._config)
        self._traffic = zero.traffic(workload) if workload.devices == 1 else {}

    def back(self, loss: Tensor, micro_batches: int) -> None:
        self.model.backward(loss)
        self.model.step()

    def report(self) -> dict[str, Any]:
        optimizer = self.model.optimizer
        return {
            "settings": {
                "ds_config": self._config,
                "optimizer": type(getattr(optimizer, "optimizer", optimizer)).__name__,
                "gradient_checkpointing": self._checkpointing,
            },
            **({"traffic": self._traffic} if self._traffic else {}),
        }


def _all(count: int) -> int:
    return count


def _once(_: int) -> int:
    return 1


def _but_one(count: int) -> int:
    return count - 1


_STAGE_2, _STAGE_3 = ({"stage": stage, "contiguous_gradients": True} for stage in (2, 3))
_TOP_K = {"topk_ratio": 0.05, "select_strategy": "step", "select_interval": 1, "overlap_step": True}
ZEROS = {
    # Weights stay; after the first micro-batch, sums of gradients come back to be added to.
    "deepspeed-zero2-offload": Zero(
        _STAGE_2, {"optimizer": {}}, _once, _but_one, lambda count: count if count > 1 else 0
    ),
    "deepspeed-zero3-offload": Zero(_STAGE_3, {"optimizer": {}, "param": {}}, lambda count: 2 * count, _all, _all),
    # The host's Adam in a process of its own beside the backward pass; weights stay on the device.
    "deepspeed-super-offload": Zero({"stage": 3}, {"optimizer": {"super_offload": True}}, _once, _all, _all),
    # The important gradients are applied on the device, the others a step or more late on the host.
    "deepspeed-zenflow": Zero({"stage": 2}, {"optimizer": {}}, _once, _but_one, _all, _TOP_K),
}
_SEVERAL = {"deepspeed-zero2-offload", "deepspeed-zero3-offload"}
_ON_CUDA, _NOT_EXACT = {"deepspeed-super-offload", "deepspeed-zenflow"}, {"deepspeed-zenflow"}
ENGINES = {
    name: Adapter(
        partial(ZeroOffload, zero=zero),
        only_on_cuda if name in _ON_CUDA else lambda _: None,
        name not in _NOT_EXACT,
        several=name in _SEVERAL,
    )
    for name, zero in ZEROS.items()
}
