"""An optimizer's `state` for its user, brought up to date before it is read, since parts of it are on the device."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, MutableMapping
from typing import Any

State = MutableMapping[Any, Any]
"""By parameter: a dictionary of its moments, counters and so on."""


class SyncedState(UserDict[Any, Any]):
    """Mapping that calls `sync` before `plain`, the state itself, is read or written. Copies are plain."""

    def __init__(self, state: State, sync: Callable[[Any], None]) -> None:
        """`sync` takes the key of what is wanted; None: everything."""
        self.plain = state
        self._sync = sync

    @property
    def data(self) -> Any:  # type: ignore[override]
        """The state itself, up to date."""
        self._sync(None)
        return self.plain

    def __getitem__(self, key: Any) -> Any:
        self._sync(key)
        return self.plain[key]  # an optimizer's state makes what is missing

    def __contains__(self, key: object) -> bool:
        self._sync(key)
        return key in self.plain

    def __copy__(self) -> Any:
        return copy.copy(self.data)

    def __reduce__(self) -> tuple[Any, ...]:
        made: tuple[Any, ...] = self.data.__reduce_ex__(2)
        return made


def plain_state(state: State) -> State:
    """Return `state` without its wrapper."""
    return state.plain if isinstance(state, SyncedState) else state
