"""The arguments of layer calls, and what layers hand over beside their results.

Tensors are taken out of a call's arguments, so that the call can be made again over others. Layers may also write into
mappings that they are given, and transformers' layers hand tensors (router logits, attentions) to a collector.
"""

from __future__ import annotations

import collections.abc
import copy
import enum
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harmony_ds.runtime.intercept import Request
from harmony_ds.runtime.trees import Shape, flatten, unflatten

_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, slice, torch.dtype, torch.device, torch.layout)
_CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past", "cache_params")


@dataclass(slots=True, eq=False)
class Arguments:
    """Arguments of a layer call with their tensors taken out, and mappings that the layer may write into."""

    leaves: list[Any]
    shape: Shape
    places: list[list[int]]  # per distinct tensor: the leaves that it stands in
    mappings: list[tuple[int, dict[Any, Any]]]  # leaf, content before the call
    inside: list[Any]  # the leaves of those contents; places count on from `leaves`
    inside_shape: Shape

    def empty_mappings(self) -> None:
        """Lets go of what others will write into the mappings: the call is run again with what was in them before."""
        for place, _ in self.mappings:
            shell = copy.copy(self.leaves[place])
            shell.clear()
            self.leaves[place] = shell

    def filled(self, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
        """Positional and keyword arguments over `tensors`; mappings are copies, returned last."""
        leaves = [*self.leaves, *self.inside]
        for tensor, places in zip(tensors, self.places, strict=True):
            for place in places:
                leaves[place] = tensor
        inside = leaves[len(self.leaves) :]
        del leaves[len(self.leaves) :]
        copies: list[Any] = []
        for (place, _), content in zip(self.mappings, unflatten(inside, self.inside_shape), strict=True):
            clone = copy.copy(leaves[place])
            clone.clear()
            clone.update(content)
            leaves[place] = clone
            copies.append(clone)
        args, kwargs = unflatten(leaves, self.shape)
        return args, kwargs, copies


def is_plain(leaf: object) -> bool:
    """Whether `leaf`, which is no tensor, cannot be changed by who is given it."""
    return leaf is None or isinstance(leaf, _PLAIN) or callable(leaf)


def take_tensors(request: Request) -> tuple[Arguments, list[Tensor]]:
    """The arguments of a call without their tensors, and those, each once."""
    leaves, shape = flatten((request.args, request.kwargs))
    mappings = [
        (place, dict(leaf)) for place, leaf in enumerate(leaves) if isinstance(leaf, collections.abc.MutableMapping)
    ]
    inside, inside_shape = flatten([content for _, content in mappings])
    places: dict[int, list[int]] = {}
    tensors: dict[int, Tensor] = {}
    for place, leaf in enumerate([*leaves, *inside]):
        if isinstance(leaf, Tensor):
            tensors[id(leaf)] = leaf
            places.setdefault(id(leaf), []).append(place)
    kept = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in inside]
    arguments = Arguments(kept, shape, list(places.values()), mappings, rest, inside_shape)
    return arguments, list(tensors.values())


def without_cache(request: Request) -> Request:
    """In training there is no cache to fill, and a recomputation would fill it twice (as transformers' own
    gradient checkpointing does).
    """
    kwargs = dict(request.kwargs)
    for key in _CACHE_ARGUMENTS:
        if kwargs.get(key) is not None:
            kwargs[key] = None
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    args = tuple(None if type(a).__name__.endswith("Cache") else a for a in request.args)
    return Request(request.layer, request.forward, args, kwargs, request.context, request.grad, request.autocast)


# ---- transformers' output collector: layers hand tensors (router logits, attentions) past their return value


def _collector_variable() -> Any:
    # Never imported for its own sake: a model that uses it has imported it.
    capturing = sys.modules.get("transformers.utils.output_capturing")
    variable = getattr(capturing, "_active_collector", None)
    return getattr(variable, "context_var", variable)


@contextmanager
def collecting(request: Request) -> Iterator[dict[str, list[Any]]]:
    """While open, what the layer collects goes into the yielded lists instead of the caller's."""
    variable = _collector_variable()
    outer = request.context.run(variable.get) if variable is not None else None
    if outer is None:
        yield {}
        return
    inner: dict[str, Any] = {key: [] if isinstance(value, list) else value for key, value in outer.items()}
    token = request.context.run(variable.set, inner)
    collected: dict[str, list[Any]] = {}
    try:
        yield collected
    finally:
        request.context.run(variable.reset, token)
        collected.update({key: value for key, value in inner.items() if isinstance(value, list) and value})


def give_back(
    request: Request, arguments: Arguments, collected: dict[str, list[Any]], writes: list[dict[Any, Any]]
) -> None:
    """Lets the caller see what the layer collected and wrote, with cut tensors."""
    if collected:
        outer = request.context.run(_collector_variable().get)
        for key, values in collected.items():
            outer[key].extend(values)
    for (place, _), written in zip(arguments.mappings, writes, strict=True):
        arguments.leaves[place].update(written)


def forget_collected(request: Request) -> None:
    """Leaves nothing in the call's context that later layers collect: a recorded call would keep it, graphs included."""
    variable = _collector_variable()
    outer = request.context.run(variable.get) if variable is not None else None
    if outer is not None:
        request.context.run(variable.set, {k: [] if isinstance(v, list) else v for k, v in outer.items()})


def writes_of(before: dict[Any, Any], after: Any) -> dict[Any, Any]:
    """What a layer put into a mapping that it was given."""
    return {
        key: value
        for key, value in dict(after).items()
        if key not in before
        or any(a is not b for a, b in zip(flatten(value)[0], flatten(before[key])[0], strict=False))
    }
