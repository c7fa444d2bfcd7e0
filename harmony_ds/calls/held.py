"""Items of dictionaries, held for the time of a context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

Item = tuple[MutableMapping[Any, Any], Any, Any]
"""A dictionary (attributes of an object, environment variables), a key, and the value."""
_ABSENT = object()


@contextmanager
def held(items: Iterable[Item]) -> Iterator[None]:
    """While open, the dictionaries hold these values under these keys; afterwards what they held before."""
    items = list(items)
    before = [(mapping, key, mapping.get(key, _ABSENT)) for mapping, key, _ in items]
    try:
        for mapping, key, value in items:
            mapping[key] = value
        yield
    finally:
        for mapping, key, value in before:
            if value is _ABSENT:
                mapping.pop(key, None)
            else:
                mapping[key] = value
