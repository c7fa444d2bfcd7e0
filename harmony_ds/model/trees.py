"""Nested arguments and results to flat lists of leaves and back, in fresh containers.

Torch's pytree nodes (lists, tuples, dictionaries, transformers' ModelOutputs) are opened as torch opens them, other
containers by their items, data objects by their attributes. A container that occurs twice becomes two.
"""

from __future__ import annotations

import copyreg
import enum
import functools
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES

from harmony_ds.errors import UnsupportedError

TreeStructure = list["Branch"]
"""The structure of trees: the branches among their leaves."""
Branch = tuple[int, int, Callable[[Any, Any], Any], Any, TreeStructure]
"""The first of its leaves, and how many; a function that makes a value of its children and a context; the context; the
structure of the children.
"""


class _Kind(NamedTuple):
    """Functions that open values of a kind into children and a context, and make them of both."""

    open: Callable[[Any], tuple[Iterable[Any], Any]]
    make: Callable[[Any, Any], Any]


def _make_items(children: Any, cls: Any) -> Any:
    return getattr(cls, "_make", cls)(children)


def _make_dict(children: Any, known: Any) -> Any:
    cls, keys = known
    made = cls.__new__(cls)
    for key, child in zip(keys, children, strict=True):
        made[key] = child
    return made


def _open_object(value: Any) -> tuple[Iterable[Any], Any]:
    held = getattr(value, "__dict__", {})
    slots = [name for name in _slots_of(type(value)) if hasattr(value, name)]
    return [*held.values(), *(getattr(value, name) for name in slots)], (type(value), list(held), slots)


def _make_object(children: Any, known: Any) -> Any:
    cls, names, slots = known
    made = cls.__new__(cls)
    if names:
        made.__dict__.update(zip(names, children, strict=False))
    for name, child in zip(slots, children[len(names) :], strict=True):
        object.__setattr__(made, name, child)
    return made


_slots_of: Any = copyreg._slotnames  # type: ignore[attr-defined]
_ITEMS = _Kind(lambda value: (value, type(value)), _make_items)
_DICT = _Kind(lambda value: (value.values(), (type(value), list(value))), _make_dict)
_PROXY = _Kind(
    lambda value: (value.values(), list(value)),
    lambda children, keys: types.MappingProxyType(dict(zip(keys, children, strict=True))),
)
_OBJECT = _Kind(_open_object, _make_object)
_LEAF_TYPES = (Tensor, nn.Module, type, enum.Enum, types.ModuleType, torch.Size, BaseException)
_OPENED_MODULES = ("types", "collections", "argparse")
"""Modules of the standard library whose objects are data; others (loggers, locks, paths) are leaves."""
LIBRARIES = ("transformers", "diffusers", "peft", "timm", "accelerate", "trl")


@functools.cache
def _kind_of(cls: type) -> _Kind | None:
    """Return how values of `cls` are opened; None: they are leaves."""
    if issubclass(cls, _LEAF_TYPES):
        return None
    if cls in SUPPORTED_NODES:
        return _Kind(SUPPORTED_NODES[cls].flatten_fn, SUPPORTED_NODES[cls].unflatten_fn)
    if issubclass(cls, (tuple, list, set, frozenset)):
        return _ITEMS
    if issubclass(cls, dict):
        return _DICT
    if cls is types.MappingProxyType:
        return _PROXY
    return _OBJECT if _is_data(cls) else None


def _is_data(cls: type) -> bool:
    """Return whether objects of `cls` consist of attributes alone, and are no library's settings, which are only read."""
    new: Any = cls.__new__
    made_plainly = new in (object.__new__, types.SimpleNamespace.__new__) and not hasattr(cls, "__del__")
    module = cls.__module__.partition(".")[0]
    tool = module in sys.stdlib_module_names and module not in _OPENED_MODULES
    settings = cls.__name__.endswith("Config") and module in LIBRARIES
    return made_plainly and not tool and not settings and bool(cls.__dictoffset__ or _slots_of(cls))


def flatten(tree: Any) -> tuple[list[Any], TreeStructure]:
    return flatten_all((tree,))


def flatten_all(trees: Iterable[Any]) -> tuple[list[Any], TreeStructure]:
    """Return all leaves of `trees` and their structure; raise UnsupportedError if a tree contains itself."""
    try:
        return _opened(trees)
    except RecursionError:
        raise UnsupportedError(
            "an argument or a result of the model, or of one of its layers, contains itself (an attribute that leads back "
            "to its owner), so that its tensors cannot be listed. Hand over its parts."
        ) from None


def _opened(values: Iterable[Any]) -> tuple[list[Any], TreeStructure]:
    leaves: list[Any] = []
    branches: TreeStructure = []
    for value in values:
        kind = _kind_of(type(value))  # type: ignore[arg-type]
        if kind is None:
            leaves.append(value)
        else:
            children, known = kind.open(value)
            own, shape = _opened(children)
            branches.append((len(leaves), len(own), kind.make, known, shape))
            leaves += own
    return leaves, branches


def unflatten(leaves: Sequence[Any], shape: TreeStructure) -> Any:
    return unflatten_all(leaves, shape)[0]


def unflatten_all(leaves: Sequence[Any], shape: TreeStructure) -> list[Any]:
    """Return the trees of `shape`, made of as many other leaves, in fresh containers."""
    values = list(leaves)
    for first, count, make, known, children in reversed(shape):
        own = slice(first, first + count)
        values[own] = [make(unflatten_all(values[own], children), known)]
    return values


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    leaves, shape = flatten(tree)
    return unflatten([function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], shape)


def tensors_in(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):  # as most layers' outputs are
        return [tree]
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]
