"""Parts of a tensor along its rows, one for each of several micro-batches, which know the whole that they are of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor

_PART = "_harmony_part"


@dataclass(frozen=True, slots=True)
class _Part:
    """Place of a tensor in `whole`; `version`: of the tensor when it was made; `all`: the parts, not kept alive."""

    whole: Tensor
    number: int
    count: int
    dim: int
    version: int
    all: Sequence[ref[Tensor]]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # copies and pickles of a part are parts of nothing


def parts_of(whole: Tensor, dim: int, count: int) -> list[Tensor]:
    """Split `whole` into `count` equal parts along `dim`."""
    parts = list(whole.split(whole.shape[dim] // count, dim))
    _note(parts, whole, dim)
    return parts


def whole_of(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Join `parts` along `dim`: without a copy if they are parts of one tensor, or were joined before, and unchanged."""
    known = [_part(part) for part in parts]
    whole = None if known[0] is None or (known[0].count, known[0].dim) != (len(parts), dim) else known[0].whole
    in_order = all(one is not None and one.whole is whole and one.number == n for n, one in enumerate(known))
    if whole is None or not in_order:
        whole = torch.cat(list(parts), dim)
        _note(parts, whole, dim)
    return whole


def _note(parts: Sequence[Tensor], whole: Tensor, dim: int) -> None:
    refs = [ref(part) for part in parts]
    for number, part in enumerate(parts):
        setattr(part, _PART, _Part(whole, number, len(parts), dim, part._version, refs))


def parts_moved(tensor: Tensor, move: Callable[[Tensor], Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the whole's parts that are alive, if `tensor` is one, each with its counterpart in what `move` makes of the
    whole; nothing if it is no part.
    """
    part = _part(tensor)
    if part is None:
        return []
    made = parts_of(move(part.whole), part.dim, part.count)
    return [(own, other) for one, other in zip(part.all, made, strict=True) if (own := one()) is not None]


def _part(tensor: Tensor) -> _Part | None:
    part: _Part | None = getattr(tensor, _PART, None)
    # Through a hook the gradient has to pass the part itself.
    watched = tensor._backward_hooks or tensor.retains_grad
    return part if part is not None and part.version == tensor._version and not watched else None
