"""Copies and pickles of a model that an engine trains are as its user made it.

They have their own forward, and no hooks or attributes of the engine's, so that a process without harmony_ds reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

_STATE = "__getstate__"
_HOOKS = ("_load_state_dict_post_hooks", "_load_state_dict_pre_hooks")


class Added:
    """What an engine puts into a user's module: itself, or its methods. `before`: what was in its place (None: nothing)."""

    before: Any = None


def leave_out_added(owner: nn.Module) -> None:
    """Makes copies and pickles of `owner` leave out what is `Added`, until `copy_all` is called."""
    owner.__dict__[_STATE] = partial(_plain_state, owner)  # which copy and pickle ask for what they copy


def copy_all(owner: nn.Module) -> None:
    """Ends what `leave_out_added` began."""
    owner.__dict__.pop(_STATE, None)


def _plain_state(owner: nn.Module) -> Any:
    of_class = getattr(type(owner), _STATE, None)  # before Python 3.11 only of those that define it
    state = owner.__dict__ if of_class is None else of_class(owner)
    if not isinstance(state, dict):
        return state
    plain = _without_added({key: value for key, value in state.items() if key != _STATE})
    return plain | {key: type(plain[key])(_without_added(plain[key])) for key in _HOOKS if key in plain}


def _without_added(held: Mapping[Any, Any]) -> dict[Any, Any]:
    plain = {}
    for key, value in held.items():
        hook = getattr(value, "hook", value)  # as torch wraps it
        owner = hook.__self__ if isinstance(hook, MethodType) else hook
        if not isinstance(owner, Added):
            plain[key] = value
        elif owner.before is not None:
            plain[key] = owner.before
    return plain
