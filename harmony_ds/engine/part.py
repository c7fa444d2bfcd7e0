"""How the engine's names lead to the parts that it is made of."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from torch._compile import _disable_dynamo

P = ParamSpec("P")
T = TypeVar("T")


def of_part(part: str, method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A method that is `method` of the object's `part`."""

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(getattr(self, part), *args, **kwargs)

    delegating: Callable[Concatenate[Any, P], T] = wraps(method)(call)
    return delegating


def of_living(part: str, method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """As `of_part`, of what uses or changes the training: refused after `destroy`, and run as it is where the program
    around it is compiled (dynamo cannot follow what runs later, on another thread).
    """

    @_disable_dynamo
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        self.check_alive()
        return method(getattr(self, part), *args, **kwargs)

    delegating: Callable[Concatenate[Any, P], T] = wraps(method)(call)
    return delegating


class Held(Generic[T]):
    """An attribute that is one of the object's `part`, of the same name; to be read and assigned."""

    def __init__(self, part: str) -> None:
        self._part = part

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        return self if instance is None else getattr(getattr(instance, self._part), self._name)  # type: ignore[return-value]

    def __set__(self, instance: Any, value: T) -> None:
        setattr(getattr(instance, self._part), self._name, value)
