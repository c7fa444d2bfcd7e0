"""Whether two runs of the same work have given the same values."""

from __future__ import annotations

import torch
from torch import Tensor


def is_exact(device: torch.device) -> bool:
    """Return whether kernels of `device` give the same bits each time: others than the host's may add up in any order."""
    return device.type == "cpu" or torch.are_deterministic_algorithms_enabled()


def equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape and values; NaN is NaN."""
    return a.shape == b.shape and (torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
