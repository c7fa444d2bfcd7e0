"""Calls that do not keep the object alive whose method they call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def while_alive(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `method` while its object lives, and does not keep it alive: a loss may outlive it."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        living = reference()
        return None if living is None else living(*args)

    return call
