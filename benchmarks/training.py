"""Training in plain PyTorch and by the engine on the CPU device, of the same micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import harmony_ds
from benchmarks.common import GIB
from harmony_ds.runtime.micro_batch import loss_of

SEED = 5
Batch = dict[str, Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, fused=True)


def weight_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


class Plain:
    """Gradient accumulation in plain PyTorch, everything in memory, no recomputation."""

    def __init__(self, model: nn.Module, make: MakeOptimizer, scheduler: Callable[[Any], Any] | None = None) -> None:
        self.model = model
        self._optimizer = make(model.parameters())
        self._scheduler = scheduler(self._optimizer) if scheduler else None
        self._steps = 0

    def step(self, batches: Sequence[Batch]) -> float:
        """Take an optimizer step; return the mean loss."""
        losses = []
        for index, batch in enumerate(batches):
            torch.manual_seed(harmony_ds.micro_batch_seed(SEED, self._steps, index))
            loss = loss_of(self.model(**batch))
            (loss / len(batches)).backward()
            losses.append(loss.detach())
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._scheduler is not None:
            self._scheduler.step()
        self._steps += 1
        return torch.stack(losses).mean().item()


class Ours:
    """The engine on the CPU device."""

    def __init__(
        self,
        model: nn.Module,
        make: MakeOptimizer,
        shape: tuple[int, int],
        budget_bytes: int | None,
        harmony: Mapping[str, Any] | None = None,
        scheduler: Callable[[Any], Any] | None = None,
    ) -> None:
        """Start an engine.

        Args:
            shape: rows of a micro-batch, micro-batches of a step.
            budget_bytes: device memory (None: no limit).
            harmony: more settings of ours.
        """
        budget = {} if budget_bytes is None else {"device_memory_gib": budget_bytes / GIB}
        config = {
            "train_micro_batch_size_per_gpu": shape[0],
            "gradient_accumulation_steps": shape[1],
            "gradient_clipping": 0.0,
            "harmony": {"device": "cpu", "seed": SEED, **budget, **(harmony or {})},
        }
        optimizer = make(model.parameters())
        self.model = model
        self.engine, *_ = harmony_ds.initialize(
            model=model, optimizer=optimizer, lr_scheduler=scheduler(optimizer) if scheduler else None, config=config
        )

    def step(self, batches: Sequence[Batch]) -> float:
        """Take an optimizer step and finish its updates; return the mean loss."""
        loss = self.engine.train_batch(iter(batches)).item()
        self.engine.finish_updates()
        return float(loss)

    def close(self) -> None:
        self.engine.destroy()


LEAST: Mapping[str, Any] = {"pack_layers": 1, "stash": "host", "prefetch": False}
"""The plan that needs least: every layer a pack, the stash on the host, nothing swapped early."""


def planned_bytes(
    model: nn.Module, make: MakeOptimizer, batches: Sequence[Batch], rows: int, harmony: Mapping[str, Any] = LEAST
) -> int:
    """Return the device memory of the plan with these settings, where nothing limits it."""
    run = Ours(model, make, (rows, len(batches)), None, harmony)
    run.step(batches)
    nbytes = int(run.engine.memory_report().planned_peak_bytes)
    run.close()
    return nbytes
