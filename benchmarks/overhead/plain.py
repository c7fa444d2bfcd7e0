"""Plain PyTorch with everything in memory: transformers' gradient checkpointing, clip_grad_norm_, DeepSpeedCPUAdam.

In bf16 it does what mixed-precision training by hand does: fp32 masters, gradients summed in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import Tensor, nn
from workload import ADAM, CLIP_NORM, Batch, Workload


class Plain:
    """The reference of both time and losses."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._model = workload.checkpointed_model()
        self._parameters = list(self._model.parameters())
        self._masters = [p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for p in self._parameters]
        self._optimizer = DeepSpeedCPUAdam(self._masters, adamw_mode=True, **{**ADAM, "betas": tuple(ADAM["betas"])})

    def step(self, batches: list[Batch]) -> Tensor:
        total = torch.zeros(())
        for batch in batches:
            loss = self._model(**batch).loss
            (loss / len(batches)).backward()
            self._accumulate()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self._masters, CLIP_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._round_masters()
        return total / len(batches)

    def _accumulate(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if parameter is master or parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

    @torch.no_grad()
    def _round_masters(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if parameter is not master:
                parameter.copy_(master)

    def drain(self) -> None:
        return None

    def settings(self) -> dict[str, Any]:
        return {
            "optimizer": {"type": "DeepSpeedCPUAdam", "adamw_mode": True, "params": ADAM},
            "gradient_clipping": CLIP_NORM,
            "gradient_checkpointing": {"enabled": self._workload.checkpointing, "use_reentrant": False},
            "gradients_summed_in": "fp32",
        }


def build(workload: Workload) -> Plain:
    return Plain(workload)
