"""What torch hands to `__torch_function__`."""

from __future__ import annotations

from typing import Any


def name_of(func: Any) -> str:
    """Return the name of a function of torch, or of the attribute that is read; empty: the attribute has no name."""
    name: str = getattr(func.__self__, "__name__", "") if func.__name__ == "__get__" else func.__name__
    return name
