"""The two ways of training that are measured, over the same model and micro-batches: plainly, and with harmony_ds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import harmony_ds

SEED = 5
GIB = 2**30
Batch = dict[str, Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, fused=True)


def loss_of(outputs: Any) -> Tensor:
    """The loss that a model returned, alone or among its outputs."""
    found = outputs if isinstance(outputs, Tensor) else outputs.loss
    assert isinstance(found, Tensor)
    return found


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
        """One optimizer step; the mean loss."""
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
    """The engine on the CPU device.

    Args:
        rows, accumulation: of a micro-batch; micro-batches of a step.
        budget_bytes: device memory (None: no limit).
        harmony: more settings of ours.
    """

    def __init__(
        self,
        model: nn.Module,
        make: MakeOptimizer,
        shape: tuple[int, int],
        budget_bytes: int | None,
        harmony: Mapping[str, Any] | None = None,
        scheduler: Callable[[Any], Any] | None = None,
    ) -> None:
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
            model=model,
            optimizer=optimizer,
            lr_scheduler=scheduler(optimizer) if scheduler else None,
            config=config,
        )

    def step(self, batches: Sequence[Batch]) -> float:
        """One optimizer step, its updates finished; the mean loss."""
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
    """Device memory of the plan with these settings, where nothing limits it."""
    run = Ours(model, make, (rows, len(batches)), None, harmony)
    run.step(batches)
    nbytes = int(run.engine.memory_report().planned_peak_bytes)
    run.close()
    return nbytes


def interleaved(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, round by round in turns: what slows the machine down for a while slows all of them down.

    Each is run once before, untimed.
    """
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def largest_difference(model: nn.Module, other: nn.Module) -> float:
    """Of any parameter's element, absolute."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((a.detach() - b.detach()).abs().max().item() for a, b in pairs)
