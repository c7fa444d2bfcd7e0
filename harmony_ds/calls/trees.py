"""Nested arguments and results to flat lists of leaves and back: containers, torch's pytrees, and plain objects.

What can be changed in place (lists, dictionaries, sets, objects with attributes) is opened once however often it is met,
so that aliases stay aliases and cycles end. `unflatten` makes fresh ones and says which, so that what somebody writes
into them can be found (`changed`) and done to the originals (`Contents.give_back`).
"""

from __future__ import annotations

import collections
import copyreg
import enum
import functools
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES


class _Opener:
    """How values of one kind are opened, and made again: those that cannot be changed in place at once (`make`), others
    `empty`, to be filled.
    """

    mutable = True

    def open(self, value: Any) -> tuple[Any, list[Any]]:
        """What is to be known beside the children, and those."""
        raise NotImplementedError

    def make(self, cls: Any, known: Any, children: list[Any]) -> Any:
        raise NotImplementedError

    def empty(self, cls: Any, known: Any) -> Any:
        return cls.__new__(cls)

    def fill(self, target: Any, known: Any, children: list[Any]) -> None:
        """Puts `children` into `target`, and nothing else."""
        raise NotImplementedError


class _Tuple(_Opener):
    mutable = False

    def open(self, value: Any) -> tuple[Any, list[Any]]:
        return None, list(value)

    def make(self, cls: Any, known: Any, children: list[Any]) -> Any:
        return getattr(cls, "_make", cls)(children)


class _Registered(_Opener):
    """torch's pytrees have a function for either way."""

    mutable = False

    def open(self, value: Any) -> tuple[Any, list[Any]]:
        children, known = SUPPORTED_NODES[type(value)].flatten_fn(value)
        return known, list(children)

    def make(self, cls: Any, known: Any, children: list[Any]) -> Any:
        return SUPPORTED_NODES[cls].unflatten_fn(children, known)


class _List(_Opener):
    """And sets, and deques (`known` is a deque's greatest length)."""

    def open(self, value: Any) -> tuple[Any, list[Any]]:
        return getattr(value, "maxlen", None), list(value)

    def empty(self, cls: Any, known: Any) -> Any:
        return collections.deque(maxlen=known) if cls is collections.deque else cls.__new__(cls)

    def fill(self, target: Any, known: Any, children: list[Any]) -> None:
        target.clear()
        (target.update if isinstance(target, set) else target.extend)(children)


class _Dict(_Opener):
    def open(self, value: Any) -> tuple[Any, list[Any]]:
        return (list(value), getattr(value, "default_factory", None)), list(value.values())

    def empty(self, cls: Any, known: Any) -> Any:
        made = cls.__new__(cls)
        if isinstance(made, collections.defaultdict):
            made.default_factory = known[1]
        return made

    def fill(self, target: Any, known: Any, children: list[Any]) -> None:
        target.clear()
        if type(target) is dict:
            target.update(zip(known[0], children, strict=True))
            return
        for key, child in zip(known[0], children, strict=True):
            target[key] = child


class _Object(_Opener):
    """Attributes, in the object's dictionary or in slots."""

    def open(self, value: Any) -> tuple[Any, list[Any]]:
        held = getattr(value, "__dict__", {})
        slots = [name for name in copyreg._slotnames(type(value)) if hasattr(value, name)]  # type: ignore[attr-defined]
        return (list(held), slots), [*held.values(), *(getattr(value, name) for name in slots)]

    def fill(self, target: Any, known: Any, children: list[Any]) -> None:
        names, slots = known
        if hasattr(target, "__dict__"):
            target.__dict__.clear()
            target.__dict__.update(zip(names, children, strict=False))
        for name, child in zip(slots, children[len(names) :], strict=True):
            object.__setattr__(target, name, child)


_TUPLE, _REGISTERED, _LIST, _DICT, _OBJECT = _Tuple(), _Registered(), _List(), _Dict(), _Object()
_LEAF_TYPES = (Tensor, nn.Module, type, enum.Enum, types.ModuleType, torch.Size, BaseException)
_OPENED_MODULES = ("types", "collections", "argparse")
"""Of the standard library: other objects of its (loggers, locks, paths) are tools, not data."""

_LIBRARIES = ("transformers", "diffusers", "peft", "timm")


@functools.cache
def _opener_of(cls: type) -> _Opener | None:
    """None: values of `cls` are leaves."""
    if issubclass(cls, _LEAF_TYPES):
        return None
    if cls not in (list, dict, tuple, collections.OrderedDict, collections.defaultdict, collections.deque) and (
        cls in SUPPORTED_NODES
    ):
        return _REGISTERED
    for base, opener in ((tuple, _TUPLE), (frozenset, _TUPLE), (dict, _DICT)):
        if issubclass(cls, base):
            return opener
    if issubclass(cls, (list, set, collections.deque)):
        return _LIST
    return _OBJECT if _is_data(cls) else None


def _is_data(cls: type) -> bool:
    """Whether objects of `cls` are made of attributes alone, and are no library's settings: those are read, not written."""
    new: Any = cls.__new__
    made_plainly = new in (object.__new__, types.SimpleNamespace.__new__) and not hasattr(cls, "__del__")
    module = cls.__module__.partition(".")[0]
    tool = module in sys.stdlib_module_names and module not in _OPENED_MODULES
    settings = cls.__name__.endswith("Config") and module in _LIBRARIES
    return made_plainly and not tool and not settings and bool(cls.__dictoffset__ or copyreg._slotnames(cls))  # type: ignore[attr-defined]


@dataclass(slots=True, eq=False)
class Branch:
    """A value that was opened.

    Attributes:
        original: the value; None once it has been forgotten.
        children: per child None (a leaf) or what it was opened as; `Same` for one that is not opened.
    """

    opener: _Opener
    cls: type
    known: Any
    original: Any
    children: list[Branch | Same | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Same:
    """Stands for a container that is to come back as it is."""

    value: Any


@dataclass(slots=True, eq=False)
class Shape:
    """How to put the leaves of trees together again; `mutable` are the branches that can be changed in place."""

    roots: list[Branch | Same | None]
    mutable: list[Branch]

    @property
    def is_fixed(self) -> bool:
        """Whether the trees that were opened are tuples alone: nobody can put anything else into them."""
        return all(map(_is_fixed, self.roots))

    def alone(self) -> dict[int, int]:
        """Trees that are nothing but a leaf, by the place of that leaf. For shapes that are fixed."""
        found, place = {}, 0
        for root, branch in enumerate(self.roots):
            if branch is None:
                found[place] = root
            place += _leaves_of(branch)
        return found

    def forget_originals(self) -> None:
        """Lets go of what was opened: others will change it, and it would keep what they put there."""
        for branch in self.mutable:
            branch.original = None


def _is_fixed(branch: Branch | Same | None) -> bool:
    if branch is None:
        return True
    if isinstance(branch, Same) or branch.opener is not _TUPLE or branch.cls.__dictoffset__:
        return False
    return all(map(_is_fixed, branch.children))


def _leaves_of(branch: Branch | Same | None) -> int:
    if branch is None:
        return 1
    return 0 if isinstance(branch, Same) else sum(map(_leaves_of, branch.children))


@dataclass(slots=True, eq=False)  # not frozen: a dozen are made in each layer call, and that takes thrice as long
class Contents:
    """A container that was opened as `branch`, or made of it, and what it held at one time."""

    branch: Branch
    value: Any
    known: Any
    children: list[Any]

    @staticmethod
    def of(branch: Branch, value: Any) -> Contents:
        """What `value` holds now."""
        return Contents(branch, value, *branch.opener.open(value))

    def has_changed(self) -> bool:
        """Whether the container holds something else now."""
        known, children = self.branch.opener.open(self.value)
        if known != self.known or len(children) != len(self.children):
            return True
        return any(a is not b for a, b in zip(children, self.children, strict=True))

    def give_back(self, children: list[Any]) -> None:
        """The original holds what this container held, with `children` in the place of its own."""
        self.branch.opener.fill(self.branch.original, self.known, children)


def flatten(tree: Any, same: Mapping[int, Any] | None = None) -> tuple[list[Any], Shape]:
    """As `flatten_all` of one tree."""
    return flatten_all((tree,), same)


def flatten_all(trees: Iterable[Any], same: Mapping[int, Any] | None = None) -> tuple[list[Any], Shape]:
    """All leaves of `trees`, tensors inside objects included.

    Args:
        same: by id, containers that are not opened, and what comes back in their place.
    """
    leaves = list(trees)
    if not any(map(_opener_of, map(type, leaves))):  # as most results are
        return leaves, Shape([None] * len(leaves), [])
    opening = _Opening(same or {})
    roots = opening.visit_all(leaves)
    return opening.leaves, Shape(roots, opening.mutable)


class _Opening:
    """A walk through a tree. (A function within a function that calls itself would be a cycle, which keeps tensors.)"""

    __slots__ = ("known", "leaves", "mutable", "same")

    def __init__(self, same: Mapping[int, Any]) -> None:
        self.same = same
        self.leaves: list[Any] = []
        self.mutable: list[Branch] = []
        self.known: dict[int, Branch] = {}

    def visit_all(self, values: Iterable[Any]) -> list[Branch | Same | None]:
        found: list[Branch | Same | None] = []
        for value in values:
            opener = _opener_of(type(value))  # type: ignore[arg-type]
            if opener is None:  # as most are: no call for each
                self.leaves.append(value)
                found.append(None)
            else:
                found.append(self._visit(value, opener))
        return found

    def _visit(self, value: Any, opener: _Opener) -> Branch | Same:
        if id(value) in self.same:
            return Same(self.same[id(value)])
        if id(value) in self.known:
            return self.known[id(value)]
        about, children = opener.open(value)
        # What cannot be written into is made anew, and not kept: it holds tensors.
        branch = Branch(opener, type(value), about, value if opener.mutable else None)
        if opener.mutable:
            self.known[id(value)] = branch
            self.mutable.append(branch)
        branch.children = self.visit_all(children)
        return branch


def unflatten(leaves: Sequence[Any], shape: Shape, made: list[Contents] | None = None) -> Any:
    """As `unflatten_all`, of one tree."""
    return unflatten_all(leaves, shape, made)[0]


def unflatten_all(leaves: Sequence[Any], shape: Shape, made: list[Contents] | None = None) -> list[Any]:
    """The trees of `shape` over other leaves, in fresh containers, which are added to `made`; IndexError: too few."""
    if not any(shape.roots) and len(leaves) >= len(shape.roots):
        return list(leaves[: len(shape.roots)])
    try:
        return _Making(leaves, made).build_all(shape.roots)
    except StopIteration:
        raise IndexError(f"{len(leaves)} leaves are too few for this shape") from None


class _Making:
    __slots__ = ("built", "leaves", "made")

    def __init__(self, leaves: Sequence[Any], made: list[Contents] | None) -> None:
        self.leaves = iter(leaves)
        self.made = made
        self.built: dict[int, Any] = {}

    def build_all(self, branches: Iterable[Branch | Same | None]) -> list[Any]:
        leaves = self.leaves  # as most are: no call for each
        return [next(leaves) if branch is None else self._build(branch) for branch in branches]

    def _build(self, branch: Branch | Same) -> Any:
        if isinstance(branch, Same):
            return branch.value
        if id(branch) in self.built:
            return self.built[id(branch)]
        if not branch.opener.mutable:
            return branch.opener.make(branch.cls, branch.known, self.build_all(branch.children))
        value = self.built[id(branch)] = branch.opener.empty(branch.cls, branch.known)
        branch.opener.fill(value, branch.known, self.build_all(branch.children))
        if self.made is not None:
            self.made.append(Contents.of(branch, value))
        return value


def changed(made: Iterable[Contents]) -> list[Contents]:
    """Those of the containers that hold something else now, as they are now."""
    return [Contents.of(one.branch, one.value) for one in made if one.has_changed()]


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """`tree` with `function` applied to every tensor."""
    leaves, shape = flatten(tree)
    return unflatten([function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], shape)


def tensors_in(tree: Any) -> list[Tensor]:
    """Every tensor of `tree`."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]
