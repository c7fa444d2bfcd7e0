"""PyTorch's FSDP2 (`fully_shard`) on one device, parameters, gradients and optimizer on the host."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from harmony_ds.bench.engines.adapter import (
    Adapter,
    Loop,
    adam_options,
    checkpoint,
    clip_and_step,
    only_adam,
    only_on_cuda,
)
from harmony_ds.bench.workload import Workload
from harmony_ds.decomposer.find import find_layers
from harmony_ds.parallel.distributed import init_distributed


class Fsdp2Offload(Loop):
    """Layers are sharded one by one, as FSDP's tutorial does; fp32 weights, computed with in the compute dtype."""

    def __init__(self, workload: Workload) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        init_distributed()
        self._clipping = workload.settings.gradient_clipping
        super().__init__(workload)
        model = self.model.float()  # rounded to the compute dtype before: the same start as the others'
        self._checkpointing = checkpoint(model)
        policy: dict[str, Any] = {
            "offload_policy": CPUOffloadPolicy(pin_memory=True),
            "mp_policy": MixedPrecisionPolicy(param_dtype=workload.settings.compute_dtype, reduce_dtype=torch.float32),
        }
        layers = find_layers(model).layers
        users = Counter(name for layer in layers for name in layer.parameters)
        for layer in layers:
            if all(users[name] == 1 for name in layer.parameters):  # tied weights stay with the whole
                fully_shard(layer.module, **policy)
        fully_shard(model, **policy)
        self._parameters = list(model.parameters())
        self._optimizer = torch.optim.AdamW(self._parameters, fused=True, **adam_options(workload))

    def back(self, loss: Tensor, micro_batches: int) -> None:
        (loss / micro_batches).backward()

    def update(self) -> None:
        clip_and_step(self._optimizer, self._parameters, self._clipping)

    def report(self) -> dict[str, Any]:
        return {"settings": {"gradient_checkpointing": self._checkpointing, "optimizer": "AdamW, fused, on the host"}}


ENGINES = {"fsdp2-offload": Adapter(Fsdp2Offload, lambda workload: only_on_cuda(workload) or only_adam(workload))}
