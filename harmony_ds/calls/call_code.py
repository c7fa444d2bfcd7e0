"""What the code of a model's own classes reads beside its modules: attributes of classes, globals, closures."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import nn

_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")


class ClassAttributes(MutableMapping[str, Any]):
    """Attributes of one class, as a mapping that writes to the class."""

    def __init__(self, owner: type) -> None:
        self.owner = owner

    def __getitem__(self, key: str) -> Any:
        return self.owner.__dict__[key]

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self.owner, key, value)

    def __delitem__(self, key: str) -> None:
        delattr(self.owner, key)

    def __iter__(self) -> Iterator[str]:
        return (key for key in self.owner.__dict__ if not key.startswith("__"))

    def __len__(self) -> int:
        return len(self.owner.__dict__)


class Closure(MutableMapping[str, Any]):
    """The variables that one function has of the function around it."""

    def __init__(self, function: types.FunctionType) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self._cells = {name: cell for name, cell in cells if name != "__class__"}

    def __getitem__(self, key: str) -> Any:
        try:
            return self._cells[key].cell_contents
        except ValueError:  # not assigned to (yet)
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: Any) -> None:
        self._cells[key].cell_contents = value

    def __delitem__(self, key: str) -> None:
        del self._cells[key].cell_contents

    def __iter__(self) -> Iterator[str]:
        return iter([key for key in self._cells if self.get(key, self) is not self])

    def __len__(self) -> int:
        return len(self._cells)

    def cell(self, key: str) -> types.CellType:
        """What holds the variable, whoever looks at it."""
        return self._cells[key]


class Standing(dict[str, Any]):
    """One object as the value of a mapping: it stays, what it holds may change."""

    KEY = "self"

    def __init__(self, value: Any) -> None:
        super().__init__({self.KEY: value})


def identity(held: Any, key: str) -> int:
    """Of what holds `key` of a mapping that `read_by` gave."""
    if isinstance(held, Closure):
        return id(held.cell(key))
    if isinstance(held, Standing):
        return id(held[key])
    return id(held.owner if isinstance(held, ClassAttributes) else held)


def read_by(cls: type) -> tuple[tuple[Any, str, str], ...]:
    """The mappings that the code of `cls` reads, each with a key that it reads there and the name of that in messages.

    Only of classes and functions of the user's own: what is installed does not change its mind within a step.
    """
    return _read_by(cls)


@functools.lru_cache(maxsize=4096)
def _read_by(cls: Any) -> tuple[tuple[Any, str, str], ...]:
    found: list[tuple[Any, str, str]] = []
    seen: set[int] = set()
    for owner in cls.__mro__:
        if owner is nn.Module or not _is_own(owner.__module__):
            continue
        attributes = ClassAttributes(owner)
        found += [(attributes, key, f"{owner.__name__}.{key}") for key in attributes]
        for member in owner.__dict__.values():
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if isinstance(function, types.FunctionType):
                found += _read_by_function(function, seen)
    return tuple(found)


def read_by_callable(function: Any) -> Iterator[tuple[Any, str, str]]:
    """As `read_by`, of a hook: a function, a method and its object, an object that can be called, or a partial of such."""
    if isinstance(function, functools.partial):
        yield from read_by_callable(function.func)
        owners = [*function.args, *function.keywords.values()]
    elif isinstance(function, types.FunctionType):
        yield from _read_by_function(function, set())
        return
    else:
        owners = [getattr(function, "__self__", function)]
        yield from read_by(type(owners[0]))
    for owner in owners:
        if not isinstance(owner, nn.Module):
            yield Standing(owner), Standing.KEY, f"the {type(owner).__name__} of a hook"


def _read_by_function(function: types.FunctionType, seen: set[int]) -> list[tuple[Any, str, str]]:
    if id(function) in seen or not _is_own(function.__module__):
        return []
    seen.add(id(function))
    closure, variables = Closure(function), function.__globals__
    found: list[tuple[Any, str, str]] = [(closure, key, f"{function.__qualname__}'s {key}") for key in closure]
    found += [
        (variables, key, f"{function.__module__}.{key}") for key in _globals_of(function.__code__) if key in variables
    ]
    for called in [held.get(key) for held, key, _ in found]:
        if isinstance(called, types.FunctionType):
            found += _read_by_function(called, seen)
    return found


def _globals_of(code: types.CodeType) -> list[str]:
    names = [step.argval for step in dis.get_instructions(code) if step.opname in _GLOBAL]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _globals_of(constant)
    return list(dict.fromkeys(names))


@functools.cache
def _is_own(module: str) -> bool:
    """Whether a module is a program of the user's, not installed."""
    root = module.partition(".")[0]
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    installed = "site-packages" in file or "dist-packages" in file
    return root not in sys.stdlib_module_names | {"torch", "harmony_ds", "builtins"} - {"__main__"} and not installed
