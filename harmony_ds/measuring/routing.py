"""Layers whose tensors have as many rows as the data says: mixtures of experts, selections by a mask.

What one micro-batch took says little about the next one's, which may send every token to the same expert. Such a layer
is known by the operators that it dispatches, and measured with inputs that all take one way as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from harmony_ds.device.live_bytes import EagerDispatchMode


class RoutingWatch(EagerDispatchMode):
    """Observer of operators whose output shape depends on data (nonzero, masked_select, unique, ...)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen = self.seen or torch.Tag.dynamic_output_shape in getattr(func, "tags", ())
        return func(*args, **(kwargs or {}))


def extremes(inputs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Return `inputs` as they make routing most uneven: rows all alike, and all but the last one alike.

    A router decides row by row, so rows that are alike go one way, as many as there are. The odd one keeps a second
    way in use.
    """
    for but_last in (False, True):
        yield [_alike(tensor, but_last) for tensor in inputs]


def _alike(tensor: Tensor, but_last: bool) -> Tensor:
    if tensor.dim() < 2 or tensor.numel() == 0:
        return tensor
    if tensor.dtype is torch.bool:
        return torch.ones_like(tensor)
    if not tensor.is_floating_point():
        return tensor
    first, last = (0,) * (tensor.dim() - 1), (-1,) * (tensor.dim() - 1)
    rows = torch.empty_like(tensor).copy_(tensor[first].expand_as(tensor))
    if but_last:
        rows[last] = tensor[last]
    return rows
