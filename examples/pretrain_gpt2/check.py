"""The same training in plain PyTorch: the oracle that --check compares the engine with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime import lr_schedules
from torch import nn

import harmony_ds

# Rounding grows with the steps: the two additions to a tied weight's gradient are grouped otherwise, DeepSpeed's Adam
# rounds otherwise than torch's, and Adam divides by moments that start near zero.
LOSS_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Comparison:
    """The largest absolute differences between two runs, of losses and of weights."""

    plain_losses: list[float]
    loss_difference: float
    weight_difference: float
    weight_name: str

    @property
    def agrees(self) -> bool:
        """Return whether the losses stayed within rounding of each other."""
        return self.loss_difference <= LOSS_TOLERANCE

    def __str__(self) -> str:
        verdict = "agrees" if self.agrees else "DOES NOT AGREE"
        return (
            f"harmony_ds {verdict} with plain PyTorch after {len(self.plain_losses)} steps (tolerance of losses "
            f"{LOSS_TOLERANCE:g}); largest absolute difference:\n"
            f"  losses   {self.loss_difference:.3e}\n"
            f"  weights  {self.weight_difference:.3e}  ({self.weight_name})"
        )


def train_plain(
    model: nn.Module,
    config: dict[str, Any],
    batches: Iterator[dict[str, torch.Tensor]],
    steps: int,
    on_step: Callable[[float, float, float], None],
) -> list[float]:
    """Train with plain gradient accumulation and return the mean loss of each step.

    Each micro-batch starts from the engine's random state for it. `on_step` gets loss, learning rate and gradient norm.
    """
    device = next(model.parameters()).device
    optimizer = _optimizer(model, config)
    schedule = getattr(lr_schedules, config["scheduler"]["type"])(optimizer, **config["scheduler"]["params"])
    group, seed = config["gradient_accumulation_steps"], config["harmony"]["seed"]
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for index in range(group):
            micro_batch = {name: tensor.to(device) for name, tensor in next(batches).items()}
            torch.manual_seed(harmony_ds.micro_batch_seed(seed, step, index))
            loss = model(**micro_batch).loss
            (loss / group).backward()
            total += loss.detach()
        learning_rate = schedule.get_last_lr()[0]
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.get("gradient_clipping", 1.0) or float("inf"))
        optimizer.step()
        schedule.step()
        losses.append((total / group).item())
        on_step(losses[-1], learning_rate, norm.item())
    return losses


def compare(losses: list[float], plain_losses: list[float], module: nn.Module, plain: nn.Module) -> Comparison:
    """Compare two runs that had the same start."""
    loss_difference = max(abs(a - b) for a, b in zip(losses, plain_losses, strict=True))
    weights = dict(module.named_parameters())
    differences = {
        name: (weights[name].detach().cpu() - weight.detach().cpu()).abs().max().item()
        for name, weight in plain.named_parameters()
    }
    name = max(differences, key=lambda name: differences[name])
    return Comparison(plain_losses, loss_difference, differences[name], name)


def _optimizer(model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
    """Return torch's equal of the ds_config's optimizer; DeepSpeed's "Adam" means AdamW unless it says otherwise."""
    if config["optimizer"]["type"].lower() not in ("adam", "adamw"):
        raise ValueError(f"--check knows Adam and AdamW, and the config's optimizer is {config['optimizer']['type']}")
    names = ("lr", "betas", "eps", "weight_decay")
    params = {name: value for name, value in config["optimizer"]["params"].items() if name in names}
    return torch.optim.AdamW(model.parameters(), fused=True, **params)
