"""Buffers that forward passes change, shown as of the calls that came before whoever looks at them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any


class WatchedBuffers(dict[str, Any]):
    """A module's buffers; looking at one first runs what is still to change it. Copies are plain dicts."""

    __slots__ = ("_catch_up",)

    def __init__(self, buffers: Mapping[str, Any], catch_up: Callable[[], None]) -> None:
        super().__init__(buffers)
        self._catch_up = catch_up

    def __getitem__(self, key: str) -> Any:
        self._catch_up()
        return super().__getitem__(key)

    def values(self) -> Any:
        self._catch_up()
        return super().values()

    def items(self) -> Any:
        self._catch_up()
        return super().items()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {key: deepcopy(value, memo) for key, value in self.items()}

    def __copy__(self) -> dict[str, Any]:
        return dict(self.items())

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)
