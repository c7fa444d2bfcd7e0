"""The layout of several tensors in one flat buffer, each at an aligned place."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harmony_ds.decomposer.graph import slab_bytes


@dataclass(frozen=True, slots=True)
class Region:
    """The place of a tensor in a buffer: elements `start` to `end`, of which the last ones may be padding."""

    start: int
    end: int
    shape: torch.Size

    def view(self, buffer: Tensor) -> Tensor:
        """Return the tensor in `buffer`."""
        # One call of torch; slicing and viewing take four times as long.
        return buffer.as_strided(self.shape, _strides(self.shape), buffer.storage_offset() + self.start)


@dataclass(frozen=True, slots=True)
class ByteRegion(Region):
    """The place of a packed tensor in a buffer: elements whose bytes it is; `shape` is [bytes]."""

    def view(self, buffer: Tensor) -> Tensor:
        """Return the bytes, uint8."""
        return buffer[self.start : self.end].view(torch.uint8)


def with_storage_of_its_own(view: Tensor) -> Tensor:
    """Return a contiguous part of a buffer over the same memory, as a storage by itself.

    `torch.save` writes the whole storage of a tensor, not the part that the tensor is of it.
    """
    if view.is_meta or view.numel() == 0:
        return view
    storage = view.untyped_storage()
    start = view.storage_offset() * view.element_size()
    part = storage[start : start + view.nbytes]  # which keeps the memory
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(part, 0, view.shape, view.stride())


@functools.cache
def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def layout_of(tensors: Mapping[str, Tensor | torch.Size], itemsize: int) -> tuple[dict[str, Region], int]:
    """Return where `tensors` lie in a buffer with elements of `itemsize` bytes, and the buffer's number of elements."""
    places: dict[str, Region] = {}
    end = 0
    for name, tensor in tensors.items():
        shape = tensor.shape if isinstance(tensor, Tensor) else tensor
        start, end = end, end + slab_bytes(shape.numel(), itemsize) // itemsize
        places[name] = Region(start, end, shape)
    return places, end


def blocks_of(elements: slice, size: int) -> Iterator[slice]:
    """Yield `elements` as blocks of `size`; the last one may be smaller."""
    for start in range(elements.start, elements.stop, size):
        yield slice(start, min(start + size, elements.stop))
