"""An optimizer's `state` for its user, brought up to date before it is read, since parts of it are on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

State = MutableMapping[Any, Any]
"""By parameter: a dictionary of its moments, counters and so on."""


class SyncedState(State):
    """Mapping that calls `sync` before `plain`, the state itself, is read or written. Copies are plain."""

    def __init__(self, state: State, sync: Callable[[], None]) -> None:
        self.plain = state
        self._sync = sync

    @property
    def _seen(self) -> State:
        self._sync()
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
    """Return `state` without its wrapper."""
    return state.plain if isinstance(state, SyncedState) else state
