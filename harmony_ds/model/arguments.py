"""A layer call's arguments and results, taken apart into tensors and everything else.

A call can so be repeated with other tensors. Besides returning results, layers write into tensors and containers that they
are given (Gemma 3n's keys and values, which later layers read), and transformers' layers append tensors (router logits,
attentions) to a collector.
"""

from __future__ import annotations

import enum
import functools
import sys
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import is_
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from harmony_ds.model.caches import extract_caches
from harmony_ds.model.intercept import Request
from harmony_ds.model.own_settings import is_switch, refill
from harmony_ds.model.trees import TreeStructure, flatten_all, unflatten_all
from harmony_ds.scheduler.rows import CallKind

PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, slice, torch.dtype, torch.device, torch.layout)

Collector = dict[str, Any]
"""Transformers' output collector: a list for each wanted output, and settings."""


@dataclass(slots=True, eq=False)
class Arguments:
    """The arguments of a layer call, with gaps where their tensors were: `rebuild` puts other tensors there."""

    leaves: list[Any]
    shape: TreeStructure  # of positional arguments, then of keyword arguments
    positional: int  # how many
    keywords: tuple[str, ...]
    places: list[list[int]]  # per distinct tensor: the leaves that it stands for
    caches: dict[int, Any]  # arguments that the layer may fill, and that are emptied again
    containers: list[int]  # arguments that the layer may write into for later layers
    collected: dict[str, int]  # what the layer may append to a collector: by key, how many are there before

    def rebuild(self, tensors: list[Tensor]) -> list[Any]:
        """Return positional, then keyword arguments, made of `tensors` in fresh containers."""
        leaves = list(self.leaves)
        for tensor, places in zip(tensors, self.places, strict=True):
            for place in places:
                leaves[place] = tensor
        values = unflatten_all(leaves, self.shape)
        for place in self.caches:
            values[place] = self.caches[place]
        return values

    def request_with(self, request: Request, tensors: list[Tensor]) -> Request:
        """Return `request`, which these are the arguments of, with other `tensors`."""
        values = self.rebuild(tensors)
        kwargs = dict(zip(self.keywords, values[self.positional :], strict=True))
        return replace(request, args=tuple(values[: self.positional]), kwargs=kwargs, raised=[])

    @property
    def kind(self) -> CallKind:
        """The first place of each tensor among the leaves, and the leaves that are flags, words or zero."""
        # Most are None: a tensor's place.
        switches = [(place, leaf) for place, leaf in enumerate(self.leaves) if leaf is not None and is_switch(leaf)]
        return tuple([places[0] for places in self.places]), tuple(switches)

    @property
    def may_be_sliced(self) -> bool:
        """Whether they hold no object that a layer could write into unnoticed."""
        return all(map(_is_plain, self.leaves))


def _is_plain(leaf: object) -> bool:
    """Return whether `leaf`, which is no tensor, is immutable."""
    return leaf is None or isinstance(leaf, PLAIN) or callable(leaf)


@dataclass(slots=True, eq=False)
class CallOutputs:
    """Results of one run of a layer.

    Attributes:
        inputs: the tensors that it was run with.
        leaves: of its result, of collected tensors and of containers that it has written into.
        written: indices of arguments that are containers and have changed.
        altered: indices of `inputs` that the layer has changed in place, so that their graph leads into it.
        wrote_inputs: whether the run has written into any of `inputs`, with a graph or without.
    """

    inputs: list[Tensor]
    leaves: list[Any]
    shape: TreeStructure
    written: list[int]
    altered: list[int]
    wrote_inputs: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]


@dataclass(slots=True, eq=False)
class LayerInputs:
    """Inputs of one call, as the model gave them.

    Attributes:
        tensors: those among the arguments, each once.
        values: positional arguments, then keyword arguments.
        collector: the caller's; None or empty: nothing is collected.
    """

    arguments: Arguments
    tensors: list[Tensor]
    values: list[Any]
    collector: Collector | None

    @staticmethod
    def from_request(request: Request) -> LayerInputs:
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
        containers = [place for place, value in enumerate(values) if _is_container(value.__class__)]
        collector = _collector(request)
        arguments = Arguments(
            leaves,
            shape,
            positional=len(request.args),
            keywords=tuple(request.kwargs),
            places=list(places.values()),
            caches=caches,
            containers=containers,
            collected={key: len(value) for key, value in (collector or {}).items() if isinstance(value, list)},
        )
        return LayerInputs(arguments, tensors, values, collector)

    def deliver(self, results: CallOutputs, leaves: list[Any]) -> Any:
        """Return the result, made of the output `leaves`; write collected tensors and containers where they belong."""
        result, *beside = unflatten_all(leaves, results.shape)
        if not beside:
            return result
        collected, contents, views = beside
        for place, view in zip(results.altered, views, strict=True):
            # Its memory holds the values already; now its graph does, too. For graphs that saved it nothing changes.
            with _unsafe_preserve_version_counter(self.tensors[place]):
                self.tensors[place].copy_(view)
        for key, kept in collected.items():
            assert self.collector is not None
            self.collector[key].extend(kept)
        for place, content in zip(results.written, contents, strict=True):
            refill(_held(self.values[place]), content)
        return result


@functools.cache
def _is_container(cls: type) -> bool:
    return issubclass(cls, (dict, list, UserDict))


def _held(container: Any) -> Any:
    return container.data if isinstance(container, UserDict) else container


def contents(container: Any) -> tuple[list[Any], list[Any]]:
    """Return the keys (of a dictionary) and values that `container` holds now."""
    held = _held(container)
    return ([], list(held)) if isinstance(held, list) else (list(held), list(held.values()))


def change_contents(container: Any, change: Callable[[Any], Any]) -> bool:
    """Replace each value of `container` by `change(value)`; return False if it is no container."""
    if not _is_container(container.__class__):
        return False
    held = _held(container)
    for key in range(len(held)) if isinstance(held, list) else list(held):
        held[key] = change(held[key])
    return True


def has_changed(container: Any, before: tuple[list[Any], list[Any]]) -> bool:
    """Return whether `container` has changed since `contents` returned `before`."""
    keys, values = contents(container)
    return keys != before[0] or len(values) != len(before[1]) or not all(map(is_, values, before[1]))


def collector_variable() -> Any:
    """Return the context variable that holds the collector; None: transformers has not been imported."""
    # Not imported here: a model that uses it has imported it.
    capturing = sys.modules.get("transformers.utils.output_capturing")
    return None if capturing is None else _variable_in(capturing)


@functools.cache
def _variable_in(capturing: ModuleType) -> Any:
    variable = getattr(capturing, "_active_collector", None)
    return getattr(variable, "context_var", variable)


def collector_here() -> Collector:
    """Return the collector of the current context; empty: there is none."""
    variable = collector_variable()
    return {} if variable is None else variable.get(None) or {}


def _collector(request: Request) -> Collector | None:
    variable = collector_variable()
    return None if variable is None else request.context.get(variable)


def collect(request: Request, before: Mapping[str, int]) -> dict[str, list[Any]]:
    """Return the lists that a run of `request` appends collected tensors to: its context gets a collector of its own.

    They begin with as many None as were there `before`: hooks decide by the number what they append.
    """
    collected: dict[str, list[Any]] = {key: [None] * count for key, count in before.items()}
    request.context.run(collector_variable().set, {**(_collector(request) or {}), **collected})
    return collected
