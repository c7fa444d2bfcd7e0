"""Plain gradient accumulation in PyTorch, everything on the device: training without offload."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.bench.engines.adapter import Adapter, Loop, adam_section, checkpoint, clip_and_step, needs_adam
from harmony_ds.bench.workload import Workload
from harmony_ds.optim.optimizers import make_adam


class Accumulation(Loop):
    """Accumulation by hand; in bf16 with fp32 masters, and gradients summed in fp32."""

    def __init__(self, workload: Workload, checkpointing: bool) -> None:
        super().__init__(workload)
        self._checkpointing = checkpointing and checkpoint(self.model)
        self._clipping = workload.settings.gradient_clipping
        self.model.to(self.device)
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._masters = [p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for p in self._parameters]
        # DeepSpeed's Adam on the host, torch's fused one on the device.
        self._optimizer = make_adam(adam_section(workload), self._masters, torchs=workload.device == "cuda")

    def backward(self, loss: Tensor, micro_batches: int) -> None:
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
        optimizer = type(self._optimizer).__name__
        return {
            "settings": {"optimizer": optimizer, "gradient_checkpointing": self._checkpointing},
            "traffic": {"how": "nothing is swapped", "host_to_device": {}, "device_to_host": {}},
        }


def _cannot_checkpoint(workload: Workload) -> str | None:
    model = workload.subject.model
    if not getattr(model, "supports_gradient_checkpointing", False):
        return f"{type(model).__name__} has no gradient checkpointing of its own"
    return needs_adam(workload)


ENGINES = {
    "torch": Adapter(partial(Accumulation, checkpointing=False), needs_adam),
    "torch-checkpoint": Adapter(partial(Accumulation, checkpointing=True), _cannot_checkpoint),
}
