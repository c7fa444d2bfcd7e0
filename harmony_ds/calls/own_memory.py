"""Results that lie in a layer's parameters, whose memory is another layer's next: they are taken apart from it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from harmony_ds.offload.residency import Leaves


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
    """Which memory a tensor lies in; None for what has none of its own (a phantom, a sparse tensor)."""
    has_any = tensor.layout is torch.strided and torch._C._has_storage(tensor)
    own: int | None = tensor.untyped_storage()._cdata if has_any else None
    return own


def memory_of(tensors: Iterable[Tensor]) -> set[int]:
    return {t.untyped_storage()._cdata for t in tensors if t.layout is torch.strided and torch._C._has_storage(t)}


def may_overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors in one memory may have an element in common; False for slices of one that have none."""
    if a.dtype != b.dtype:
        return True
    if a.numel() == 0 or b.numel() == 0:
        return False
    first, second = (a, b) if a.storage_offset() <= b.storage_offset() else (b, a)
    sizes = _sizes_by_stride(first), _sizes_by_stride(second)
    if sizes[0] is None or sizes[1] is None:
        return True
    # Where what lies within a stride stays below it, an element has one place: a digit for each stride.
    shift = int(second.storage_offset()) - int(first.storage_offset())
    digits = []
    for stride in sorted(sizes[0].keys() | sizes[1].keys(), reverse=True):
        digit, shift = divmod(shift, stride)
        digits.append((stride, digit))
    inside, disjoint = shift, shift > 0
    for stride, digit in reversed(digits):
        if inside >= stride:
            return True
        ahead, behind = sizes[0].get(stride, 1), sizes[1].get(stride, 1)
        disjoint = disjoint or digit >= ahead
        inside += (max(ahead, digit + behind) - 1) * stride
    return not disjoint


def _sizes_by_stride(tensor: Tensor) -> dict[int, int] | None:
    """None where two dimensions have one stride."""
    sizes = [(stride, n) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and stride]
    found = dict(sizes)
    return found if len(found) == len(sizes) else None


class ParameterMemory:
    """Where a layer's parameters lie on the device."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def of(self, copies: Leaves) -> set[int]:
        """Of those of the layer's parameters that are among `copies`."""
        found: set[int] | None = copies.made.get(self)
        if found is None:
            found = copies.made[self] = memory_of(copies[name] for name in self._names if name in copies)
        return found
