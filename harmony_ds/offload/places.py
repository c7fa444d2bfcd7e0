"""Tensors one behind another in a flat buffer, each aligned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harmony_ds.decomposer.graph import slab_bytes


@dataclass(frozen=True, slots=True)
class Place:
    """Elements `start` to `end` of a buffer: a tensor of `shape`, and what aligns the next one."""

    start: int
    end: int
    shape: torch.Size

    def view(self, buffer: Tensor) -> Tensor:
        """The tensor at this place of `buffer`."""
        return buffer[self.start : self.start + self.shape.numel()].view(self.shape)


def places_of(tensors: Mapping[str, Tensor], itemsize: int) -> tuple[dict[str, Place], int]:
    """Where `tensors` lie in a buffer whose elements have `itemsize` bytes, and how many elements it has."""
    places: dict[str, Place] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + slab_bytes(tensor.numel(), itemsize) // itemsize
        places[name] = Place(start, end, tensor.shape)
    return places, end
