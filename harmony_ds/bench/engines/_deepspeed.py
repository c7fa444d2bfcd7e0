"""DeepSpeed in one process, without a launcher. The adapters say what its zero_optimization is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from harmony_ds.bench.engines._accumulation import checkpoint, on_device
from harmony_ds.bench.task import Batch, Task
from harmony_ds.distributed import init_distributed
from harmony_ds.offload import compiled
from harmony_ds.runtime.micro_batch import loss_of

Traffic = Mapping[str, Any]


class ZeroOffload:
    """A DeepSpeed engine, called once per micro-batch, with the model's own gradient checkpointing."""

    def __init__(self, task: Task, zero: dict[str, Any], traffic: Traffic) -> None:
        if task.device == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ["LOCAL_RANK"] = "0"  # DeepSpeed's engine wants it, however it was initialized
        init_distributed()
        deepspeed = import_module("deepspeed")
        self._device = torch.device(task.device)
        self._checkpointing = checkpoint(task.subject.model)
        self._config = {**task.config(), "zero_optimization": zero}
        self._config.pop("harmony", None)
        with compiled.instead_of_torch():
            self._engine, *_ = deepspeed.initialize(model=task.subject.model, config=self._config)
        self._traffic = traffic

    def step(self, batches: list[Batch]) -> Tensor:
        total = torch.zeros((), device=self._device)
        for batch in batches:
            loss = loss_of(self._engine(**on_device(batch, self._device)))
            self._engine.backward(loss)
            self._engine.step()
            total += loss.detach()
        return total / len(batches)

    def drain(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def report(self) -> dict[str, Any]:
        optimizer = self._engine.optimizer
        return {
            "settings": {
                "ds_config": self._config,
                "optimizer": type(getattr(optimizer, "optimizer", optimizer)).__name__,
                "gradient_checkpointing": self._checkpointing,
            },
            "traffic": dict(self._traffic),
        }


def unavailable(task: Task) -> str | None:
    del task
    return None if find_spec("deepspeed") is not None else "deepspeed is not installed"


def only_on_cuda(task: Task) -> str | None:
    """For what DeepSpeed has for CUDA alone."""
    if task.device != "cuda":
        return "it needs a CUDA device"
    return unavailable(task)


def elements(task: Task) -> int:
    return sum(parameter.numel() for parameter in task.subject.model.parameters())


def by_formula(weights_in: int, gradients_in: int, gradients_out: int) -> Traffic:
    """Bytes of one step, not counted but computed."""
    return {
        "how": "by formula",
        "host_to_device": {"weights": weights_in, "gradients": gradients_in},
        "device_to_host": {"gradients": gradients_out},
    }


def offload(task: Task, **more: Any) -> dict[str, Any]:
    """An offload block: page-locked where there is a GPU."""
    return {"device": "cpu", "pin_memory": task.device == "cuda", **more}
