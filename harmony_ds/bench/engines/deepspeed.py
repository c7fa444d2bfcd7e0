"""DeepSpeed in one process, without a launcher. An engine here is a zero_optimization block and a formula of its bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor

from harmony_ds.bench.engines.adapter import Adapter, Loop, checkpoint, only_on_cuda
from harmony_ds.bench.workload import Workload
from harmony_ds.distributed import init_distributed
from harmony_ds.offload import compiled

_Zero = Callable[[Workload], dict[str, Any]]
_Formula = Callable[[Workload], Mapping[str, Any]]


class ZeroOffload(Loop):
    """A DeepSpeed engine, called once per micro-batch, with the model's own gradient checkpointing."""

    def __init__(self, workload: Workload, zero: _Zero, formula: _Formula) -> None:
        super().__init__(workload)
        if workload.device == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ["LOCAL_RANK"] = "0"  # DeepSpeed's engine wants it, however it was initialized
        init_distributed()
        self._checkpointing = checkpoint(self.model)
        config = {key: value for key, value in workload.config().items() if key != "harmony"}
        self._config = {**config, "zero_optimization": zero(workload)}
        with compiled.instead_of_torch():
            self.model, *_ = import_module("deepspeed").initialize(model=self.model, config=self._config)
        self._traffic = formula(workload)

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
            "traffic": dict(self._traffic),
        }


def _offload(workload: Workload, **more: Any) -> dict[str, Any]:
    """An offload block: page-locked where there is a GPU."""
    return {"device": "cpu", "pin_memory": workload.device == "cuda", **more}


def _moved(workload: Workload, passes: int, gradients_in: int, gradients_out: int) -> dict[str, Any]:
    """Bytes of one step: weights in so often, gradients of so many micro-batches; out once more in fp32."""
    count = sum(parameter.numel() for parameter in workload.subject.model.parameters())
    once = workload.settings.compute_dtype.itemsize * count
    return {
        "how": "by formula",
        "host_to_device": {"weights": passes * once, "gradients": gradients_in * once},
        "device_to_host": {"gradients": gradients_out * once + 4 * count},
    }


def zero3(workload: Workload) -> dict[str, Any]:
    """ZeRO-3 with parameters and optimizer offloaded: DeepSpeed's defaults but for page-locked memory."""
    return {
        "stage": 3,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "offload_optimizer": _offload(workload),
        "offload_param": _offload(workload),
    }


def _zero3_bytes(workload: Workload) -> dict[str, Any]:
    """Per micro-batch weights in twice (a third time, not counted here, where layers are recomputed), gradients in and
    out.
    """
    count = workload.accumulation
    return _moved(workload, 2 * count, count, count)


def _zero2(workload: Workload) -> dict[str, Any]:
    """ZeRO-2 with the optimizer offloaded: ZeRO-Offload."""
    return {
        "stage": 2,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "offload_optimizer": _offload(workload),
    }


def _zero2_bytes(workload: Workload) -> dict[str, Any]:
    """Weights stay; after the first micro-batch, sums of gradients come back to be added to."""
    count = workload.accumulation
    return _moved(workload, 1, count - 1, count if count > 1 else 0)


def _super_offload(workload: Workload) -> dict[str, Any]:
    """ZeRO-3, the host's Adam in a process of its own beside the backward pass."""
    return {"stage": 3, "overlap_comm": True, "offload_optimizer": _offload(workload, super_offload=True)}


def _super_offload_bytes(workload: Workload) -> dict[str, Any]:
    """Weights stay on the device; gradients in and out for every micro-batch."""
    return _moved(workload, 1, workload.accumulation, workload.accumulation)


def _zenflow(workload: Workload) -> dict[str, Any]:
    """The important gradients are applied on the device, the others later on the host.

    ZenFlow takes its `update_interval` for the accumulation steps, so it is given as many.
    """
    sparse = {"topk_ratio": 0.05, "select_strategy": "step", "select_interval": 1, "overlap_step": True}
    return {
        "stage": 2,
        "overlap_comm": True,
        "offload_optimizer": _offload(workload),
        "zenflow": {**sparse, "update_interval": workload.accumulation},
    }


def _zenflow_bytes(workload: Workload) -> dict[str, Any]:
    return _moved(workload, 1, workload.accumulation - 1, workload.accumulation)


def _adapter(zero: _Zero, formula: _Formula, **more: Any) -> Adapter:
    return Adapter(partial(ZeroOffload, zero=zero, formula=formula), traffic=formula, **more)


ENGINES = {
    "deepspeed-zero2-offload": _adapter(_zero2, _zero2_bytes),
    "deepspeed-zero3-offload": _adapter(zero3, _zero3_bytes),
    "deepspeed-super-offload": _adapter(_super_offload, _super_offload_bytes, unavailable=only_on_cuda),
    # most gradients are applied a step or more late
    "deepspeed-zenflow": _adapter(_zenflow, _zenflow_bytes, unavailable=only_on_cuda, is_exact=False),
}
