"""Where a model keeps what its forward pass reads, found by one walk, and whether anything there has changed.

- values: attributes of modules, of the objects that they hold, what lists, sets and dictionaries in them hold, what
  their code, hooks and functions among all that read beside (globals, closures, attributes of classes), and torch's
  switches. They can be put in place again.
- checked: modules, hooks, buffers, and what forward itself changes. They can only be compared.
- versions of buffers and other tensors, which change with every step. They can only be compared.

Parameters look after themselves (see `harmony_ds.parameters`).
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

from torch import Tensor, nn

from harmony_ds.calls.call_code import ClassAttributes, Read, Standing, identity, is_function, read_by, read_by_callable
from harmony_ds.calls.switches import Switches, switch_values
from harmony_ds.offload.host_store import ungated

Key = tuple[int, Any]
"""The id of a container (an object's attributes are one), and a key in it; None: all of it."""
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_FOREIGN = frozenset({"torch", "numpy", "harmony_ds", "builtins", "collections", "threading", "logging", "functools"})
_CODE = (type, types.ModuleType, types.BuiltinFunctionType)
_MODULE = frozenset(nn.Module().__dict__) - {"training"}
_DEPTH = 4  # config.text_config.rope_parameters["theta"]
_LARGEST = 256  # items of a container that is looked into: datasets and vocabularies are not
_HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_backward_hooks": "a backward hook",
}
_GLOBAL_HOOKS = {key.replace("_", "_global_", 1): what for key, what in _HOOKS.items()}
_OF_ALL_MODULES = vars(nn.modules.module)
_HELD = {"_modules": "a module", "_buffers": "a buffer"}
_SWITCHES = Switches()


@dataclass(frozen=True, slots=True)
class Place:
    """A container and a key in it (None: all of it), and how messages call that."""

    held: Any
    key: Any
    name: str

    def read(self, missing: object) -> Any:
        """What is there now."""
        return tuple(self.held) if self.key is None else self.held.get(self.key, missing)

    def put(self, value: Any, missing: object) -> None:
        """Puts `value` there; `missing`: nothing."""
        if self.key is None:
            self._refill(() if value is missing else value)
        elif value is missing:
            self.held.pop(self.key, None)
        else:
            self.held[self.key] = value

    def _refill(self, values: Iterable[Any]) -> None:
        values = list(values)
        self.held.clear()
        getattr(self.held, "update" if isinstance(self.held, set) else "extend")(values)


@dataclass(frozen=True, slots=True)
class Checked:
    """What can only be compared, and what is said when it differs."""

    value: Any
    changed: str


def same(one: Any, other: Any) -> bool:
    """Whether two values are one object, equal scalars of one type, or tuples of such."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, _SCALARS) and bool(one == other)


@dataclass(slots=True, eq=False)
class Found:
    """What one walk found. The lists behind `checked` are for the comparison that every call makes."""

    values: dict[Key, Any] = field(default_factory=dict)
    places: dict[Key, Place] = field(default_factory=dict)
    checked: dict[Key, Checked] = field(default_factory=dict)
    modes: bytes = b""
    statistics: list[nn.Module] = field(default_factory=list)  # modules that may write to buffers without a sign
    tensors: list[tuple[Tensor, str]] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    read: list[tuple[Callable[[Any], tuple[Any, ...]], Any]] = field(default_factory=list)  # mappings, by some keys
    iterated: list[Any] = field(default_factory=list)  # containers, by what iterating over them gives
    opened: list[dict[str, Any]] = field(default_factory=list)  # dictionaries, by their values
    sized: list[Any] = field(default_factory=list)  # whatever may grow
    left: list[Place] = field(default_factory=list)  # scalars that forward changes
    backward_hook: str | None = None  # one of a module, or of all modules, and whose it is
    references: list[Any] = field(default_factory=list)
    equals: list[Any] = field(default_factory=list)

    def changed(self) -> bool:
        """Whether a walk would find something else now, versions apart."""
        try:
            references, equals = self._references(), self._equals()
        except KeyError:  # an attribute is gone
            return True
        return (
            len(references) != len(self.references)
            or equals != self.equals
            or not all(map(is_, references, self.references))
        )

    def settle(self) -> Found:
        """Notes how everything is now."""
        self.references, self.equals = self._references(), self._equals()
        return self

    def versions(self) -> list[int]:
        """How often the tensors have been written to."""
        return [tensor._version for tensor, _ in self.tensors]

    def _references(self) -> list[Any]:
        read = [read(held) for read, held in self.read]
        return list(chain.from_iterable(chain(read, self.iterated, map(dict.values, self.opened))))

    def _equals(self) -> list[Any]:
        left = [place.held.get(place.key) for place in self.left]
        with ungated():
            trained = map(attrgetter("requires_grad"), self.parameters)
            return [*map(len, self.sized), *left, *trained, *switch_values()]


class Walk:
    """Looks at everything that `model` and its modules hold."""

    def __init__(self, model: nn.Module, advanced: Mapping[Key, Place], functions: Iterable[Any] = ()) -> None:
        """`advanced`: what forward itself changes; `functions`: what is called beside the model's own code."""
        self._model = model
        self._advanced = advanced
        self._functions = functions
        self._found = Found()
        self._seen: set[int] = set()
        self._training: list[bool] = []
        self._hooks: list[int] = []
        self._read: dict[int, tuple[Any, list[str]]] = {}

    def run(self) -> Found:
        found = self._found
        for name, value in _SWITCHES.items():
            self._value((id(_SWITCHES), name), Place(_SWITCHES, name, name), value)
        self._hooks_in(_OF_ALL_MODULES, _GLOBAL_HOOKS, "all modules")
        self._modules(type(self._model).__name__, self._model)
        for function in self._functions:
            self._function(function)
        # At least two keys, so that a tuple comes back.
        found.read += [(itemgetter(keys[0], *keys), held) for held, keys in self._read.values() if keys]
        with ungated():
            found.modes = bytes([*self._training, *(parameter.requires_grad for parameter in found.parameters)])
        found.modes += repr(self._hooks).encode()
        return found.settle()

    def _modules(self, prefix: str, root: nn.Module) -> None:
        for name, module in root.named_modules():
            if id(module) not in self._seen:
                self._module(f"{prefix}.{name}" if name else prefix, module)

    def _module(self, name: str, module: nn.Module) -> None:
        self._seen.add(id(module))
        self._training.append(module.training)
        self._class(type(module))
        found, held = self._found, module.__dict__
        self._hooks_in(held, _HOOKS, name)
        for key, what in _HELD.items():
            inside = held[key]
            values = tuple(dict.values(inside))
            self._checked(held, key, values, f"{what} of {name} was added, removed or replaced")
            found.sized.append(inside)
            if inside:
                found.opened.append(inside)
        found.tensors += [(b, f"the buffer {name}.{k}") for k, b in dict.items(held["_buffers"]) if b is not None]
        found.parameters += [p for p in dict.values(held["_parameters"]) if p is not None]
        if isinstance(module, nn.modules.batchnorm._NormBase):
            found.statistics.append(module)
        self._entries(held, _MODULE, lambda key: f"{name}.{key}", 0)

    def _hooks_in(self, held: dict[str, Any], kinds: Mapping[str, str], owner: str) -> None:
        for key, what in kinds.items():
            hooks = held[key]
            self._checked(held, key, tuple(hooks), f"{what} of {owner} was registered or removed")
            self._found.sized.append(hooks)
            if hooks:
                self._hooks += hooks
                self._found.iterated.append(hooks)
                for hook in hooks.values():
                    self._function(hook)
                if "backward" in key:
                    self._found.backward_hook = f"{what} of {owner}"

    def _checked(self, held: Any, key: Any, value: Any, changed: str) -> None:
        self._found.checked[id(held), key] = Checked(value, changed)

    def _entries(self, held: dict[Any, Any], without: frozenset[str], name: Callable[[Any], str], depth: int) -> None:
        _, keys = self._read.setdefault(id(held), (held, []))
        for key, value in list(held.items()):
            if key not in without:
                place = Place(held, key, name(key))
                if self._value((id(held), key), place, value):
                    keys.append(key)
                    self._inside(place.name, value, depth)
        self._found.sized.append(held)

    def _class(self, cls: type) -> None:
        if id(cls) not in self._seen:
            self._seen.add(id(cls))
            self._code(read_by(cls))

    def _function(self, function: Any) -> None:
        if id(function) not in self._seen:
            self._seen.add(id(function))
            self._code(read_by_callable(function))

    def _code(self, reads: Iterable[Read]) -> None:
        for held, key, name in reads:
            if isinstance(held, Standing):
                self._inside(name, held[key], 0)
                continue
            where, value = identity(held, key), held.get(key, self)
            if value is self or (where, key) in self._found.values:
                continue
            if self._value((where, key), Place(held, key, name), value):
                self._read.setdefault(where, (_plainly(held), []))[1].append(key)
                self._inside(name, value, 0)

    def _value(self, key: Key, place: Place, value: Any) -> bool:
        """Notes a value; False if forward changes it, so that it is nobody's own."""
        if key in self._advanced:
            if isinstance(value, _SCALARS):
                self._found.left.append(place)
                self._found.checked[key] = Checked(value, f"{place.name}, which forward itself changes, was set")
            return False
        self._found.values[key] = value
        self._found.places[key] = place
        return True

    def _inside(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, (*_SCALARS, *_CODE, nn.Parameter)):
            return
        if isinstance(value, Tensor):
            self._found.tensors.append((value, f"the tensor {name}"))
        elif isinstance(value, tuple):
            for number, item in enumerate(value[:_LARGEST]):
                self._inside(f"{name}[{number}]", item, depth)
        elif id(value) not in self._seen and depth < _DEPTH:
            self._open(name, value, depth + 1)

    def _open(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, nn.Module):
            self._modules(name, value)
        elif is_function(value):
            self._function(value)
        elif isinstance(value, (list, set, deque, dict)):
            self._seen.add(id(value))
            if len(value) <= _LARGEST:
                self._container(name, value, depth)
        elif hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in _FOREIGN:
            self._seen.add(id(value))
            self._class(type(value))
            self._entries(value.__dict__, frozenset(), lambda key: f"{name}.{key}", depth)

    def _container(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, dict):
            self._entries(value, frozenset(), lambda key: f"{name}[{key!r}]", depth)
        elif self._value((id(value), None), Place(value, None, name), tuple(value)):
            self._found.sized.append(value)
            self._found.iterated.append(value)
            for number, item in enumerate(value):
                self._inside(f"{name}[{number}]", item, depth)


def _plainly(held: Any) -> Any:
    """What holds the same as a mapping of `read_by`, and is read faster."""
    return held.owner.__dict__ if isinstance(held, ClassAttributes) else held
