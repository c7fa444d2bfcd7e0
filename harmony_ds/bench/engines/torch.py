"""Plain gradient accumulation in PyTorch, everything on the device: what "no offload" means."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.bench.engines.adapter import Adapter, Loop, adam_section, checkpoint, clip_and_step, only_adam
from harmony_ds.bench.workload import Workload
from harmony_ds.offload.optimizers import make_adam


class Accumulation(Loop):
    """In bf16 it does what mixed-precision training by hand does: fp32 masters, gradients summed in fp32."""

    def __init__(self, workload: Workload, checkpointing: bool) -> None:
        super().__init__(workload)
        self._checkpointing = checkpointing
        self._clipping = workload.settings.gradient_clipping
        if checkpointing:
            checkpoint(self.model)
        self.model.to(self.device)
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._masters = [p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for p in self._parameters]
        # DeepSpeed's Adam on the host, torch's fused one on the device.
        self._optimizer = make_adam(adam_section(workload), self._masters, torchs=workload.device == "cuda")

    def back(self, loss: Tensor, micro_batches: int) -> None:
        (loss / micro_batches).backward()
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if parameter is master or parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

    @torch.no_grad()
    def update(self) -> None:
        clip_and_step(self._optimizer, self._masters, self._clipping)
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if parameter is not master:
                parameter.copy_(master)

    def report(self) -> dict[str, Any]:
        return {
            "settings": {
                "optimizer": type(self._optimizer).__name__,
                "gradient_checkpointing": self._checkpointing,
                "gradients_summed_in": "fp32",
            },
            "traffic": {"how": "nothing is swapped", "host_to_device": {}, "device_to_host": {}},
        }


def _cannot_checkpoint(workload: Workload) -> str | None:
    model = workload.subject.model
    if not getattr(model, "supports_gradient_checkpointing", False):
        return f"{type(model).__name__} has no gradient checkpointing of its own"
    return only_adam(workload)


ENGINES = {
    "torch": Adapter(partial(Accumulation, checkpointing=False), only_adam),
    "torch-checkpoint": Adapter(partial(Accumulation, checkpointing=True), _cannot_checkpoint),
}
