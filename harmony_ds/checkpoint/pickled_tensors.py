"""Tensors for `torch.save`, which writes the whole memory that a view is part of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def alone(tensor: Tensor) -> Tensor:
    """The same values in the same memory, as a tensor that knows no more of it than its own."""
    tensor = tensor.detach().contiguous()
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    octets: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return torch.frombuffer(octets, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
