"""Dictionaries (attributes, environment variables) patched while a context is open."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

Item = tuple[MutableMapping[Any, Any], Any, Any]
"""A dictionary, a key, and the value to set."""
_ABSENT = object()


class patched:  # noqa: N801 - used as a function; a class, because it is entered for each layer call
    """Context in which dictionaries hold the given values; afterwards they hold what they held before."""

    __slots__ = ("_before", "items")

    def __init__(self, items: Iterable[Item]) -> None:
        self.items = [*items]

    def __enter__(self) -> None:
        self._before = [mapping[key] if key in mapping else _ABSENT for mapping, key, _ in self.items]  # noqa: SIM401 - without a call
        for mapping, key, value in self.items:
            mapping[key] = value

    def __exit__(self, *_: object) -> None:
        for (mapping, key, _value), before in zip(self.items, self._before, strict=True):
            if before is _ABSENT:
                mapping.pop(key, None)
            else:
                mapping[key] = before
