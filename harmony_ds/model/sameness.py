"""Comparison of the values of two runs of the same work."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Relative to the largest value: above rounding in another order of sums, below the effect of rows on each other."""
_PIECE = 2**20
"""Elements compared at once, since a comparison makes several copies."""


def is_exact(device: torch.device) -> bool:
    """Return whether kernels of `device` give the same bits each time; a GPU's may add up in any order."""
    return device.type == "cpu" or torch.are_deterministic_algorithms_enabled()


def equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape and values; NaN is NaN."""
    return a.shape == b.shape and (torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def close(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are the same but for rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    tolerance = TOLERANCES.get(a.dtype)
    if tolerance is None:
        return torch.equal(a, b)
    pieces, others = a.reshape(-1).split(_PIECE), b.reshape(-1).split(_PIECE)
    largest = max((one.nan_to_num(0.0, 0.0, 0.0).abs().max().item() for one in pieces if one.numel()), default=0.0)
    apart = tolerance * largest
    return all(torch.allclose(x, y, rtol=0.0, atol=apart, equal_nan=True) for x, y in zip(pieces, others, strict=True))


def comparison(device: torch.device) -> Callable[[Tensor, Tensor], bool]:
    """Return the function that compares tensors of two runs on `device`."""
    return equal if is_exact(device) else close
