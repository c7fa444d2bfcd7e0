"""A gate before `.data` of a quantized parameter, which keeps the behaviour of its class.

Writes into such a parameter itself, or into what it consists of, raise versions, which are compared before the model runs;
writes through `.data` raise none, so reading that is what must be noticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from harmony_ds.errors import ModelError
from harmony_ds.offload.packed import is_wrapper
from harmony_ds.offload.rebuild import LINK

if TYPE_CHECKING:
    from harmony_ds.model.link import ParameterLink


@cache
def gated(kind: type) -> type:
    """Return a subclass of `kind`, a class of quantized parameters, by its name, whose `.data` passes the link."""
    names: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "harmony_kind": kind}
    if kind.__torch_function__ is not torch._C._disabled_torch_function_impl:  # type: ignore[attr-defined]
        names["__torch_function__"] = classmethod(_torch_function)
    if kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:  # type: ignore[attr-defined]
        names["__torch_dispatch__"] = classmethod(_torch_dispatch)
    return type(kind)(kind.__name__, (_Gate, kind), names)


def _torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Let the class itself do what a function does with its parameters: what it makes is of this class, too."""
    return cls.harmony_kind.__torch_function__(func, _kinds(types), args, kwargs or {})


def _torch_dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return cls.harmony_kind.__torch_dispatch__(func, _kinds(types), args, kwargs or {})


def _kinds(types: Any) -> tuple[type, ...]:
    return tuple(one.harmony_kind if issubclass(one, _Gate) else one for one in types)


@contextmanager
def _plain(parameter: Any) -> Iterator[None]:
    """Give `parameter` its own class, and attributes without the link, while open: for copies and pickles of it."""
    gate, attributes = type(parameter), vars(parameter)
    parameter.__class__ = gate.harmony_kind
    parameter.__dict__ = {key: value for key, value in attributes.items() if key != LINK}
    try:
        yield
    finally:
        parameter.__class__, parameter.__dict__ = gate, attributes


class _Gate:
    harmony_kind: type

    @property
    def data(self) -> Tensor:
        link: ParameterLink | None = vars(self).get(LINK)
        if link is not None:
            link.before()
        value: Tensor = super().data  # type: ignore[misc]
        if link is not None:
            link.note_alias(value)
            link.watch()
        return value

    @data.setter
    def data(self, value: Tensor) -> None:
        link: ParameterLink | None = vars(self).get(LINK)
        if link is None:
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        elif is_wrapper(self):  # type: ignore[arg-type]
            raise ModelError(
                f"the data of {link.name} is replaced, a quantized weight that lies in memory of the engine: copy values "
                "into the tensors that it consists of, or change it before initialize or after destroy."
            )
        else:
            link.before(writes=True)
            link.replace(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _plain(self):
            return deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _plain(self):
            return self.__reduce_ex__(protocol)
