"""Naive training loops, which define the right results, and comparisons with them.

`train_plainly` is ordinary PyTorch gradient accumulation. `train_plainly_half` is the ordinary mixed-precision loop
with fp32 masters. Both change the model they are given, run everything where it lies, and know nothing of the engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

MicroBatch = Mapping[str, Any]
SeedOf = Callable[[int, int], int]
Weights = nn.Module | Mapping[str, Tensor]


def loss_in(outputs: Any) -> Tensor:
    """Return the loss of a model's output: the tensor itself, `outputs["loss"]` or `outputs.loss`."""
    if isinstance(outputs, Tensor):
        return outputs
    loss = outputs["loss"] if isinstance(outputs, dict) else outputs.loss
    assert isinstance(loss, Tensor), "the model returned no loss: does the batch hold labels?"
    return loss


def seed_generators(seed: int) -> None:
    """Seed all generators as the engine does before a micro-batch's forward pass."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def train_plainly(
    model: nn.Module,
    micro_batches: Sequence[Sequence[MicroBatch]],
    optimizer: Optimizer,
    *,
    clip: float | None,
    seed_of: SeedOf,
    loss_of: Callable[[Any], Tensor] = loss_in,
    scheduler: LRScheduler | None = None,
    autocast: torch.dtype | None = None,
) -> list[list[float]]:
    """Train `model` in place, one optimizer step for each group in `micro_batches`; return each micro-batch's loss.

    Before micro-batch i of step s the global generators are seeded with `seed_of(s, i)`. The returned losses are
    before the division by the length of the group. `autocast` covers the forward and the loss, not the backward.
    """
    losses = []
    for step, group in enumerate(micro_batches):
        losses_of_group = []
        for position, batch in enumerate(group):
            seed_generators(seed_of(step, position))
            with autocast_to(autocast, model):
                loss = loss_of(model(**batch))
            (loss / len(group)).backward()
            losses_of_group.append(loss.item())
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(losses_of_group)
    return losses


def autocast_to(dtype: torch.dtype | None, model: nn.Module) -> AbstractContextManager[Any]:
    if dtype is None:
        return nullcontext()
    return torch.autocast(next(model.parameters()).device.type, dtype)


@dataclass(frozen=True)
class HalfRun:
    """Results of `train_plainly_half` besides the model: losses, and fp32 masters by name."""

    losses: list[list[float]]
    masters: dict[str, nn.Parameter]


def train_plainly_half(
    model: nn.Module,
    micro_batches: Sequence[Sequence[MicroBatch]],
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
    *,
    clip: float | None,
    seed_of: SeedOf,
    loss_of: Callable[[Any], Tensor] = loss_in,
    dtype: torch.dtype = torch.bfloat16,
    scale: float = 1.0,
    accumulate: torch.dtype = torch.float32,
) -> HalfRun:
    """Train an fp32 `model` with parameters of `dtype` and fp32 masters; it ends up in `dtype`, equal to its masters.

    The masters start from the fp32 values, before any rounding. Each micro-batch's gradient is taken in `dtype`, of the
    loss times `scale`, and added to a sum in `accumulate`; clipping and the optimizer see only the sums and the masters.
    Every parameter is cast, frozen ones too, but only trainable ones have a master. Floating-point buffers (running
    statistics, rotary frequencies) keep their dtype. Batches are used as they are: see `with_floating_dtype`.
    """
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters() if p.requires_grad}
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    optimizer = make_optimizer(list(masters.values()))
    losses = []
    for step, group in enumerate(micro_batches):
        losses_of_group = []
        sums: dict[str, Tensor] = {}
        for position, batch in enumerate(group):
            seed_generators(seed_of(step, position))
            loss = loss_of(model(**batch))
            (loss / len(group) * scale).backward()
            losses_of_group.append(loss.item())
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    gradient, parameter.grad = parameter.grad, None
                    sums[name] = sums[name].add_(gradient) if name in sums else gradient.to(accumulate)
        for name, master in masters.items():
            master.grad = sums[name].float() / scale if name in sums else None
        if clip is not None:
            nn.utils.clip_grad_norm_(masters.values(), clip)
        optimizer.step()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(masters[name])
        losses.append(losses_of_group)
    return HalfRun(losses, masters)


def with_floating_dtype(batch: MicroBatch, dtype: torch.dtype) -> dict[str, Any]:
    """Return a copy of `batch` with floating-point tensors in `dtype`, for models that do not convert their inputs."""
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }


def assert_same(actual: Weights, expected: Weights, bitwise: bool, relative: float = 1e-6) -> None:
    """Compare all parameters and buffers: bit for bit (signs of zeros and NaNs too), or to `relative` of each maximum.

    Both sides are modules or mappings from names to tensors, such as state dicts. Raises AssertionError that names the
    worst tensor, where in it the worst element lies, and how many others differ.
    """
    tensors = paired_tensors(actual, expected)
    if bitwise:
        wrong = {name for name, (left, right) in tensors.items() if not same_bits(left, right)}
    else:
        wrong = {name for name, (left, right) in tensors.items() if not difference_between(left, right)[1] <= relative}
    if not wrong:
        return
    differences = {name: difference_between(*tensors[name]) for name in wrong}
    ranked = sorted(wrong, key=lambda name: differences[name][1], reverse=True)
    wanted = "the same bits" if bitwise else f"at most {relative:g} of the tensor's maximum"
    lines = [f"{len(wrong)} of {len(tensors)} tensors differ (wanted: {wanted}). {describe_worst(ranked[0], tensors)}"]
    for name in ranked[:8]:
        absolute, of_maximum = differences[name]
        shape = tuple(tensors[name][0].shape)
        lines.append(f"  {name} {shape}: {absolute:.3g} absolute, {of_maximum:.3g} of the maximum")
    if len(ranked) > 8:
        lines.append(f"  and {len(ranked) - 8} more")
    raise AssertionError("\n".join(lines))


def largest_difference(actual: Weights, expected: Weights) -> dict[str, tuple[float, float]]:
    """For each parameter and buffer: the largest absolute difference, and that divided by the largest expected value.

    A NaN on one side only counts as an infinite difference, and so does any difference from an all-zero tensor in the
    second number. Raises AssertionError when names, shapes or dtypes do not match.
    """
    return {name: difference_between(left, right) for name, (left, right) in paired_tensors(actual, expected).items()}


def paired_tensors(actual: Weights, expected: Weights) -> dict[str, tuple[Tensor, Tensor]]:
    """Both sides' tensors by name, in host memory; names, shapes and dtypes have to agree."""
    left, right = tensors_of(actual), tensors_of(expected)
    missing, unexpected = sorted(right.keys() - left.keys()), sorted(left.keys() - right.keys())
    assert left.keys() == right.keys(), f"missing tensors: {missing}; unexpected tensors: {unexpected}"
    for name, tensor in left.items():
        found, wanted = (tensor.shape, tensor.dtype), (right[name].shape, right[name].dtype)
        assert found == wanted, f"{name} is {found}, expected {wanted}"
    return {name: (tensor, right[name]) for name, tensor in left.items()}


def tensors_of(weights: Weights) -> dict[str, Tensor]:
    """Return a module's parameters and buffers, persistent or not; a tied parameter once, under its first name."""
    if isinstance(weights, nn.Module):
        return tensors_of(dict(weights.named_parameters()) | dict(weights.named_buffers()))
    return {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def difference_between(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return the largest absolute difference, and its fraction of the largest magnitude in `expected`."""
    if actual.numel() == 0:
        return 0.0, 0.0
    absolute = elementwise_difference(actual, expected).max().item()
    if absolute == 0.0:
        return 0.0, 0.0
    largest = torch.nan_to_num(expected.double()).abs().max().item()
    return absolute, absolute / largest if largest > 0.0 else float("inf")


def elementwise_difference(actual: Tensor, expected: Tensor) -> Tensor:
    """Absolute differences in double precision: 0 where both sides are equal or both are NaN, infinite for one NaN."""
    left, right = actual.double(), expected.double()
    difference = (left - right).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    return difference.masked_fill((left == right) | (left.isnan() & right.isnan()), 0.0)


def describe_worst(name: str, tensors: Mapping[str, tuple[Tensor, Tensor]]) -> str:
    actual, expected = tensors[name]
    place = int(elementwise_difference(actual, expected).argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(place), actual.shape)]
    found, wanted = actual.reshape(-1)[place].item(), expected.reshape(-1)[place].item()
    return f"Worst is {name}{index}: {found!r}, expected {wanted!r}."
