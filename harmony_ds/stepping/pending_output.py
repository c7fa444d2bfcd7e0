"""A model's outputs that have not been computed yet: `.loss` stays pending, anything else computes them at once.

They are an instance of what the model returns: of a class made from it, whose every method computes the outputs, fills
the instance with them, and goes on as the model's own class would. Where Python allows it, that is its class from then on.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from harmony_ds.errors import ModelError
from harmony_ds.stepping.pending import PendingLoss

_STATE = "_harmony_pending"
_OF_THE_CLASS = frozenset(
    "__new__ __init__ __init_subclass__ __subclasshook__ __class_getitem__ __getattribute__ __getattr__ __class__ __dict__ "
    "__weakref__ __del__ __post_init__ __prepare__ __set_name__ __sizeof__ __dir__ __getstate__".split()
)


@dataclass(frozen=True, slots=True)
class OutputForm:
    """What a model returns, and by which ways its loss is found there: "loss" by name, by key, 0 by place."""

    cls: Any
    named: bool
    keyed: bool
    placed: bool

    @staticmethod
    def of(outputs: Any, loss: Tensor) -> OutputForm | None:
        """None: there is no making an instance that waits."""
        cls: Any = type(outputs)
        if isinstance(outputs, tuple) or _pending_class(cls) is None:
            return None
        named = getattr(outputs, "loss", None) is not None
        return OutputForm(cls, named, _item(outputs, "loss") is loss, _item(outputs, 0) is loss)

    def finds(self, key: str | int) -> bool:
        """Whether `outputs[key]` is the loss."""
        return (key == "loss" and self.keyed) or (key == 0 and self.placed)

    def pending(self, loss: PendingLoss, outputs: Callable[[], Any]) -> Any:
        """An instance that waits for `outputs`, whose loss is `loss`."""
        cls = _pending_class(self.cls)
        assert cls is not None
        instance = _empty(cls)
        object.__getattribute__(instance, "__dict__")[_STATE] = _Pending(self, loss, outputs)
        return instance


@dataclass(frozen=True, slots=True)
class _Pending:
    form: OutputForm
    loss: PendingLoss
    outputs: Callable[[], Any]


def _item(outputs: Any, key: Any) -> Any:
    try:
        return None if isinstance(outputs, defaultdict) and key not in outputs else outputs[key]
    except (TypeError, LookupError, AttributeError):
        return None


def _empty(cls: type[Any]) -> Any:
    base: Any = dict if issubclass(cls, dict) else object
    return base.__new__(cls)


def _state_of(instance: Any) -> _Pending | None:
    state: _Pending | None = object.__getattribute__(instance, "__dict__").get(_STATE)
    return state


def _fill(instance: Any) -> Any:
    """`instance`, with what it was waiting for."""
    state = _state_of(instance)
    if state is None:
        return instance
    cls, computed = state.form.cls, state.outputs()
    if type(computed) is not cls:
        raise ModelError(
            f"the model returned a {type(computed).__name__} where it returned a {cls.__name__} when it was measured: look "
            "at outputs whose type changes under torch.no_grad(), or let the model return one type."
        )
    own = object.__getattribute__(instance, "__dict__")
    del own[_STATE]
    own.update(getattr(computed, "__dict__", {}))
    for slot in (slot for base in cls.__mro__ for slot in _slots(base) if hasattr(computed, slot)):
        object.__setattr__(instance, slot, getattr(computed, slot))
    if isinstance(computed, dict):
        builtin: Any = OrderedDict if isinstance(computed, OrderedDict) else dict
        for key in builtin.__iter__(computed):
            builtin.__setitem__(instance, key, builtin.__getitem__(computed, key))
    with suppress(TypeError):  # a built-in class, or one with other slots
        object.__setattr__(instance, "__class__", cls)
    return instance


def _slots(cls: type[Any]) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return tuple(s for s in ((slots,) if isinstance(slots, str) else slots) if s not in ("__dict__", "__weakref__"))


@functools.cache
def _pending_class(cls: Any) -> type[Any] | None:
    """A class from `cls` whose instances fill themselves; None if there can be none."""
    known = {
        name: _filling(cls, name)
        for name in dir(cls)
        if name.startswith("__") and name not in _OF_THE_CLASS
        if callable(getattr(cls, name, None)) and getattr(cls, name) is not getattr(object, name, None)
    }
    own = {name: function for name, function in vars(_Own).items() if callable(function)}
    if "__getitem__" not in known:
        own.pop("__getitem__")
    if not issubclass(cls, dict):
        own.pop("__contains__")
    namespace = {**known, **own, "__new__": lambda _, *args, **kwargs: cls(*args, **kwargs), "_harmony_of": cls}
    namespace |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    try:
        meta: Any = type(cls)
        made: type[Any] = meta(cls.__name__, (cls,), namespace)
        _empty(made)
    except TypeError:
        return None
    if cls in pytree.SUPPORTED_NODES and made not in pytree.SUPPORTED_NODES:
        node = pytree.SUPPORTED_NODES[cls]
        pytree.register_pytree_node(made, lambda tree: node.flatten_fn(_fill(tree)), node.unflatten_fn)
    return made


def _filling(cls: type[Any], name: str) -> Callable[..., Any]:
    of_class = getattr(cls, name)

    @functools.wraps(of_class, updated=())
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        others = (_fill(arg) if hasattr(type(arg), "_harmony_of") else arg for arg in args)
        return of_class(_fill(self), *others, **kwargs)

    return method


class _Own:
    """What the class of instances that wait has in the place of its base's."""

    _harmony_of: Any

    def __getattribute__(self, name: str) -> Any:
        cls = type(self)._harmony_of
        state = _state_of(self)
        if name == "__class__":
            return cls
        if state is None:
            return cls.__getattribute__(self, name)
        if name == "loss" and state.form.named:
            return state.loss
        if name == "get" and state.form.keyed:
            return functools.partial(_get, self)
        if name.startswith("__") and not hasattr(cls, name):  # somebody asks for a protocol
            raise AttributeError(name)
        return getattr(_fill(self), name)

    def __getattr__(self, name: str) -> Any:
        cls = type(self)._harmony_of
        if name.startswith("__") or not hasattr(cls, "__getattr__"):
            raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")
        return cls.__getattr__(_fill(self), name)

    def __getitem__(self, key: Any) -> Any:
        state = _state_of(self)
        if state is not None and isinstance(key, (str, int)) and state.form.finds(key):
            return state.loss
        return type(self)._harmony_of.__getitem__(_fill(self), key)

    def __contains__(self, key: object) -> bool:
        state = _state_of(self)
        if state is not None and isinstance(key, str) and state.form.finds(key):
            return True
        return bool(type(self)._harmony_of.__contains__(_fill(self), key))

    def __reduce_ex__(self, protocol: Any) -> Any:
        cls = type(self)._harmony_of
        reduced = cls.__reduce_ex__(_fill(self), protocol)
        return tuple(_as(cls, part) for part in reduced) if isinstance(reduced, tuple) else reduced

    def __setattr__(self, name: str, value: Any) -> None:
        cls = type(self)._harmony_of
        cls.__setattr__(_fill(self), name, value)

    def __delattr__(self, name: str) -> None:
        cls = type(self)._harmony_of
        cls.__delattr__(_fill(self), name)

    def __repr__(self) -> str:
        state = _state_of(self)
        if state is not None:
            return f"{state.form.cls.__name__}(loss={state.loss!r}, not computed yet)"
        return str(type(self)._harmony_of.__repr__(self))


def _get(instance: Any, key: Any, default: Any = None) -> Any:
    return instance[key] if key == "loss" else _fill(instance).get(key, default)


def _as(cls: type[Any], part: Any) -> Any:
    """Of what a copy is made from: the model's own class in the place of the one that waits."""
    if isinstance(part, tuple):
        return tuple(_as(cls, one) for one in part)
    return cls if isinstance(part, type) and getattr(part, "_harmony_of", None) is cls else part
