"""An optimizer's `state` as its user sees it: true whenever somebody looks, though parts of it live on the device.

What enters is the state itself, which the engine goes on using directly; what leaves is a mapping to put in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

State = MutableMapping[Any, Any]
"""By parameter: a dictionary of its moments, counters and so on."""


class WatchedState(State):
    """Calls `look` with the parameter (None: with all of them) before anything is read. Copies are plain."""

    def __init__(self, state: State, look: Callable[[Any], None]) -> None:
        self.plain = state
        self._look = look

    def __getitem__(self, key: Any) -> Any:
        self._look(key)
        return self.plain[key]  # an optimizer's state makes what is missing

    def __setitem__(self, key: Any, value: Any) -> None:
        self._look(key)
        self.plain[key] = value

    def __delitem__(self, key: Any) -> None:
        self._look(key)
        del self.plain[key]

    def __iter__(self) -> Iterator[Any]:
        self._look(None)
        return iter(self.plain)

    def __len__(self) -> int:
        self._look(None)
        return len(self.plain)

    def __contains__(self, key: object) -> bool:
        self._look(key)
        return key in self.plain

    def __repr__(self) -> str:
        self._look(None)
        return repr(self.plain)

    def __reduce__(self) -> tuple[Any, ...]:
        self._look(None)
        made: tuple[Any, ...] = self.plain.__reduce_ex__(2)  # type: ignore[assignment]
        return made


def plain(state: State) -> State:
    """What `state` watches, or itself."""
    return state.plain if isinstance(state, WatchedState) else state
