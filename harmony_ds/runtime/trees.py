"""Nested arguments and results to flat lists of leaves and back: torch's pytrees, and dataclasses they do not know."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


@dataclass(frozen=True, slots=True)
class Shape:
    """How to put leaves together again. `nested` has an entry per pytree leaf: None, or a dataclass that was opened."""

    spec: TreeSpec
    nested: tuple[tuple[Any, int, Shape] | None, ...]


def flatten(tree: Any) -> tuple[list[Any], Shape]:
    """All leaves of `tree`, tensors inside unregistered dataclasses included."""
    leaves, spec = tree_flatten(tree)
    flat: list[Any] = []
    nested: list[tuple[Any, int, Shape] | None] = []
    for leaf in leaves:
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            inner, shape = flatten([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
            flat += inner
            nested.append((leaf, len(inner), shape))
        else:
            flat.append(leaf)
            nested.append(None)
    return flat, Shape(spec, tuple(nested))


def unflatten(leaves: Sequence[Any], shape: Shape) -> Any:
    """The tree of `shape` over other leaves. Dataclasses are copied, their fields replaced."""
    values: list[Any] = []
    place = 0
    for opened in shape.nested:
        if opened is None:
            values.append(leaves[place])
            place += 1
            continue
        original, count, inner = opened
        clone = copy.copy(original)
        fields = unflatten(leaves[place : place + count], inner)
        for field, value in zip(dataclasses.fields(original), fields, strict=True):
            object.__setattr__(clone, field.name, value)
        values.append(clone)
        place += count
    return tree_unflatten(values, shape.spec)


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """`tree` with `function` applied to every tensor."""
    leaves, shape = flatten(tree)
    return unflatten([function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], shape)


def tensors_in(tree: Any) -> list[Tensor]:
    """Every tensor of `tree`."""
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]
