"""The arguments of layer calls, and what layers hand over beside their results.

Tensors are taken out of a call's arguments, so that the call can be made again over others. Layers may also write into
lists, dictionaries and objects that they are given, and transformers'
layers hand tensors (router logits, attentions) to a collector.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harmony_ds.calls.caches import empty_caches
from harmony_ds.calls.intercept import Request
from harmony_ds.calls.trees import Contents, Shape, flatten_all, unflatten_all

_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, slice, torch.dtype, torch.device, torch.layout)


@dataclass(slots=True, eq=False)
class Arguments:
    """What a layer call takes, with its tensors taken out."""

    leaves: list[Any]
    shape: Shape  # of positional arguments, then of keyword arguments
    positional: int  # how many
    keywords: tuple[str, ...]
    places: list[list[int]]  # per distinct tensor: the leaves that it stands in
    caches: list[Any]  # those that the layer may fill, and that are emptied again
    collects: bool  # whether the layer may hand anything to a collector
    often: Often | None = None  # those of several calls

    def filled(self, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any], list[Contents]]:
        """Positional and keyword arguments over `tensors`; their containers are fresh, and returned last."""
        values = None if self.often is None else self.often.over(tensors)
        if values is not None:
            return (
                tuple(values[: self.positional]),
                dict(zip(self.keywords, values[self.positional :], strict=True)),
                [],
            )
        leaves = list(self.leaves)
        for tensor, places in zip(tensors, self.places, strict=True):
            for place in places:
                leaves[place] = tensor
        made: list[Contents] = []
        values = unflatten_all(leaves, self.shape, made)
        kwargs = dict(zip(self.keywords, values[self.positional :], strict=True))
        return tuple(values[: self.positional]), kwargs, made

    @property
    def are_fixed(self) -> bool:
        """Whether there is nothing among them that anybody could write into but tensors."""
        return not self.collects and self.shape.is_fixed

    def roots(self) -> list[int | None]:
        """Per tensor: which argument it is; None: it is a part of one, or it is several. For fixed arguments."""
        alone = self.shape.alone()
        return [alone.get(places[0]) if len(places) == 1 else None for places in self.places]

    @property
    def may_be_cut(self) -> bool:
        """Whether there is nothing among them that a layer could write into without its being seen."""
        return all(map(is_plain, self.leaves))


class Often:
    """Arguments that several calls are given, but for tensors that are an argument each."""

    __slots__ = ("_roots", "_tensors", "_values")

    def __init__(self, arguments: Arguments, tensors: Sequence[Tensor | None], roots: Sequence[int | None]) -> None:
        """`tensors`: those that are given to all, at least where there is no root."""
        self._roots = roots
        self._tensors = [None if root is not None else t for t, root in zip(tensors, roots, strict=True)]
        leaves = list(arguments.leaves)
        for tensor, places in zip(self._tensors, arguments.places, strict=True):
            for place in places:
                leaves[place] = tensor
        self._values = unflatten_all(leaves, arguments.shape)

    def over(self, tensors: list[Tensor]) -> list[Any] | None:
        """The arguments over `tensors`; None: others than these are another."""
        values = self._values.copy()
        for tensor, own, root in zip(tensors, self._tensors, self._roots, strict=True):
            if root is not None:
                values[root] = tensor
            elif tensor is not own:
                return None
        return values


def is_plain(leaf: object) -> bool:
    """Whether `leaf`, which is no tensor, cannot be changed by who is given it."""
    return leaf is None or isinstance(leaf, _PLAIN) or callable(leaf)


def take_tensors(request: Request) -> tuple[Arguments, list[Tensor]]:
    """What a call takes without its tensors, and those, each once."""
    caches = empty_caches(request)
    args, kwargs = request.args, request.kwargs
    leaves, shape = flatten_all((*args, *kwargs.values()), {id(cache): cache for cache in caches})
    places: dict[int, list[int]] = {}
    tensors: list[Tensor] = []
    for place, leaf in enumerate(leaves):
        if leaf is None or not isinstance(leaf, Tensor):
            continue
        key = id(leaf)
        if key in places:
            places[key].append(place)
        else:
            places[key] = [place]
            tensors.append(leaf)
        leaves[place] = None
    taken = Arguments(leaves, shape, len(args), tuple(kwargs), list(places.values()), caches, collects(request))
    return taken, tensors


# ---- transformers' output collector: layers hand tensors (router logits, attentions) past their return value


def _collector(request: Request) -> tuple[Any, dict[str, Any] | None]:
    """The context variable of transformers, and what it holds for the caller: lists by what is wanted; None or empty:
    nothing is collected.
    """
    # Never imported for its own sake: a model that uses it has imported it.
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if capturing is None:
        return None, None
    variable = getattr(capturing, "_active_collector", None)
    variable = getattr(variable, "context_var", variable)
    return variable, None if variable is None else request.context.get(variable)


def collects(request: Request) -> bool:
    """Whether the layer may hand anything to a collector."""
    return bool(_collector(request)[1])


def collecting(request: Request) -> AbstractContextManager[dict[str, list[Any]]]:
    """While open, what the layer collects goes into the yielded lists instead of the caller's."""
    variable, outer = _collector(request)
    return _collecting(request, variable, outer) if outer else nullcontext({})


@contextmanager
def _collecting(request: Request, variable: Any, outer: dict[str, Any]) -> Iterator[dict[str, list[Any]]]:
    inner: dict[str, Any] = {key: [] if isinstance(value, list) else value for key, value in outer.items()}
    token = request.context.run(variable.set, inner)
    collected: dict[str, list[Any]] = {}
    try:
        yield collected
    finally:
        request.context.run(variable.reset, token)
        collected.update({key: value for key, value in inner.items() if isinstance(value, list) and value})


def give_back(
    request: Request, collected: dict[str, list[Any]], written: list[Contents], values: list[list[Any]]
) -> None:
    """Lets the caller see what the layer collected, and wrote into what it was given, with cut tensors."""
    if collected:
        _, outer = _collector(request)
        assert outer is not None
        for key, kept in collected.items():
            outer[key].extend(kept)
    for into, children in zip(written, values, strict=True):
        into.give_back(children)


def forget_collected(request: Request) -> None:
    """Leaves nothing in the call's context that later layers collect: a recorded call would keep it, graphs included."""
    variable, outer = _collector(request)
    if outer is not None:
        request.context.run(variable.set, {k: [] if isinstance(v, list) else v for k, v in outer.items()})
