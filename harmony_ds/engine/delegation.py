"""Delegation of an engine's names to the parts that it is made of."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from torch._compile import _disable_dynamo

P = ParamSpec("P")
T = TypeVar("T")


def delegated(part: str, method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return a method of an engine that is `method` of its `part`."""

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(getattr(self, part), *args, **kwargs)

    delegating: Callable[Concatenate[Any, P], T] = wraps(method)(call)
    return delegating


def delegated_alive(part: str, method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return as `delegated` one that uses or changes the training: refused after `destroy`.

    It runs uncompiled in a program that is compiled: dynamo cannot follow a forward pass that runs later.
    """

    @_disable_dynamo
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        self.check_alive()
        return method(getattr(self, part), *args, **kwargs)

    delegating: Callable[Concatenate[Any, P], T] = wraps(method)(call)
    return delegating


class PartAttribute(Generic[T]):
    """An attribute of an engine that is one of its `part`, of the same name; read and assigned there."""

    def __init__(self, part: str) -> None:
        self._part = part

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        return self if instance is None else getattr(getattr(instance, self._part), self._name)  # type: ignore[return-value]

    def __set__(self, instance: Any, value: T) -> None:
        setattr(getattr(instance, self._part), self._name, value)
