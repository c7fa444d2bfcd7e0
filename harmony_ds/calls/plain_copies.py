"""Copies and pickles of a model that an engine trains are as its user made it.

They have their own forward, and no attributes of the engine's, so that a process without harmony_ds reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

_STATE = "__getstate__"


class EngineAttribute:
    """What an engine puts into a user's module. `before`: what was in its place (None: nothing)."""

    before: Any = None


def exclude_from_copies(owner: nn.Module) -> None:
    """Makes copies and pickles of `owner` leave out what is `EngineAttribute`, until `include_in_copies` is called."""
    owner.__dict__[_STATE] = partial(_plain_state, owner)  # which copy and pickle ask for what they copy


def include_in_copies(owner: nn.Module) -> None:
    """Ends what `exclude_from_copies` began."""
    owner.__dict__.pop(_STATE, None)


def _plain_state(owner: nn.Module) -> Any:
    of_class = getattr(type(owner), _STATE, None)  # before Python 3.11 only of those that define it
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
