"""Plain gradient accumulation in PyTorch, everything on the device: what "no offload" means."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.bench.task import Batch, Task
from harmony_ds.config import Section
from harmony_ds.offload.optimizers import make_adam
from harmony_ds.runtime.micro_batch import loss_of


class Accumulation:
    """In bf16 it does what mixed-precision training by hand does: fp32 masters, gradients summed in fp32."""

    def __init__(self, task: Task, checkpointing: bool) -> None:
        self._device = torch.device(task.device)
        self._checkpointing = checkpointing
        self._clipping = task.settings.gradient_clipping
        self._model = task.subject.model
        if checkpointing:
            checkpoint(self._model)
        self._model.to(self._device)
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._masters = [p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for p in self._parameters]
        self._optimizer = adam(self._masters, task)

    def step(self, batches: list[Batch]) -> Tensor:
        total = torch.zeros((), device=self._device)
        for batch in batches:
            loss = loss_of(self._model(**on_device(batch, self._device)))
            (loss / len(batches)).backward()
            self._accumulate()
            total += loss.detach()
        if self._clipping > 0:
            nn.utils.clip_grad_norm_(self._masters, self._clipping)
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
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def report(self) -> dict[str, Any]:
        return {
            "settings": {
                "optimizer": type(self._optimizer).__name__,
                "gradient_checkpointing": self._checkpointing,
                "gradients_summed_in": "fp32",
            },
            "traffic": {"how": "nothing is swapped", "host_to_device": {}, "device_to_host": {}},
        }


def unavailable(task: Task) -> str | None:
    """It knows Adam alone, and no loss scale."""
    section = task.settings.optimizer
    if section is not None and section.type.lower() not in ("adam", "adamw"):
        return f"its optimizer is Adam or AdamW, and the ds_config's is {section.type}"
    if task.settings.loss_scale is not None:
        return "it does not scale losses, and the ds_config says fp16"
    return None


def adam(parameters: list[nn.Parameter], task: Task) -> torch.optim.Optimizer:
    """DeepSpeed's Adam on the host, torch's fused one on the device."""
    return make_adam(adam_section(task), parameters, torchs=task.device == "cuda")


def adam_section(task: Task) -> Section:
    """The ds_config's, with DeepSpeed's default of no weight decay, and without the choice of an implementation."""
    section = task.settings.optimizer or Section("Adam")
    params = {key: value for key, value in section.params.items() if key != "torch_adam"}
    return Section(section.type, {"weight_decay": 0.0, **params})


def adam_options(task: Task) -> dict[str, Any]:
    """What any Adam takes."""
    return {key: value for key, value in adam_section(task).params.items() if key != "adam_w_mode"}


def checkpoint(model: nn.Module) -> bool:
    """Switches transformers' gradient checkpointing on, if the model has it."""
    enable: Any = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None or not getattr(model, "supports_gradient_checkpointing", False):
        return False
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return True


def on_device(batch: Batch, device: torch.device) -> Batch:
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }
