"""Outputs that a model returns, by the form of its call, and what stands for them until they are computed.

Tensors among pending outputs are pending themselves, as far as their shapes are known; any other use computes them.
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from harmony_ds.errors import BatchError
from harmony_ds.measuring.sample import shapes_of
from harmony_ds.runtime.micro_batch import MicroBatch
from harmony_ds.stepping.pending import Node, PendingTensor, Ticket

_MOST_WORDS = 16
"""Combinations of strings among a call's arguments that may name modes; where there are more, they are data."""
Path = tuple[Any, ...]
"""Way from outputs to a tensor: an "attribute" and its name, an "item" and its key, or "itself" and None. Where a tuple of
tensors lies (hidden states), its length and the place in it follow."""

Items = tuple[tuple[Any, bool], ...]
"""Keys of a dict, or places in a tuple or list, and whether None is there."""

Like = tuple[torch.Size, torch.dtype, bool]
"""Shape and dtype of an output, and whether gradients come to it."""


@dataclass(slots=True)
class OutputKind:
    """Outputs of calls of one form.

    Attributes:
        losses: that have this shape whatever is given.
        others: by the shapes and modes of a call.
        items: by the same.
    """

    cls: Any
    losses: dict[Path, Like] = field(default_factory=dict)
    others: dict[object, dict[Path, Like]] = field(default_factory=dict)
    items: dict[object, Items] = field(default_factory=dict)

    def learn(self, outputs: Any, form: object) -> None:
        """Learn that a call with shapes and modes `form` returned `outputs`."""
        self.cls, found = type(outputs), dict(_tensors_in(outputs))
        self.items[form] = _items_of(outputs)
        # One row's logits have one number, too, but a dimension, or one with other rows.
        losses = {p: t for p, t in found.items() if len(p) == 2 and (not t.ndim or (p[1] == "loss" and t.numel() == 1))}
        known = {p: (t.shape, t.dtype, t.is_floating_point()) for p, t in losses.items()}
        self.losses = {p: like for p, like in known.items() if p in self.losses or not self.others}
        self.others[form] = {p: (t.shape, t.dtype, t.requires_grad) for p, t in found.items()}

    def outputs(self, ticket: Ticket, form: object, device: torch.device) -> Any:
        """Return what stands for the outputs of `ticket`; None: nothing can. `form`: None for losses alone."""
        pending = _Pending(self.cls, self.others.get(form, {}) | self.losses, ticket, device)
        if issubclass(self.cls, Tensor):
            return pending.tensor("itself", None)
        items = self.items.get(form)
        if items is None:  # not known: those that there always were
            (items, *others) = {*self.items.values()}
            items = () if others else items
        if items and {("item", key) for key, is_none in items if not is_none} <= {path[:2] for path in pending.likes}:
            pending.items = items  # the program gets the collection, with pending tensors in it
            tensors = {key: None if is_none else pending.tensor("item", key) for key, is_none in items}
            return tensors if self.cls is dict else getattr(self.cls, "_make", self.cls)(tensors.values())
        if not pending.likes or _is_sequence(self.cls):
            return None
        outputs = object.__new__(_pending_class(self.cls))
        object.__setattr__(outputs, "_harmony", pending)
        for path in self.losses:
            if path[1] not in ("loss", 0):  # others, that programs log after the step
                pending.at(path)
        return outputs


def _is_sequence(cls: Any) -> bool:
    return cls in (tuple, list) or (issubclass(cls, tuple) and hasattr(cls, "_make"))


def _items_of(outputs: Any) -> Items:
    cls = type(outputs)
    items = outputs.items() if cls is dict else enumerate(outputs) if _is_sequence(cls) else ()
    return tuple((key, value is None) for key, value in items)


def _said(items: Items) -> str:
    return ", ".join(f"{key} (None)" if is_none else f"{key}" for key, is_none in items)


def _tensors_in(outputs: Any) -> Iterator[tuple[Path, Tensor]]:
    if isinstance(outputs, Tensor):
        yield ("itself", None), outputs
        return
    keys = outputs if isinstance(outputs, Mapping) else getattr(outputs, "__dict__", ())
    names = [key for key in keys if isinstance(key, (str, int))]
    count = len(outputs) if isinstance(outputs, (Mapping, tuple, list)) else 0
    attributes = [("attribute", name) for name in dict.fromkeys((*names, "loss"))]
    for path in [*attributes, *(("item", key) for key in (*names, *range(count)))]:
        with suppress(TypeError, LookupError, AttributeError):
            if isinstance(found := _follow(outputs, path), Tensor):
                yield path, found
            elif type(found) is tuple and all(isinstance(one, Tensor) for one in found):
                yield from (((*path, len(found), place), one) for place, one in enumerate(found))


def _follow(outputs: Any, path: Path, items: Items = ()) -> Any:
    way, key, *place = path
    if items and items != _items_of(outputs):
        raise BatchError(
            f"the model gave {_said(_items_of(outputs))} where calls of the same form had returned {_said(items)}, which "
            "the program was given: let the model return the same each time, or its loss alone."
        )
    found = outputs if way == "itself" else getattr(outputs, key) if way == "attribute" else outputs[key]
    if place and len(found) != place[0]:
        raise BatchError(
            f"{key!r} of the outputs has {len(found)} tensors, not {place[0]} as before: read a value of it first."
        )
    return found[place[1]] if place else found


class OutputKinds:
    """Kinds of outputs of one model, learned the first time that each form of call is measured."""

    def __init__(self) -> None:
        self._known: defaultdict[object, dict[object, OutputKind]] = defaultdict(dict)  # by form, and by strings

    def get(self, call: MicroBatch) -> OutputKind | None:
        known, words = self._of_form(call)
        return known.get(words)

    def learn(self, call: MicroBatch, outputs: Any, inputs: Any = None) -> None:
        """Learn that `call` returned `outputs`, or would with `inputs`."""
        known, words = self._of_form(call)
        shapes = shapes_of(call.inputs if inputs is None else inputs)
        known.setdefault(words, OutputKind(object)).learn(outputs, (shapes, call.state.modes))

    def outputs(self, call: MicroBatch, ticket: Ticket, losses_only: bool) -> Any:
        """Return what stands for the outputs of `call`; None: nothing can."""
        known, words = self._of_form(call)
        form = None if losses_only else (shapes_of(call.inputs), call.state.modes)
        return known[words].outputs(ticket, form, call.home)

    def _of_form(self, call: MicroBatch) -> tuple[dict[object, OutputKind], object]:
        """Return what calls returned in the modes of `call` with its arguments and switches, and its strings."""
        args, kwargs = call.inputs
        given = {key: value for key, value in (*enumerate(args), *kwargs.items()) if value is not None}
        switches = frozenset((key, value) for key, value in given.items() if isinstance(value, (bool, Enum)))
        words = frozenset((key, value) for key, value in given.items() if isinstance(value, str))
        known = self._known[call.state.modes.training, frozenset(given), switches]
        return known, words if words in known or len(known) < _MOST_WORDS else None


@dataclass(slots=True)
class _Pending:
    cls: Any
    likes: dict[Path, Like]
    ticket: Ticket
    device: torch.device
    items: Items = ()
    computed: Any = None
    tensors: dict[Path, PendingTensor] = field(default_factory=dict)

    def outputs(self) -> Any:
        """Return the outputs, computed now if need be."""
        if self.computed is None:
            self.computed = self.ticket.outputs()
            # The program may write into a copy: pending tensors are read from the outputs themselves.
            with suppress(Exception):  # there are classes that cannot be copied
                self.computed = copy.copy(self.computed)
        return self.computed

    def tensor(self, way: str, key: Any) -> PendingTensor | tuple[PendingTensor, ...] | None:
        """Return the tensor, or tensors, at a path, still pending; None: not known to be such, or all are computed."""
        if self.computed is not None or not isinstance(key, (str, int, type(None))):
            return None
        paths = [path for path in self.likes if path[:2] == (way, key)]
        tensors = tuple(map(self.at, paths))
        return tensors[0] if (way, key) in paths else tensors or None

    def at(self, path: Path) -> PendingTensor:
        if path not in self.tensors:
            like = self.likes[path]
            read = functools.partial(_follow, path=path, items=self.items)
            self.tensors[path] = PendingTensor(Node((self.ticket,), *like[:2], self.device, like[2], read))
        return self.tensors[path]


class _PendingOutputs:
    """Stand-in for an instance of the model's class, which hands on to one."""

    __slots__ = ("_harmony",)
    _harmony: _Pending

    def __getattr__(self, name: str) -> Any:
        pending = self._harmony
        if (tensor := pending.tensor("attribute", name)) is not None:
            return tensor
        if name == "get" and pending.computed is None and ("item", "loss") in pending.likes:
            return functools.partial(Mapping.get, self)
        if name.startswith("__") and not hasattr(pending.cls, name):  # a protocol is asked for
            raise AttributeError(name)
        return getattr(pending.outputs(), name)

    def __getitem__(self, key: Any) -> Any:
        tensor = self._harmony.tensor("item", key)
        return self._harmony.outputs()[key] if tensor is None else tensor

    def __contains__(self, key: Any) -> bool:
        return self._harmony.tensor("item", key) is not None or key in self._harmony.outputs()


_SPECIAL = "bool delattr delitem eq hash iter len or reduce_ex repr reversed ror setattr setitem".split()


@functools.cache
def _pending_class(cls: Any) -> type[_PendingOutputs]:
    """Return a class with the special methods that `cls` has: Python looks for them in the class alone."""
    special = [f"__{name}__" for name in _SPECIAL]
    namespace: dict[str, Any] = {name: _handing_on(name) for name in special if hasattr(cls, name)}
    namespace |= {"__slots__": (), "__class__": cls, "__new__": lambda _, *args, **kwargs: cls(*args, **kwargs)}
    if is_dataclass(cls):
        namespace["__dataclass_fields__"] = cls.__dataclass_fields__
    made = type(cls.__name__, (_PendingOutputs,), namespace)
    register_pytree_node(made, lambda outputs: ([outputs._harmony.outputs()], None), lambda one, _: next(iter(one)))
    return made


def _handing_on(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self._harmony.outputs(), name)(*args)
