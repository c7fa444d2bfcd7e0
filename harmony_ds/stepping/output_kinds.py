"""Outputs that a model returns, by the form of its call, and what stands for them until they are computed.

The loss of pending outputs stays pending, however it is reached; any other use of them computes them.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from harmony_ds.errors import BatchError
from harmony_ds.runtime.micro_batch import MicroBatch, loss_of
from harmony_ds.stepping.pending import PendingLoss

_MOST_WORDS = 16
"""Combinations of strings among a call's arguments that may name modes; where there are more, they are data."""


@dataclass(frozen=True, slots=True)
class OutputKind:
    """Outputs of calls of one form."""

    cls: Any
    pending: bool = False  # whether the loss can be: it is surely one, and not in a tuple, which may be unpacked
    dtype: torch.dtype = torch.float32  # of the loss
    shape: tuple[int, ...] = ()
    named: bool = False  # whether the loss is an attribute
    keys: tuple[str | int, ...] = ()  # the loss is found by, of "loss" and 0

    @staticmethod
    def of(outputs: Any) -> OutputKind:
        """Return the kind of `outputs`."""
        try:
            loss = loss_of(outputs)
        except BatchError:
            return OutputKind(type(outputs))
        keys = () if outputs is loss else tuple(key for key in ("loss", 0) if _item(outputs, key) is loss)
        named = getattr(outputs, "loss", None) is not None
        pending = not isinstance(outputs, tuple) and (outputs is not loss or not loss.ndim)  # else one row's logits?
        return OutputKind(type(outputs), pending, loss.dtype, loss.shape, named, keys)

    def outputs(self, loss: PendingLoss, compute: Callable[[], Any]) -> Any:
        """Return what stands for the outputs that `compute` returns, among them `loss`."""
        if issubclass(self.cls, Tensor):
            return loss
        outputs = object.__new__(_pending_class(self.cls))
        object.__setattr__(outputs, "_harmony", _Pending(self, loss, compute))
        return outputs


def _item(outputs: Any, key: Any) -> Any:
    with suppress(TypeError, LookupError, AttributeError):
        return outputs[key]


class OutputKinds:
    """Kinds of outputs of one model, learned the first time that each form of call is measured."""

    def __init__(self) -> None:
        self._known: defaultdict[object, dict[object, OutputKind]] = defaultdict(dict)  # by form, and by strings

    def get(self, call: MicroBatch) -> OutputKind | None:
        known, words = self._of_form(call)
        return known.get(words)

    def learn(self, call: MicroBatch, outputs: Any) -> None:
        """Learn that `call` returned `outputs`."""
        known, words = self._of_form(call)
        known[words] = OutputKind.of(outputs)

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
    kind: OutputKind
    loss: PendingLoss
    compute: Callable[[], Any]
    computed: Any = None

    def outputs(self) -> Any:
        """Return the outputs themselves."""
        if self.computed is None:
            self.computed = self.compute()
        return self.computed

    def is_loss(self, key: Any) -> bool:
        """Return whether `outputs[key]` is the loss, still pending."""
        return self.computed is None and key in self.kind.keys


class _PendingOutputs:
    """Stand-in for an instance of the model's class, which hands on to one."""

    __slots__ = ("_harmony",)
    _harmony: _Pending

    def __getattr__(self, name: str) -> Any:
        pending = self._harmony
        if pending.computed is None:
            if name == "loss" and pending.kind.named:
                return pending.loss
            if name == "get" and "loss" in pending.kind.keys:
                return functools.partial(Mapping.get, self)
            if name.startswith("__") and not hasattr(pending.kind.cls, name):  # a protocol is asked for
                raise AttributeError(name)
        return getattr(pending.outputs(), name)

    def __getitem__(self, key: Any) -> Any:
        return self._harmony.loss if self._harmony.is_loss(key) else self._harmony.outputs()[key]

    def __contains__(self, key: Any) -> bool:
        return (key == "loss" and self._harmony.is_loss(key)) or key in self._harmony.outputs()


_SPECIAL = (
    "__bool__ __delattr__ __delitem__ __eq__ __hash__ __iter__ __len__ __or__ __reduce_ex__ __repr__ __reversed__ __ror__ "
    "__setattr__ __setitem__".split()
)


@functools.cache
def _pending_class(cls: Any) -> type[_PendingOutputs]:
    """Return a class with the special methods that `cls` has: Python looks for them in the class alone."""
    namespace: dict[str, Any] = {name: _handing_on(name) for name in _SPECIAL if hasattr(cls, name)}
    namespace |= {"__slots__": (), "__class__": cls, "__new__": lambda _, *args, **kwargs: cls(*args, **kwargs)}
    if is_dataclass(cls):
        namespace["__dataclass_fields__"] = cls.__dataclass_fields__
    made = type(cls.__name__, (_PendingOutputs,), namespace)
    register_pytree_node(made, lambda outputs: ([outputs._harmony.outputs()], None), lambda one, _: next(iter(one)))
    return made


def _handing_on(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self._harmony.outputs(), name)(*args)
