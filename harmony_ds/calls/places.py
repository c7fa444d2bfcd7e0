"""Places: somewhere a call can find or leave a value. They are read, written, compared, and put back.

A place is an item of a dictionary (so are attributes of modules and objects, and global variables), an attribute of a
class, a variable of an enclosing function, all items of a list or set, or a switch of torch's. Who looks for places is
elsewhere: `module_places` finds those that forward passes change, `call_walk` those that programs change between calls.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.calls.trees import Contents, flatten

SCALARS = (bool, int, float, complex, str, bytes, type(None))


class Absent(enum.Enum):
    """The value of a place that holds nothing."""

    ABSENT = enum.auto()


ABSENT = Absent.ABSENT


@dataclass(slots=True, eq=False)
class Place:
    """`key` in `held`, a dictionary. Places are equal if they are one key of one object, whoever found them.

    Attributes:
        name: in messages.
        module: whose attribute it is; None for whatever else.
    """

    held: Any
    key: Any
    name: str
    module: nn.Module | None = None

    def _identity(self) -> tuple[int, Any]:
        return id(self.held), self.key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def read(self) -> Any:
        """What is there now."""
        return self.held.get(self.key, ABSENT)

    def write(self, value: Any) -> None:
        """Puts `value` there; ABSENT: nothing."""
        if value is ABSENT:
            self.held.pop(self.key, None)
        else:
            self.held[self.key] = value


Places = tuple[Place, ...]


class ClassAttribute(Place):
    """`held` is a class."""

    __slots__ = ()

    def read(self) -> Any:
        return self.held.__dict__.get(self.key, ABSENT)

    def write(self, value: Any) -> None:
        if value is not ABSENT:
            setattr(self.held, self.key, value)
        elif self.key in self.held.__dict__:
            delattr(self.held, self.key)


class Cell(Place):
    """`held` is what holds a variable of an enclosing function, whichever function looks at it."""

    __slots__ = ()

    def read(self) -> Any:
        try:
            return self.held.cell_contents
        except ValueError:  # not assigned to (yet)
            return ABSENT

    def write(self, value: Any) -> None:
        if value is not ABSENT:
            self.held.cell_contents = value
        elif self.read() is not ABSENT:
            del self.held.cell_contents


class Items(Place):
    """All items of `held`, a list, set or deque, as a tuple."""

    __slots__ = ()

    def read(self) -> Any:
        return tuple(self.held)

    def write(self, value: Any) -> None:
        self.held.clear()
        (self.held.update if isinstance(self.held, set) else self.held.extend)(() if value is ABSENT else value)


class Setting(Place):
    """`held` are the functions that read and write it; it is always there."""

    __slots__ = ()

    def read(self) -> Any:
        return self.held[0]()

    def write(self, value: Any) -> None:
        self.held[1](value)


class Standing(Place):
    """`held` itself, which stays; what it holds may change."""

    __slots__ = ()

    def read(self) -> Any:
        return self.held

    def write(self, value: Any) -> None:
        """There is no other."""


def same(one: Any, other: Any) -> bool:
    """Whether two values are one object, equal scalars of one type, or tuples of such."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, SCALARS) and bool(one == other)


def read_all(places: Iterable[Place]) -> list[Any]:
    """What is in `places` now."""
    return [place.read() for place in places]


def write_all(places: Iterable[Place], values: Iterable[Any]) -> None:
    """Puts `values` into `places`."""
    for place, value in zip(places, values, strict=True):
        place.write(value)


@contextmanager
def kept(places: Sequence[Place]) -> Iterator[None]:
    """In the end, `places` hold what they hold now."""
    before = read_all(places)
    try:
        yield
    finally:
        write_all(places, before)


@contextmanager
def held(places: Sequence[Place], values: Sequence[Any]) -> Iterator[list[Any]]:
    """While open, `places` hold `values`. The list has what they held in the end."""
    left: list[Any] = []
    with kept(places):
        write_all(places, values)
        yield left
        left += read_all(places)


_patches: dict[tuple[int, str], tuple[Any, list[Callable[[Any], Any]]]] = {}
"""By owner and name: what it was on its own, and the patches that are open, the innermost first."""
_patching = threading.RLock()


@contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """While open, the attribute `name` of a class or module is what `make` makes of it.

    Of several that are open, the engines of several threads may close theirs in any order.
    """
    key = id(owner), name
    with _patching:
        own, makes = _patches.setdefault(key, (vars(owner).get(name, ABSENT), []))
        makes.append(make)
        setattr(owner, name, make(getattr(owner, name)))
    try:
        yield
    finally:
        with _patching:
            makes.remove(make)
            if not makes:
                del _patches[key]
            _unpatch(owner, name, own)
            for other in makes:
                setattr(owner, name, other(getattr(owner, name)))


def _unpatch(owner: Any, name: str, own: Any) -> None:
    if own is ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, own)


class Noted:
    """What places hold at one time, what is in the containers there included."""

    def __init__(self, places: Iterable[Place], copies: bool = False) -> None:
        """`copies`: of tensors too, so that what is changed in place can be undone."""
        self._values = {place: _NotedValue.of(place.read(), copies) for place in places}

    def __contains__(self, place: Place) -> bool:
        return place in self._values

    def changed(self) -> set[Place]:
        """The places that hold something else now."""
        return {place for place, noted in self._values.items() if noted.has_changed(place.read())}

    def has_written(self, place: Place) -> bool:
        """Whether a tensor that was in `place` has been written to since."""
        return any(t._version != version for t, version, _ in self._values[place].tensors)

    def restore(self) -> None:
        """Puts everything back: values, what containers held, and what tensors held if there are copies."""
        for place, noted in self._values.items():
            if place.read() is not noted.value:
                place.write(noted.value)
            noted.restore()


@dataclass(frozen=True, slots=True, eq=False)
class _NotedValue:
    """A value, the contents of its containers, and its tensors with their versions and copies."""

    value: Any
    contents: list[Contents]
    tensors: list[tuple[Tensor, int, Tensor | None]]

    @staticmethod
    def of(value: Any, copies: bool) -> _NotedValue:
        if isinstance(value, SCALARS):
            return _NotedValue(value, [], [])
        leaves, shape = flatten(value)
        tensors = [t for t in leaves if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)]
        return _NotedValue(
            value, shape.contents(), [(t, t._version, t.detach().clone() if copies else None) for t in tensors]
        )

    def has_changed(self, now: Any) -> bool:
        return (
            not same(now, self.value)
            or any(one.has_changed() for one in self.contents)
            or any(t._version != version for t, version, _ in self.tensors)
        )

    def restore(self) -> None:
        for one in self.contents:
            if one.has_changed():
                one.restore()
        for tensor, version, copy in self.tensors:
            if copy is not None and tensor._version != version:
                with torch.no_grad():
                    tensor.detach().copy_(copy)
