"""Where a model keeps what its forward pass reads, found by one walk, and whether anything there has changed.

- values: attributes of modules, of the objects that they hold, what lists, sets and dictionaries in them hold, what
  their code, hooks and functions among all that read beside (globals, closures, attributes of classes), and torch's
  switches. They can be put in place again.
- checked: modules, hooks, buffers, and what forward itself changes. They can only be compared.
- versions of buffers and other tensors, which change with every step. They can only be compared.

Parameters look after themselves (see `harmony_ds.parameters`).
"""

from __future__ import annotations

import threading
import types
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

from torch import Tensor, nn

from harmony_ds.calls.buffers import changes_buffers_unseen
from harmony_ds.calls.call_code import is_function, read_by, read_by_callable
from harmony_ds.calls.module_places import HOOKS, OF_ALL
from harmony_ds.calls.places import ABSENT, SCALARS, Items, Place, Setting, Standing, read_all
from harmony_ds.calls.switches import SWITCHES
from harmony_ds.offload.host_store import ungated

_FOREIGN = frozenset({"torch", "numpy", "harmony_ds", "builtins", "collections", "threading", "logging", "functools"})
_CODE = (type, types.ModuleType, types.BuiltinFunctionType)
_MODULE = frozenset(nn.Module().__dict__) - {"training"}
_DEPTH = 4  # config.text_config.rope_parameters["theta"]
_LARGEST = 256  # items of a container that is looked into: datasets and vocabularies are not
_HELD = {"_modules": "a module", "_buffers": "a buffer"}
_SWITCHES = tuple(Setting(functions, name, name) for name, functions in SWITCHES.items())


Flag = tuple[str, bool]
"""A switch by its name, or a factor, and whether it is on: not zero."""


@dataclass(slots=True, eq=False)
class Found:
    """What one walk found. The lists behind `parameters` are for the comparison that every call makes."""

    values: dict[Place, Any] = field(default_factory=dict)
    checked: dict[Place, Any] = field(default_factory=dict)  # named by what is said when it differs
    modes: bytes = b""
    flags: set[Flag] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)  # of modules, by the names that flags have
    writes_unseen: bool = False  # to buffers
    backward_hook: str | None = None  # one of a module, or of all modules, and whose it is
    of_threads: list[tuple[str, threading.local]] = field(default_factory=list)  # other threads see others in them
    tensors: list[tuple[Tensor, str]] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    read: list[tuple[Callable[[Any], tuple[Any, ...]], Any]] = field(default_factory=list)  # mappings, by some keys
    iterated: list[Any] = field(default_factory=list)  # containers, by what iterating over them gives
    sized: list[Any] = field(default_factory=list)  # whatever may grow
    apart: list[Place] = field(default_factory=list)  # places that are no items of dictionaries
    equal: list[Place] = field(default_factory=list)  # scalars that forward changes, and switches
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
        return [*chain.from_iterable(chain(read, self.iterated)), *read_all(self.apart)]

    def _equals(self) -> list[Any]:
        with ungated():
            trained = map(attrgetter("requires_grad"), self.parameters)
            return [*map(len, self.sized), *read_all(self.equal), *trained]


class Walk:
    """Looks at everything that `model` and its modules hold."""

    def __init__(self, model: nn.Module, advanced: Iterable[Place], functions: Iterable[Any] = ()) -> None:
        """`advanced`: what forward itself changes; `functions`: what is called beside the model's own code."""
        self._model = model
        self._advanced = frozenset(advanced)
        self._functions = functions
        self._found = Found()
        self._seen: set[int] = set()
        self._training: list[bool] = []
        self._hooks: list[int] = []
        self._read: dict[int, tuple[Any, list[str]]] = {}

    def run(self) -> Found:
        found = self._found
        for switch in _SWITCHES:
            if self._value(switch, switch.read()):
                found.equal.append(switch)
        self._hooks_in(vars(nn.modules.module), OF_ALL, "all modules")
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
        self._hooks_in(held, "", name)
        for key, what in _HELD.items():
            inside = held[key]
            values = dict.values(inside)  # goes on showing what is there
            found.checked[Place(held, key, f"{what} of {name} was added, removed or replaced")] = tuple(values)
            found.sized.append(values)
            if values:
                found.iterated.append(values)
        found.tensors += [(b, f"the buffer {name}.{k}") for k, b in dict.items(held["_buffers"]) if b is not None]
        found.parameters += [p for p in dict.values(held["_parameters"]) if p is not None]
        found.writes_unseen |= changes_buffers_unseen(module)
        self._entries(held, _MODULE, lambda key: f"{name}.{key}", 0)

    def _hooks_in(self, held: dict[str, Any], prefix: str, owner: str) -> None:
        for kind, what in HOOKS.items():
            key = prefix + kind
            hooks = held[key]
            self._found.checked[Place(held, key, f"{what} of {owner} was registered or removed")] = tuple(hooks)
            self._found.sized.append(hooks)
            if hooks:
                self._hooks += hooks
                self._found.iterated.append(hooks)
                for hook in hooks.values():
                    self._function(hook)
                if "backward" in kind:
                    self._found.backward_hook = f"{what} of {owner}"

    def _entries(self, held: dict[Any, Any], without: frozenset[str], name: Callable[[Any], str], depth: int) -> None:
        _, keys = self._read.setdefault(id(held), (held, []))
        for key, value in list(held.items()):
            if key not in without:
                place = Place(held, key, name(key))
                if self._value(place, value):
                    keys.append(key)
                    if not depth:
                        self._found.attributes.add(place.name)
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

    def _code(self, reads: Iterable[Place]) -> None:
        for place in reads:
            if isinstance(place, Standing):
                self._inside(place.name, place.held, 0)
            elif place not in self._found.values and self._value(place, value := place.read()):
                self._found.apart.append(place)
                self._inside(place.name, value, 0)

    def _value(self, place: Place, value: Any) -> bool:
        """Notes a value; False if there is none, or if forward changes it, so that it is nobody's own."""
        if value is ABSENT:
            return False
        if place.held is self._model.__dict__ and place.key == "forward":
            return True  # a call reaches the one that stood there; it may take itself away
        if place in self._advanced:
            if isinstance(value, SCALARS):
                self._found.equal.append(place)
                changed = replace(place, name=f"{place.name}, which forward itself changes, was set")
                self._found.checked[changed] = value
            return False
        self._found.values[place] = value
        if isinstance(value, (bool, float)):
            self._found.flags.add((place.name, bool(value)))
        return True

    def _inside(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, (*SCALARS, *_CODE, nn.Parameter)):
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
            if isinstance(value, threading.local):
                self._found.of_threads.append((name, value))
            self._class(type(value))
            self._entries(value.__dict__, frozenset(), lambda key: f"{name}.{key}", depth)

    def _container(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, dict):
            self._entries(value, frozenset(), lambda key: f"{name}[{key!r}]", depth)
        elif self._value(Items(value, None, name), tuple(value)):
            self._found.sized.append(value)
            self._found.iterated.append(value)
            for number, item in enumerate(value):
                self._inside(f"{name}[{number}]", item, depth)
