"""Attributes of modules that forward passes change: found, kept apart, and put back.

A place is a key of a module's own dictionary, or an attribute of a class or a global or enclosing variable that its code
or that of a hook or of a function among its attributes names; what its value holds (lists, objects) belongs to it.
Parameters, buffers and submodules are looked after elsewhere.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.calls.call_code import Read, identity, is_function, read_by, read_by_callable
from harmony_ds.calls.trees import Branch, flatten, may_change

_ELSEWHERE = frozenset(
    "_parameters _buffers _modules _non_persistent_buffers_set forward _flat_weights _flat_weight_refs".split()
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ATOMS = (bool, int, float, str, type(None))


class Absent(enum.Enum):
    """The value of an attribute that is not there."""

    ABSENT = enum.auto()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value is held: `key` in `held`.

    Attributes:
        where: the identity of what `held` is of.
        module: whose attribute it is; None for a variable, or an attribute of a class.
    """

    where: int
    key: str
    held: MutableMapping[str, Any] = field(compare=False, repr=False)
    module: nn.Module | None = field(compare=False, default=None)

    @staticmethod
    def attribute(module: nn.Module, key: str) -> Place:
        return Place(id(module), key, module.__dict__, module)

    def read(self) -> Any:
        return self.held.get(self.key, Absent.ABSENT)

    def write(self, value: Any) -> None:
        if value is Absent.ABSENT:
            self.held.pop(self.key, None)
        else:
            self.held[self.key] = value


Places = tuple[Place, ...]


def places_of(modules: Iterable[nn.Module]) -> Places:
    """Every attribute of `modules`, and the variables that their code and their hooks name."""
    found = all_places(modules)
    return tuple(dict.fromkeys(place for place in found if place.module is not None or may_change(place.read())))


def all_places(modules: Iterable[nn.Module]) -> Iterator[Place]:
    """As `places_of`, with variables that hold what cannot change."""
    modules = list(modules)
    reads: list[Iterable[Read]] = [read_by(cls) for cls in dict.fromkeys(map(type, modules))]
    for module in modules:
        functions = [hook for kind in _HOOKS for hook in module.__dict__[kind].values()]
        functions += filter(is_function, module.__dict__.values())
        reads += map(read_by_callable, functions)
        yield from (Place.attribute(module, key) for key in module.__dict__ if key not in _ELSEWHERE)
    of_all = [hook for kind in _HOOKS for hook in getattr(nn.modules.module, f"_global{kind}").values()]
    reads += map(read_by_callable, of_all)
    yield from (Place(identity(held, key), key, held) for held, key, _ in chain.from_iterable(reads))


def modules_in(modules: Iterable[nn.Module], among: set[nn.Module]) -> tuple[nn.Module, ...]:
    """`modules`, and those `among` others that they refer to from attributes and variables, with what is inside them."""
    found: dict[nn.Module, None] = {}
    todo = list(modules)
    while todo:
        new = dict.fromkeys(module for module in todo if module not in found)
        found |= new
        known = (one for place in all_places(new) for one in _modules_of(place.read()) if one in among)
        todo = [inner for one in dict.fromkeys(known) for inner in one.modules()]
    return tuple(found)


def _modules_of(value: Any) -> Iterator[nn.Module]:
    if isinstance(value, _ATOMS):
        return
    for leaf in flatten(value)[0]:
        known = leaf() if isinstance(leaf, weakref.ref) else leaf
        if isinstance(known, nn.Module):
            yield known


def write_all(places: Places, values: Sequence[Any]) -> None:
    for place, value in zip(places, values, strict=True):
        place.write(value)


@contextmanager
def held(places: Places, values: Sequence[Any]) -> Iterator[list[Any]]:
    """While open, `places` hold `values`. The list has what they held in the end."""
    before = [place.read() for place in places]
    left: list[Any] = []
    try:
        write_all(places, values)
        yield left
        left += [place.read() for place in places]
    finally:
        write_all(places, before)


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """What a place held: the value, the content of its containers, and its tensors with their versions and copies."""

    value: Any
    contents: list[tuple[Branch, Any, list[Any]]]
    tensors: list[tuple[Tensor, int, Tensor | None]]

    @staticmethod
    def of(value: Any, copies: bool) -> _Kept:
        if isinstance(value, _ATOMS):
            return _Kept(value, [], [])
        leaves, shape = flatten(value)
        tensors = [t for t in leaves if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)]
        return _Kept(
            value,
            [(branch, *branch.kind.open(branch.original)) for branch in shape.mutable],
            [(t, t._version, t.detach().clone() if copies else None) for t in tensors],
        )

    def has_changed(self, now: Any) -> bool:
        if now is not self.value and not (
            isinstance(now, _ATOMS) and type(now) is type(self.value) and now == self.value
        ):
            return True
        return any(map(_has_changed, self.contents)) or any(t._version != version for t, version, _ in self.tensors)

    def restore(self) -> None:
        """Containers and tensors hold again what they held."""
        for content in self.contents:
            if _has_changed(content):
                branch, known, children = content
                branch.kind.fill(branch.original, known, children)
        for tensor, version, copy in self.tensors:
            if copy is not None and tensor._version != version:
                with torch.no_grad():
                    tensor.detach().copy_(copy)


def _has_changed(content: tuple[Branch, Any, list[Any]]) -> bool:
    branch, known, children = content
    known_now, now = branch.kind.open(branch.original)
    return (
        known_now != known or len(now) != len(children) or any(a is not b for a, b in zip(now, children, strict=True))
    )


class Snapshot:
    """What places hold at one time."""

    def __init__(self, places: Places, copies: bool = False) -> None:
        """`copies`: of tensors too, so that what is changed in place can be undone."""
        self._kept = {place: _Kept.of(place.read(), copies) for place in places}

    def changed(self) -> set[Place]:
        """The places that hold something else now."""
        return {place for place, kept in self._kept.items() if kept.has_changed(place.read())}

    def value(self, place: Place) -> Any:
        return self._kept[place].value if place in self._kept else Absent.ABSENT

    def restore(self) -> None:
        for place, kept in self._kept.items():
            if place.read() is not kept.value:
                place.write(kept.value)
            kept.restore()


@contextmanager
def undone(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Whatever happens to attributes of `modules` while the context is open is undone in the end."""
    snapshot = Snapshot(places_of(modules), copies=True)
    try:
        yield
    finally:
        known = set(snapshot._kept)
        for place in places_of(modules):
            if place not in known:
                place.write(Absent.ABSENT)
        snapshot.restore()


@contextmanager
def assignments() -> Iterator[set[Place]]:
    """The attributes of modules that are assigned to while the context is open, be it what they hold already."""
    seen: set[Place] = set()
    assign = nn.Module.__setattr__

    def noting(module: nn.Module, key: str, value: Any) -> None:
        assign(module, key, value)
        if key in module.__dict__ and key not in _ELSEWHERE:
            seen.add(Place.attribute(module, key))

    nn.Module.__setattr__ = noting  # type: ignore[method-assign, assignment]
    try:
        yield seen
    finally:
        nn.Module.__setattr__ = assign  # type: ignore[method-assign]
