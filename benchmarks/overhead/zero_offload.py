"""DeepSpeed on its CPU accelerator, in one process without a launcher; the ZeRO stage comes from the adapters."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from workload import Batch, Workload

_ONE_PROCESS = {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "DS_ACCELERATOR": "cpu",
}


class ZeroOffload:
    """A DeepSpeed engine, called once per micro-batch."""

    def __init__(self, workload: Workload, zero: dict[str, Any]) -> None:
        # Without these DeepSpeed looks for MPI.
        os.environ.update(_ONE_PROCESS)
        import deepspeed

        self._workload = workload
        self._config = {**workload.ds_config(), "zero_optimization": zero}
        self._engine, *_ = deepspeed.initialize(model=workload.checkpointed_model(), config=self._config)

    def step(self, batches: list[Batch]) -> Tensor:
        total = torch.zeros(())
        for batch in batches:
            loss = self._engine(**batch).loss
            self._engine.backward(loss)
            self._engine.step()
            total += loss.detach()
        return total / len(batches)

    def drain(self) -> None:
        return None

    def settings(self) -> dict[str, Any]:
        optimizer = self._engine.optimizer
        return {
            "ds_config": self._config,
            "optimizer": type(getattr(optimizer, "optimizer", optimizer)).__name__,
            "overlap_comm": self._engine.zero_overlap_comm(),
            "sub_group_size": self._engine.zero_sub_group_size(),
            "gradient_checkpointing": {"enabled": self._workload.checkpointing, "use_reentrant": False},
        }
