"""The optimizer's `state` as the user sees it: synchronized with the device and with pending updates before each access."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, MutableMapping
from typing import Any

OptimizerState = MutableMapping[Any, Any]
"""`optimizer.state`: for each parameter, a dictionary of its moments, step counters and so on."""


class SyncedState(UserDict[Any, Any]):
    """Wrapper of an optimizer's state that calls `sync` before each read or write. Its copies are plain dictionaries.

    Attributes:
        plain: the state itself.
    """

    def __init__(self, state: OptimizerState, sync: Callable[[Any], None]) -> None:
        """`sync` is called with the parameter whose state is accessed; None: all of them."""
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


def plain_state(state: OptimizerState) -> OptimizerState:
    """Return `state` without its wrapper."""
    return state.plain if isinstance(state, SyncedState) else state
