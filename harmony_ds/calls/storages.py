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
        return copy_strided(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def copy_with_gradient(tensor: Tensor) -> Tensor:
    """A copy of `tensor` that its gradients go through."""
    copy: Tensor = _Apart.apply(tensor)  # type: ignore[no-untyped-call]
    return copy


def copy_strided(tensor: Tensor) -> Tensor:
    """A copy of `tensor`, with the same strides."""
    places = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((n - 1) * stride for n, stride in places) if tensor.numel() else 0
    flat = tensor.as_strided((extent,), (1,)).clone()
    return torch.empty_like(flat).set_(flat.untyped_storage(), 0, tensor.shape, tensor.stride())


def storage_of(tensor: Tensor) -> int | None:
    """Which memory a tensor lies in; None for what has none of its own (a phantom, a sparse tensor)."""
    has_any = tensor.layout is torch.strided and torch._C._has_storage(tensor)
    own: int | None = tensor.untyped_storage()._cdata if has_any else None
    return own


def storages_of(tensors: Iterable[Tensor]) -> set[int]:
    """Which memory they lie in, those that have any."""
    return {t.untyped_storage()._cdata for t in tensors if t.layout is torch.strided and torch._C._has_storage(t)}
