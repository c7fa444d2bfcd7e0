"""What the code of a model's own classes reads beside its modules: attributes of classes, globals, closures, and
attributes of the modules and classes that those are.

Names are looked for in the code, not followed through it: `settings.Cfg.scale` is every attribute of `settings` that the
function names anywhere (`Cfg`, `scale`), and of what is found there. That may be too much, which does no harm.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from harmony_ds.calls.places import ABSENT, SCALARS, Cell, ClassAttribute, Place, Places, Standing

_PLAIN = (*SCALARS, list, dict, set, tuple)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")
_LIBRARIES = frozenset(
    "accelerate builtins deepspeed diffusers harmony_ds numpy peft timm torch transformers trl".split()
)


def read_by(cls: type) -> Places:
    """What the code of `cls` reads.

    Only of classes and functions of the user's own: what is installed does not change its mind within a step.
    """
    return _reader_of(cls).read()


def is_function(value: Any) -> bool:
    """Whether `value` is a function, a method, or what stands for one."""
    return isinstance(value, _FUNCTIONS) or "__wrapped__" in getattr(value, "__dict__", ())


def read_by_callable(function: Any) -> Iterator[Place]:
    """As `read_by`, of a function, a method and its object, an object that can be called, or a partial of such."""
    owners = []
    if isinstance(function, functools.partial):
        yield from read_by_callable(function.func)
        owners = [*function.args, *function.keywords.values()]
    elif isinstance(function, types.FunctionType):
        yield from _Reader(function).read()
    elif "__wrapped__" in getattr(function, "__dict__", ()):
        yield from read_by_callable(function.__wrapped__)
    elif not isinstance(function, (type, types.BuiltinFunctionType)):
        owners = [getattr(function, "__self__", function)]
        yield from read_by(type(owners[0]))
        if isinstance(function, types.MethodType):
            yield from read_by_callable(function.__func__)
    for owner in owners:
        if not isinstance(owner, nn.Module):
            yield Standing(owner, "self", f"the {type(owner).__name__} of {_name(function)}")


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


@functools.lru_cache(maxsize=4096)
def _reader_of(cls: type) -> _Reader:
    return _Reader(cls)


class _Reader:
    """Goes through the code of one function or class, and whatever code of the user's own that leads to.

    What is found stays the same as long as the functions, classes and modules on the way do.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._found: dict[Place, None] = {}
        self._way: list[tuple[Place, Any]] = []
        self._names: dict[int, frozenset[str]] = {}  # of a class, module or function that was gone through: for which
        self._ahead: list[Callable[[], None]] = []  # not a recursion: code that is large would be too deep for one
        self._begun = False

    def read(self) -> Places:
        """Everything that is read."""
        if not self._begun or any(place.read() is not value for place, value in self._way):
            self._begun = True
            self._found.clear()
            self._way.clear()
            self._names.clear()
            if isinstance(self._root, type):
                for owner in self._root.__mro__:
                    self._class(owner, frozenset(owner.__dict__))
            else:
                self._function(self._root)
            while self._ahead:
                self._ahead.pop()()
        return tuple(self._found)

    def _note(self, place: Place, names: frozenset[str]) -> None:
        value = place.read()
        self._found[place] = None
        if not isinstance(value, _PLAIN):
            self._way.append((place, value))
            self._ahead.append(functools.partial(self._value, value, names))

    def _news(self, owner: Any, names: frozenset[str]) -> frozenset[str] | None:
        """`names` and those that have led to `owner` before, or None if they all have."""
        known = self._names.get(id(owner))
        if known is not None and names <= known:
            return None
        self._names[id(owner)] = names | (known or frozenset())
        return self._names[id(owner)]

    def _value(self, value: Any, names: frozenset[str]) -> None:
        """What code that has got hold of `value`, and names `names`, reads of it."""
        if isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.ModuleType):
            self._module(value, names)
        else:
            for owner in (value if isinstance(value, type) else type(value)).__mro__:
                self._class(owner, names)

    def _function(self, function: types.FunctionType) -> None:
        if not _is_own(function.__module__) or self._news(function, frozenset()) is None:
            return
        used = _used_by(function.__code__)
        variables = function.__globals__
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            place = Cell(cell, key, f"{function.__qualname__}'s {key}")
            if key != "__class__" and place.read() is not ABSENT:
                self._note(place, used.names)
        for key in used.variables:
            if key in variables:
                self._note(Place(variables, key, f"{function.__module__}.{key}"), used.names)
        for name in used.imports:
            package = variables.get("__package__")
            for module in (sys.modules.get(name), sys.modules.get(f"{package}.{name}"), sys.modules.get(package or "")):
                if module is not None:
                    self._ahead.append(functools.partial(self._module, module, used.names))

    def _class(self, owner: type, names: frozenset[str]) -> None:
        if owner is nn.Module or not _is_own(owner.__module__):
            return
        news = self._news(owner, names)
        if news is None:
            return
        for key in list(owner.__dict__):
            if key in news and not key.startswith("__"):
                self._note(ClassAttribute(owner, key, f"{owner.__name__}.{key}"), news)
        for member in owner.__dict__.values():
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if isinstance(function, types.FunctionType):
                self._function(function)
                if _is_own(function.__module__):
                    self._ahead.append(functools.partial(self._class, owner, _used_by(function.__code__).names))

    def _module(self, module: types.ModuleType, names: frozenset[str]) -> None:
        if module is os and "getenv" in names:
            names |= {"environ"}
        news = self._news(module, names)
        if news is None:
            return
        held, own = vars(module), _is_own(module.__name__)
        for key in news.intersection(held):
            value = held[key]
            if isinstance(value, types.ModuleType):
                self._ahead.append(functools.partial(self._module, value, news))
            # Of what is installed: functions, which somebody may patch, and the environment.
            elif own or callable(value) or value is os.environ:
                self._note(Place(held, key, f"{module.__name__}.{key}"), news)


@dataclass(slots=True)
class _Used:
    """Names that a function and those inside it use: global variables, modules that they import, and any whatsoever."""

    variables: list[str] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)
    names: frozenset[str] = frozenset()


@functools.lru_cache(maxsize=4096)
def _used_by(code: types.CodeType) -> _Used:
    used = _Used(names=frozenset(code.co_names))
    for step in dis.get_instructions(code):
        if step.opname in _GLOBAL:
            used.variables.append(step.argval)
        elif step.opname == "IMPORT_NAME":
            used.imports.append(step.argval)
    for inner in map(_used_by, (c for c in code.co_consts if isinstance(c, types.CodeType))):
        used.variables += inner.variables
        used.imports += inner.imports
        used.names |= inner.names
    used.variables = list(dict.fromkeys(used.variables))
    return used


@functools.cache
def _is_own(module: str | None) -> bool:
    """Whether a module is a program of the user's, not installed.

    What is installed lies in `site-packages`, or beside its metadata (`pip install --target`); a library's checkout
    (`pip install -e`) lies anywhere, and is known by its name.
    """
    if module is None:
        return False
    root = module.partition(".")[0]
    if root == "__main__":
        return True
    return root not in sys.stdlib_module_names | _LIBRARIES and not _is_installed(root, module)


@functools.cache
def _is_installed(root: str, module: str) -> bool:
    file = getattr(sys.modules.get(root), "__file__", None) or getattr(sys.modules.get(module), "__file__", None) or ""
    if "site-packages" in file or "dist-packages" in file:
        return True
    folder = Path(file).parent.parent
    return bool(file) and any(folder.glob(f"{root}-*.dist-info"))
