"""Where forward passes may leave what the next call finds: attributes of modules, and variables that their code names.

The code is that of the modules' classes, of hooks, and of functions among the attributes. What a value holds (lists,
objects) belongs to its place. Parameters, buffers and submodules are looked after elsewhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import nn

from harmony_ds.calls.call_code import is_function, read_by, read_by_callable
from harmony_ds.calls.places import ABSENT, SCALARS, Noted, Place, Places, patched
from harmony_ds.calls.trees import flatten, may_change

_ELSEWHERE = frozenset(
    "_parameters _buffers _modules _non_persistent_buffers_set forward _flat_weights _flat_weight_refs".split()
)
HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_backward_hooks": "a backward hook",
}
"""The attributes of a module that hold its hooks, and how messages call one."""
OF_ALL = "_global"
"""In front of those, the variables of `torch.nn.modules.module` that hold hooks of all modules."""


def places_of(modules: Iterable[nn.Module]) -> Places:
    """Every attribute of `modules`, and the variables that their code and their hooks name."""
    found = all_places(modules)
    return tuple(dict.fromkeys(place for place in found if place.module is not None or may_change(place.read())))


def all_places(modules: Iterable[nn.Module]) -> Iterator[Place]:
    """As `places_of`, with variables that hold what cannot change."""
    modules = list(modules)
    reads: list[Iterable[Place]] = [read_by(cls) for cls in dict.fromkeys(map(type, modules))]
    for module in modules:
        functions = [hook for kind in HOOKS for hook in module.__dict__[kind].values()]
        functions += filter(is_function, module.__dict__.values())
        reads += map(read_by_callable, functions)
        yield from (_attribute(module, key) for key in module.__dict__ if key not in _ELSEWHERE)
    of_all = [hook for kind in HOOKS for hook in vars(nn.modules.module)[OF_ALL + kind].values()]
    yield from chain.from_iterable(chain(reads, map(read_by_callable, of_all)))


def _attribute(module: nn.Module, key: str) -> Place:
    return Place(module.__dict__, key, key, module)


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
    if isinstance(value, SCALARS):
        return
    for leaf in flatten(value)[0]:
        known = leaf() if isinstance(leaf, weakref.ref) else leaf
        if isinstance(known, nn.Module):
            yield known


@contextmanager
def undone(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Whatever happens to attributes of `modules` while the context is open is undone in the end."""
    noted = Noted(places_of(modules), copies=True)
    try:
        yield
    finally:
        for place in places_of(modules):
            if place not in noted:
                place.write(ABSENT)
        noted.restore()


@contextmanager
def assignments() -> Iterator[set[Place]]:
    """The attributes of modules that are assigned to while the context is open, be it what they hold already."""
    seen: set[Place] = set()

    def noting(assign: Any) -> Any:
        def note(module: nn.Module, key: str, value: Any) -> None:
            assign(module, key, value)
            if key in module.__dict__ and key not in _ELSEWHERE:
                seen.add(_attribute(module, key))

        return note

    with patched(nn.Module, "__setattr__", noting):
        yield seen
