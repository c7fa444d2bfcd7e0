"""Copies and pickles of a model that an engine trains: without the engine's attributes, as the user made the model.

A process without harmony_ds can read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

_STATE = "__getstate__"


class EngineAttribute:
    """Value of an attribute that an engine sets on a user's module; `before`: the value before (None: none)."""

    before: Any = None


def exclude_from_copies(owner: nn.Module) -> None:
    """Leave `EngineAttribute`s out of copies and pickles of `owner` until `include_in_copies`."""
    owner.__dict__[_STATE] = partial(_plain_state, owner)  # copy and pickle call it


def include_in_copies(owner: nn.Module) -> None:
    """Undo `exclude_from_copies`."""
    owner.__dict__.pop(_STATE, None)


def _plain_state(owner: nn.Module) -> Any:
    of_class = getattr(type(owner), _STATE, None)  # before Python 3.11 only classes that define it have one
    state = owner.__dict__ if of_class is None else of_class(owner)
    return _without_added(state) if isinstance(state, dict) else state


def _without_added(held: Mapping[str, Any]) -> dict[str, Any]:
    plain = {}
    for key, value in held.items():
        if key == _STATE:
            continue
        if not isinstance(value, EngineAttribute):
            plain[key] = value
        elif value.before is not None:
            plain[key] = value.before
    return plain
