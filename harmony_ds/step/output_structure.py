"""Structure of what a model returns: nested containers, and what their leaves are.

`describe` makes it from outputs that have been computed; a call of the same form is expected to return the same.
"""

from __future__ import annotations

import copyreg
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from harmony_ds.errors import BatchError

PathStep = tuple[str, Any]
"""An "attribute" and its name, or an "item" and its key."""
Path = tuple[PathStep, ...]
"""Way from outputs to a part of them."""

_CONSTANTS = (type(None), str, Enum, torch.dtype, torch.device)
"""Values that do not depend on data: calls of the same form return the same ones."""


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A tensor. `requires_grad`: gradients come to it."""

    path: Path
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Constant:
    """A value that each call of the form returns: None, or a name."""

    path: Path
    value: Any


@dataclass(frozen=True, slots=True)
class Opaque:
    """An object of which the class is known alone: a key-value cache."""

    path: Path
    cls: Any


@dataclass(frozen=True, slots=True)
class Unknown:
    """A part that only computed outputs show: a number, or a tensor whose shape is not known."""

    path: Path


@dataclass(frozen=True, slots=True)
class Container:
    """A sequence, a dictionary, or an object.

    Attributes:
        stored: the parts that it consists of: places of a sequence, keys of a dictionary, attributes.
        ways: all by which a part can be read: those, and others that a class adds (`outputs[0]` of a `ModelOutput`).
        complete: `stored` is all that there is.
    """

    path: Path
    cls: Any
    stored: dict[PathStep, Structure]
    ways: dict[PathStep, Structure]
    complete: bool = True


Structure = TensorLeaf | Constant | Opaque | Unknown | Container


# ---- from outputs


def describe(value: Any, path: Path = (), enclosing: tuple[Any, ...] = ()) -> Structure:
    """Return the structure of `value`, which lies at `path` of outputs, within `enclosing` containers."""
    cls = type(value)
    if isinstance(value, Tensor):
        return TensorLeaf(path, value.shape, value.dtype, value.requires_grad)
    if isinstance(value, _CONSTANTS):
        return Constant(path, value)
    if any(value is one for one in enclosing):
        return Unknown(path)
    if is_sequence(cls):
        places = {
            ("item", place): describe(one, (*path, ("item", place)), (*enclosing, value))
            for place, one in enumerate(value)
        }
        return Container(path, cls, places, places)
    if not is_plain_class(cls):
        return Unknown(path)
    if isinstance(value, Mapping) or is_dataclass(value) or not path:
        return _describe_object(value, path, enclosing)
    return Opaque(path, cls)


def _describe_object(value: Any, path: Path, enclosing: tuple[Any, ...]) -> Container:
    seen: dict[int, tuple[Any, Structure]] = {}  # the value keeps the number its own

    def describe_once(part: Any, step: PathStep) -> Structure:
        """Describe `part`; a tensor that is an attribute and an item is one leaf."""
        if isinstance(part, _CONSTANTS):
            return Constant((*path, step), part)
        if id(part) not in seen:
            seen[id(part)] = part, describe(part, (*path, step), (*enclosing, value))
        return seen[id(part)][1]

    stored: dict[PathStep, Structure] = {}
    for name in attribute_names(value):
        stored["attribute", name] = describe_once(getattr(value, name), ("attribute", name))
    if isinstance(value, dict):
        for key, one in dict.items(value):
            stored["item", key] = describe_once(one, ("item", key))
    ways = dict(stored)
    for step in _other_ways(value, stored):
        try:
            part = read_step(value, step)
        except (TypeError, LookupError, AttributeError):
            continue
        if id(part) in seen or isinstance(part, Tensor):
            ways[step] = describe_once(part, step)
    return Container(path, type(value), stored, ways)


def _other_ways(value: Any, stored: Mapping[PathStep, Structure]) -> list[PathStep]:
    """Return ways that a class may add to those by which its parts are stored."""
    if type(value) is dict:
        return []
    keys = [key for key in value if isinstance(key, (str, int))] if isinstance(value, Mapping) else []
    places = range(len(value)) if isinstance(value, Mapping) else ()
    ways: list[PathStep] = [("item", key) for key in (*keys, *places)]
    ways += [("attribute", key) for key in (*keys, "loss") if isinstance(key, str)]
    return [step for step in ways if step not in stored]


def attribute_names(value: Any) -> list[str]:
    """Return the names of the attributes that `value` stores."""
    slots = [name for name in copyreg._slotnames(type(value)) if hasattr(value, name)]  # type: ignore[attr-defined]
    return [*getattr(value, "__dict__", ()), *slots]


def is_sequence(cls: Any) -> bool:
    return cls in (tuple, list) or (issubclass(cls, tuple) and hasattr(cls, "_make"))


def is_plain_class(cls: Any) -> bool:
    """Return whether a class is written in Python, so that another object can stand for one of it."""
    builtin = [one for one in cls.__mro__ if not one.__flags__ & (1 << 9)]  # Py_TPFLAGS_HEAPTYPE
    return cls is not type and all(one in (object, dict, OrderedDict) for one in builtin)


# ---- what two calls have in common


def same(one: Structure, other: Structure) -> bool:
    """Return whether outputs of one structure read like those of the other, shapes and dtypes of tensors apart."""
    if isinstance(one, Unknown) or isinstance(other, Unknown):
        return True
    if isinstance(one, TensorLeaf) and isinstance(other, TensorLeaf):
        return one.path == other.path
    if isinstance(one, Constant) and isinstance(other, Constant):
        return type(one.value) is type(other.value) and bool(one.value == other.value)
    if isinstance(one, Opaque) and isinstance(other, Opaque):
        return one.cls is other.cls
    if isinstance(one, Container) and isinstance(other, Container):
        alike = one.cls is other.cls and list(one.stored) == list(other.stored) and one.ways.keys() == other.ways.keys()
        return alike and all(same(part, other.ways[step]) for step, part in one.ways.items())
    return False


def common(one: Structure, other: Structure) -> Structure:
    """Return what outputs of both structures have in common; tensors keep the shape that they have in `one`."""
    if isinstance(one, TensorLeaf) and isinstance(other, TensorLeaf):
        return one if (one.path, one.dtype) == (other.path, other.dtype) else Unknown(one.path)
    if isinstance(one, Container) and isinstance(other, Container) and one.cls is other.cls:
        alike = list(one.stored) == list(other.stored)
        if alike or not is_sequence(one.cls):
            ways = {step: common(part, other.ways[step]) for step, part in one.ways.items() if step in other.ways}
            stored = {step: ways[step] for step in one.stored if step in ways}
            return Container(one.path, one.cls, stored, ways, one.complete and other.complete and alike)
    elif isinstance(one, (Constant, Opaque)) and same(one, other):
        return one
    return Unknown(one.path)


def leaves(structure: Structure) -> Iterator[TensorLeaf]:
    """Yield the tensors of `structure`."""
    if isinstance(structure, TensorLeaf):
        yield structure
    elif isinstance(structure, Container):
        for part in structure.ways.values():
            yield from leaves(part)


def map_leaves(function: Callable[[TensorLeaf], Structure], structure: Structure) -> Structure:
    """Return `structure` with other leaves."""
    if isinstance(structure, TensorLeaf):
        return function(structure)
    if not isinstance(structure, Container):
        return structure
    ways = {step: map_leaves(function, part) for step, part in structure.ways.items()}
    stored = {step: ways[step] for step in structure.stored}
    return Container(structure.path, structure.cls, stored, ways, structure.complete)


# ---- back to objects


def is_known(structure: Structure) -> bool:
    """Return whether a program can be given something that stands for it, before it is computed."""
    if isinstance(structure, Container) and is_sequence(structure.cls):
        return is_whole(structure)
    return not isinstance(structure, Unknown)


def is_whole(structure: Structure) -> bool:
    """Return whether an object can be made that stands for it, with all its parts."""
    if not isinstance(structure, Container):
        return isinstance(structure, (TensorLeaf, Constant))
    return structure.complete and all(is_known(part) for part in structure.stored.values())


def make(structure: Container, parts: Mapping[PathStep, Any]) -> Any:
    """Return an object of the structure's class, with `parts` in the place of those that it stores."""
    cls = structure.cls
    if is_sequence(cls):
        return getattr(cls, "_make", cls)(parts.values())
    made = cls.__new__(cls)
    put = OrderedDict.__setitem__ if issubclass(cls, OrderedDict) else dict.__setitem__
    for (way, key), part in parts.items():
        if way == "item":
            put(made, key, part)
        else:
            object.__setattr__(made, key, part)
    return made


def read_step(value: Any, step: PathStep) -> Any:
    way, key = step
    return getattr(value, key) if way == "attribute" else value[key]


def follow_path(outputs: Any, path: Path) -> Any:
    """Return the part of `outputs` at `path`.

    Raises:
        BatchError: there is none.
    """
    found = outputs
    for step in path:
        try:
            found = read_step(found, step)
        except (TypeError, LookupError, AttributeError):
            raise BatchError(
                f"the model's outputs have no {written(path)}, which calls of the same form had returned: let the model "
                "return the same each time, or its loss alone."
            ) from None
    return found


def written(path: Path) -> str:
    """Return a path as a program writes it."""
    return "outputs" + "".join(f".{key}" if way == "attribute" else f"[{key!r}]" for way, key in path)


def summary(structure: Structure) -> str:
    """Return the parts of a structure in words."""
    if not isinstance(structure, Container):
        return repr(structure.value) if isinstance(structure, Constant) else _kind_of(structure)
    named = {key: part for (_, key), part in structure.stored.items()}
    return ", ".join(f"{key}{_kind_of(part)}" for key, part in named.items()) or "nothing"


def _kind_of(structure: Structure) -> str:
    if isinstance(structure, Constant):
        return f" ({structure.value!r})"
    if isinstance(structure, Container):
        return f" ({structure.cls.__name__} of {len(structure.stored)})"
    return ""
