"""PyTorch's FSDP2 (`fully_shard`) on one device, parameters, gradients and optimizer on the host."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.bench.engines._accumulation import adam_options, checkpoint, on_device
from harmony_ds.bench.engines._accumulation import unavailable as _adam_alone
from harmony_ds.bench.task import Batch, Task
from harmony_ds.decomposer.find import find_layers
from harmony_ds.distributed import init_distributed
from harmony_ds.runtime.micro_batch import loss_of


class Fsdp2Offload:
    """Layers are sharded one by one, as FSDP's tutorial does; fp32 weights, computed with in the compute dtype."""

    def __init__(self, task: Task) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        init_distributed()
        self._device = torch.device(task.device)
        self._clipping = task.settings.gradient_clipping
        model = task.subject.model.float()  # rounded to the compute dtype before: the same start as the others'
        self._checkpointing = checkpoint(model)
        policy: dict[str, Any] = {
            "offload_policy": CPUOffloadPolicy(pin_memory=True),
            "mp_policy": MixedPrecisionPolicy(param_dtype=task.settings.compute_dtype, reduce_dtype=torch.float32),
        }
        layers = find_layers(model).layers
        users = Counter(name for layer in layers for name in layer.parameters)
        for layer in layers:
            if all(users[name] == 1 for name in layer.parameters):  # tied weights stay with the whole
                fully_shard(layer.module, **policy)
        fully_shard(model, **policy)
        self._model: Any = model
        self._parameters = list(model.parameters())
        self._optimizer = torch.optim.AdamW(self._parameters, fused=True, **adam_options(task))

    def step(self, batches: list[Batch]) -> Tensor:
        total = torch.zeros((), device=self._device)
        for batch in batches:
            loss = loss_of(self._model(**on_device(batch, self._device)))
            (loss / len(batches)).backward()
            total += loss.detach()
        if self._clipping > 0:
            nn.utils.clip_grad_norm_(self._parameters, self._clipping)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total / len(batches)

    def drain(self) -> None:
        torch.cuda.synchronize()

    def report(self) -> dict[str, Any]:
        return {"settings": {"gradient_checkpointing": self._checkpointing, "optimizer": "AdamW, fused, on the host"}}


def unavailable(task: Task) -> str | None:
    if task.device != "cuda":
        return "it needs a CUDA device"
    return _adam_alone(task)


def build(task: Task) -> Fsdp2Offload:
    return Fsdp2Offload(task)
