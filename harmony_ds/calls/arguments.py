"""The arguments of layer calls, and what layers hand over beside their results.

Tensors are taken out of a call's arguments, so that the call can be made again over others. Beside returning results,
layers write into tensors, and into dictionaries and lists that they are given (Gemma 3n's keys and values, which later
layers read), and transformers' layers hand tensors (router logits, attentions) to a collector.
"""

from __future__ import annotations

import enum
import functools
import sys
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from harmony_ds.calls.caches import extract_caches
from harmony_ds.calls.intercept import Request
from harmony_ds.calls.trees import Shape, flatten_all, unflatten_all

PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, slice, torch.dtype, torch.device, torch.layout)

Collector = dict[str, Any]
"""Of transformers: lists by what is wanted, and settings."""


@dataclass(slots=True, eq=False)
class Arguments:
    """What a layer call takes, with its tensors taken out."""

    leaves: list[Any]
    shape: Shape  # of positional arguments, then of keyword arguments
    positional: int  # how many
    keywords: tuple[str, ...]
    places: list[list[int]]  # per distinct tensor: the leaves that it stands in
    caches: dict[int, Any]  # arguments that the layer may fill, and that are emptied again
    containers: list[int]  # arguments that the layer may write into for later layers
    collects: bool  # whether the layer may hand anything to a collector

    def rebuild(self, tensors: list[Tensor]) -> list[Any]:
        """Positional arguments, then keyword arguments, over `tensors` in fresh containers."""
        leaves = list(self.leaves)
        for tensor, places in zip(tensors, self.places, strict=True):
            for place in places:
                leaves[place] = tensor
        values = unflatten_all(leaves, self.shape)
        if self.caches:
            for place, cache in self.caches.items():
                values[place] = cache
        return values

    @property
    def may_be_sliced(self) -> bool:
        """Whether there is nothing among them that a layer could write into without its being seen."""
        return all(map(_is_plain, self.leaves))


def _is_plain(leaf: object) -> bool:
    """Whether `leaf`, which is no tensor, cannot be changed by who is given it."""
    return leaf is None or isinstance(leaf, PLAIN) or callable(leaf)


@dataclass(slots=True, eq=False)
class CallOutputs:
    """What a run of a layer left.

    Attributes:
        inputs: the tensors that it ran over.
        leaves: of its result, and of what it has left elsewhere.
        written: the arguments, by place, that are containers and hold something else since.
        altered: the places among `inputs` of those that the layer has changed in place, so that they lead back into it.
    """

    inputs: list[Tensor]
    leaves: list[Any]
    shape: Shape
    written: list[int]
    altered: list[int]

    @property
    def tensors(self) -> list[Tensor]:
        """The output leaves that are tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]


@dataclass(slots=True, eq=False)
class CallInputs:
    """What one call was given by the model.

    Attributes:
        tensors: those among its arguments, each once.
        values: positional arguments, then keyword arguments.
        collector: of the caller; None or empty: nothing is collected.
    """

    arguments: Arguments
    tensors: list[Tensor]
    values: list[Any]
    collector: Collector | None

    @staticmethod
    def of(request: Request) -> CallInputs:
        """What `request` gives."""
        values, caches = extract_caches(request)
        opened = [None if place in caches else value for place, value in enumerate(values)] if caches else values
        leaves, shape = flatten_all(opened)
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
        containers = [place for place, branch in enumerate(shape) if branch and _is_container(values[place].__class__)]
        keywords, collector = tuple(request.kwargs), _collector(request)
        taken = (leaves, shape, len(request.args), keywords, list(places.values()), caches, containers, bool(collector))
        return CallInputs(Arguments(*taken), tensors, values, collector)

    def deliver(self, outcome: CallOutputs, leaves: list[Any]) -> Any:
        """The result, made of the output leaves; what the layer has left elsewhere goes where it put it."""
        result, *beside = unflatten_all(leaves, outcome.shape)
        if not beside:
            return result
        collected, contents, views = beside
        for place, view in zip(outcome.altered, views, strict=True):
            # Its memory holds that already: now its graph does, too. For who has saved it, nothing has changed.
            with _unsafe_preserve_version_counter(self.tensors[place]):
                self.tensors[place].copy_(view)
        for key, kept in collected.items():
            assert self.collector is not None
            self.collector[key].extend(kept)
        for place, content in zip(outcome.written, contents, strict=True):
            held = _held(self.values[place])
            held.clear()
            (held.extend if isinstance(held, list) else held.update)(content)
        return result


# ---- containers that layers write into


@functools.cache
def _is_container(cls: type) -> bool:
    return issubclass(cls, (dict, list, UserDict))


def _held(container: Any) -> Any:
    return container.data if isinstance(container, UserDict) else container


def contents(container: Any) -> tuple[list[Any], list[Any]]:
    """The keys (of a dictionary) and values that `container` holds now."""
    held = _held(container)
    return ([], list(held)) if isinstance(held, list) else (list(held), list(held.values()))


def change_contents(container: Any, change: Callable[[Any], Any]) -> bool:
    """Puts what `change` makes of each thing that `container` holds in its place. False: it is no container."""
    if not _is_container(container.__class__):
        return False
    held = _held(container)
    for key in range(len(held)) if isinstance(held, list) else list(held):
        held[key] = change(held[key])
    return True


def has_changed(container: Any, before: tuple[list[Any], list[Any]]) -> bool:
    """Whether it held something else when `contents` gave `before`."""
    keys, values = contents(container)
    return keys != before[0] or len(values) != len(before[1]) or not all(map(is_, values, before[1]))


# ---- transformers' output collector: layers hand tensors (router logits, attentions) past their return value


def _variable() -> Any:
    # Never imported for its own sake: a model that uses it has imported it.
    capturing = sys.modules.get("transformers.utils.output_capturing")
    variable = getattr(capturing, "_active_collector", None)
    return getattr(variable, "context_var", variable)


def collector_here() -> Collector:
    """The one that the current context's calls hand to; empty: none."""
    variable = _variable()
    return {} if variable is None else variable.get(None) or {}


def _collector(request: Request) -> Collector | None:
    variable = _variable()
    return None if variable is None else request.context.get(variable)


def collect(request: Request) -> dict[str, list[Any]]:
    """Lists into which a run of `request`, which collects, puts what it collects: the call's context is its own."""
    collector = _collector(request) or {}
    collected: dict[str, list[Any]] = {key: [] for key, value in collector.items() if isinstance(value, list)}
    request.context.run(_variable().set, {**collector, **collected})
    return collected
