"""Tensors of operations on late devices: references, operands, and which of them are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.simdevice import DEVICE


class TensorRef:
    """Weak reference to a tensor, which does not keep its memory alive."""

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.key = storage._cdata
        self._storage = StorageWeakRef(storage)
        self._place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._dtype = tensor.dtype

    def tensor(self) -> Tensor | None:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return (
            None
            if storage is None
            else torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._place)
        )


def operands(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """Yield the tensors that an operation uses, and whether it writes them."""
    collective = func.namespace == "c10d"  # whose schemas do not say what they write
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        for tensor in tensors_in(value):
            yield tensor, collective or (argument.alias_info is not None and argument.alias_info.is_write)


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if (
            value.device.type in ("cpu", DEVICE)
            and value.layout is torch.strided
            and type(value).__name__ != "PhantomParameter"
        ):
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def move_in_one_piece(a: Tensor, b: Tensor) -> bool:
    """Return whether a copy of one to the other is that of one run of bytes."""
    strides = [(x, y) for x, y, size in zip(a.stride(), b.stride(), a.shape, strict=True) if size > 1]
    return all(x == y for x, y in strides) and bool(torch.ops.aten.is_non_overlapping_and_dense(a))


def poisoned(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        tensor.detach().fill_(float("nan"))
    return tensor


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
