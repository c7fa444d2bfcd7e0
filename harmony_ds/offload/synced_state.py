"""An optimizer's `state` as its user sees it: true whenever somebody looks, though parts of it live on the device.

What enters is the state itself, which the engine goes on using directly; what leaves is a mapping to put in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

State = MutableMapping[Any, Any]
"""By parameter: a dictionary of its moments, counters and so on."""


class SyncedState(State):
    """Calls `look` before anything is read. Copies are plain."""

    def __init__(self, state: State, look: Callable[[], None]) -> None:
        self.plain = state
        self._look = look

    @property
    def _seen(self) -> State:
        self._look()
        return self.plain

    def __getitem__(self, key: Any) -> Any:
        return self._seen[key]  # an optimizer's state makes what is missing

    def __setitem__(self, key: Any, value: Any) -> None:
        self._seen[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._seen[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._seen)

    def __len__(self) -> int:
        return len(self._seen)

    def __contains__(self, key: object) -> bool:
        return key in self._seen

    def __repr__(self) -> str:
        return repr(self._seen)

    def __reduce__(self) -> tuple[Any, ...]:
        made: tuple[Any, ...] = self._seen.__reduce_ex__(2)  # type: ignore[assignment]
        return made


def plain_state(state: State) -> State:
    """What `state` watches, or itself."""
    return state.plain if isinstance(state, SyncedState) else state
