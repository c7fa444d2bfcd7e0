"""Results that lie in a layer's parameters, whose memory is another layer's next: they are taken apart from it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class _Apart(torch.autograd.Function):
    """A tensor in memory of its own, as it was laid out: the kernels that read it are chosen by its strides."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return apart(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def taken_apart(tensor: Tensor) -> Tensor:
    copy: Tensor = _Apart.apply(tensor)  # type: ignore[no-untyped-call]
    return copy


def apart(tensor: Tensor) -> Tensor:
    places = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((n - 1) * stride for n, stride in places) if tensor.numel() else 0
    flat = tensor.as_strided((extent,), (1,)).clone()
    return torch.empty_like(flat).set_(flat.untyped_storage(), 0, tensor.shape, tensor.stride())


def memory(tensor: Tensor) -> int | None:
    """Which memory a tensor lies in; None for what has none (a phantom)."""
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else None


def memory_of(tensors: Iterable[Tensor]) -> set[int | None]:
    return {found for tensor in tensors if (found := memory(tensor)) is not None}
