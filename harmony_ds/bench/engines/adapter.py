"""Interface of an engine that is compared, and what several of them have alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from harmony_ds.bench.workload import Batch, Workload
from harmony_ds.config import Section
from harmony_ds.runtime.micro_batch import loss_of


class Engine(Protocol):
    """One model under one engine."""

    def step(self, batches: list[Batch]) -> Tensor:
        """Take one optimizer step and return the mean loss over its micro-batches, 0-dim."""

    def drain(self) -> None:
        """Wait until no update or copy is under way."""

    def report(self) -> dict[str, Any]:
        """Return `settings`, and as far as the engine knows them `traffic` and `device_peak_bytes`."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """One engine.

    Attributes:
        build: makes it for a workload.
        refusal: returns why it cannot run a workload here, or None.
    """

    build: Callable[[Workload], Engine]
    refusal: Callable[[Workload], str | None] = lambda _: None


class Loop(ABC):
    """Step that calls `model` for each micro-batch in turn, on `device`."""

    def __init__(self, workload: Workload) -> None:
        self.device = torch.device(workload.device)
        self.model: Any = workload.subject.model

    def step(self, batches: list[Batch]) -> Tensor:
        total = torch.zeros((), device=self.device)
        for batch in batches:
            there = {n: v.to(self.device, non_blocking=True) if isinstance(v, Tensor) else v for n, v in batch.items()}
            loss = loss_of(self.model(**there))
            self.backward(loss, len(batches))
            total += loss.detach()
        self.update()
        return total / len(batches)

    @abstractmethod
    def backward(self, loss: Tensor, micro_batches: int) -> None:
        """Propagate back from one micro-batch's loss."""

    def update(self) -> None:  # noqa: B027 - an engine may have stepped by itself
        """Step the optimizer, after the last micro-batch."""

    def drain(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def clip_and_step(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], clipping: float) -> None:
    """End a step by hand."""
    if clipping > 0:
        nn.utils.clip_grad_norm_(parameters, clipping)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def checkpoint(model: nn.Module) -> bool:
    """Switch transformers' gradient checkpointing on, and return whether the model has it."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        return False
    enable: Any = model.gradient_checkpointing_enable
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return True


def adam_section(workload: Workload) -> Section:
    """Return the ds_config's Adam, with DeepSpeed's default of no weight decay and no choice of implementation."""
    section = workload.settings.optimizer or Section("Adam")
    params = {key: value for key, value in section.params.items() if key != "torch_adam"}
    return Section(section.type, {"weight_decay": 0.0, **params})


def needs_adam(workload: Workload) -> str | None:
    """Refuse workloads for an engine of one device that knows Adam alone, and no loss scale."""
    section = workload.settings.optimizer
    if workload.devices > 1:
        return f"it is compared on one device, and {workload.devices} are asked for"
    if section is not None and section.type.lower() not in ("adam", "adamw"):
        return f"its optimizer is Adam or AdamW, and the ds_config's is {section.type}"
    if workload.settings.loss_scale is not None:
        return "it does not scale losses, and the ds_config says fp16"
    if workload.settings.autocast_dtype is not None:
        return "it runs without autocast, and the ds_config says torch_autocast"
    return None
