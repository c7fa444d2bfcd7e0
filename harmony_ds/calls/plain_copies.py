"""Copies and pickles of a model that an engine trains are as its user made it.

They have their own forward, and no attributes of the engine's, so that a process without harmony_ds reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from torch import nn


class Added:
    """What an engine puts into a user's object. `before`: what was in its place (None: nothing)."""

    before: Any = None


class PlainState(Added):
    """Stands on one module as its `__getstate__`, which copy and pickle ask for what they copy."""

    def __init__(self, owner: nn.Module) -> None:
        self._owner = owner

    def __call__(self) -> Any:
        of_class = getattr(type(self._owner), "__getstate__", None)  # before Python 3.11 only of those that define it
        state = self._owner.__dict__ if of_class is None else of_class(self._owner)
        return _without_added(state) if isinstance(state, dict) else state


class PlainWhenCopied(dict[str, Any]):
    """A dictionary that stands in a module in the place of a plain one; its copies and pickles are plain."""

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {key: deepcopy(value, memo) for key, value in self.items()}

    def __copy__(self) -> dict[str, Any]:
        return dict(self.items())

    copy = __copy__

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.__copy__(),)


def leave_out_added(owner: nn.Module) -> None:
    """Makes copies and pickles of `owner` leave out what is `Added`, until `copy_all` is called."""
    owner.__dict__["__getstate__"] = PlainState(owner)


def copy_all(owner: nn.Module) -> None:
    """Ends what `leave_out_added` began."""
    owner.__dict__.pop("__getstate__", None)


def _without_added(held: Mapping[Any, Any]) -> dict[Any, Any]:
    plain = {}
    for key, value in held.items():
        if not isinstance(value, Added):
            plain[key] = value
        elif value.before is not None:
            plain[key] = value.before
    return plain
