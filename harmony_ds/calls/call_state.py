"""What a call of the engine saw of the model and of the process, so that its micro-batch sees that when it runs later.

    take       at the call: the attributes of the modules and of what they hold, torch's switches
    entered    around whatever a micro-batch runs: its own values in the place of the newest
    running    around what the engine runs: what changes meanwhile is forward's own doing

A value that forward changes (a counter) is told from one that the user changes by when it changes: while the engine
runs, or between two calls. The former is left where forward left it from then on, and is nobody's own.

What cannot be put in place for one micro-batch (hooks, modules, tensors that were changed in place) is refused while
others wait for their forward pass.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from harmony_ds.calls.buffers import WatchedBuffers
from harmony_ds.calls.call_walk import Flag, Found, Walk
from harmony_ds.calls.places import ABSENT, Items, Place, held, same
from harmony_ds.errors import CallChangedError


@dataclass(frozen=True, slots=True, eq=False)
class CallState:
    """The values that a call saw, and the modes that it was made in (training and requires_grad flags)."""

    values: dict[Place, Any]
    modes: bytes


class Queue(Protocol):
    """Calls whose micro-batches have not run to their end."""

    def has_waiting(self) -> bool:
        """Whether micro-batches wait for their forward pass."""

    def catch_up(self) -> None:
        """Runs the forward passes that wait, if their order matters."""


class CallStates:
    """Takes what calls of one model see, and puts it in place again."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._advanced: set[Place] = set()
        self._flags: set[Flag] = set()  # that the model has been measured with
        self.new_flags: frozenset[Flag] = frozenset()
        """Switches of the newest call that it has not been measured with: forward may leave or write something else."""
        self._functions: list[Any] = []  # that calls of this group were given
        self._writes = False  # whether forward writes to buffers or other tensors that stay
        self._watching = False
        self._running = False
        self._differences: dict[int, tuple[CallState, CallState, dict[Place, Any]]] = {}
        self._look()
        self.alone: str | None = None
        """Why forward passes cannot take turns, if something else than buffers of layers is the reason."""
        self.tensor_hook: str | None = None
        """What forward calls on a tensor to see its gradient (`register_hook`), if it was seen to."""
        self._queue: Callable[[], Queue | None] = _no_queue

    def follow(self, queue: Queue) -> None:
        """From now on, calls are queued there; it is not kept alive."""
        self._queue = weakref.ref(queue)
        if self._functions:
            self._functions = []
            self._look()

    # ---- at the call

    def take(self, functions: Sequence[Any] = ()) -> CallState:
        """What a call made now sees; the same object as long as nothing changes.

        Args:
            functions: those that it is given.

        Raises:
            CallChangedError: something was changed since the last call that those who wait would not see as it was.
        """
        if self._running:
            return self._newest
        unknown = [one for one in functions if not any(one is known for known in self._functions)]
        self._functions += unknown
        self._refuse(self._written())
        self._versions = self._found.versions()
        if unknown or self._found.changed():
            found = Walk(self._model, self._advanced, self._functions).run()
            self._refuse(_replaced(self._found.checked, found.checked))
            self._keep(found)
        return self._newest

    def measured(self) -> None:
        """The model has been measured as the newest call sees it."""
        self._flags |= self._found.flags
        self.new_flags = frozenset()

    def _look_at_flags(self) -> None:
        new = self._found.flags - self._flags
        # What a program notes in dictionaries and objects of its own may have other names each time.
        self.new_flags = frozenset(
            (name, on) for name, on in new if name in self._found.attributes or (name, not on) in self._flags
        )
        self._flags |= new - self.new_flags

    def _refuse(self, change: str | None) -> None:
        queue = self._queue()
        if change is not None and queue is not None and queue.has_waiting():
            raise CallChangedError(
                f"{change} while micro-batches wait whose calls came before: their forward passes have not run, and "
                "would see it too. Change it before the first micro-batch of a step, or look at the losses of those "
                "that wait first, which runs their forward passes: loss.item()."
            )

    def _written(self) -> str | None:
        """A tensor that somebody else than the engine has written to since the versions were read."""
        now = self._found.versions()
        if now == self._versions:
            return None
        return next(
            f"{name} was changed in place"
            for (_, name), one, other in zip(self._found.tensors, now, self._versions, strict=True)
            if one != other
        )

    def _look(self) -> None:
        self._keep(Walk(self._model, self._advanced, self._functions).run())

    def _keep(self, found: Found) -> None:
        self._found = found
        self._look_at_flags()
        self._newest = CallState(found.values, found.modes)
        self._writes |= found.writes_unseen
        self._versions = self._found.versions()

    # ---- while the engine runs

    @property
    def is_running(self) -> bool:
        """Whether the engine runs the model now."""
        return self._running

    @contextmanager
    def running(self, users: bool = False) -> Iterator[None]:
        """What changes while open is forward's own doing; modes are not, if the `users` code runs as well.

        Raises: as `take`.
        """
        if self._running:
            yield
            return
        self.take()
        self._running = True
        try:
            yield
        finally:
            self._running = False
            self._differences.clear()
            self._learn(users)

    @property
    def of_threads(self) -> Sequence[tuple[str, threading.local]]:
        """What holds some of what the newest call sees for its thread alone, by name."""
        return self._found.of_threads

    @property
    def writes(self) -> bool:
        """Whether forward passes write to buffers, or to other tensors that stay."""
        return self._writes

    @property
    def advances(self) -> bool:
        """Whether one forward pass changes what the next may see, so that their order is that of the calls."""
        return self._writes or bool(self._advanced)

    @property
    def backward_hook(self) -> str | None:
        """What of the program's runs in each backward pass by way of the model; None: nothing."""
        if self.tensor_hook is not None:
            return f"{self.tensor_hook}() of a tensor in forward"
        return self._found.backward_hook

    def watch_buffers(self) -> None:
        """From now on, whoever looks at a buffer sees what forward passes that wait make of it."""
        if self._watching:
            return
        self._watching = True
        for module in self._model.modules():
            held = module.__dict__["_buffers"]
            if held and not isinstance(held, WatchedBuffers):
                module.__dict__["_buffers"] = WatchedBuffers(held, self._catch_up)
        self._look()

    def _catch_up(self) -> None:
        queue = self._queue()
        if queue is not None and not self._running:
            queue.catch_up()

    def remove(self) -> None:
        """Gives every module a plain dictionary of its buffers."""
        self._queue = _no_queue
        for module in self._model.modules():
            module.__dict__["_buffers"] = dict(dict.items(module.__dict__["_buffers"]))

    def _learn(self, users: bool) -> None:
        self._writes |= self._found.versions() != self._versions
        if not self._found.changed():
            self._versions = self._found.versions()
            return
        before = self._newest
        self._look()
        advanced = {place for place in _differing(before, self._newest) if not (users and place.key == "training")}
        if advanced:
            self._advanced |= advanced
            self._look()

    def is_in_place(self, state: CallState | None) -> bool:
        """Whether what `state` saw is there anyway."""
        return state is None or state is self._newest or not self._own(state)

    @contextmanager
    def entered(self, state: CallState | None) -> Iterator[None]:
        """What `state` saw, in place while open.

        Raises:
            CallChangedError: what runs changes a value that the user changes as well.
        """
        if state is None or self.is_in_place(state):
            yield
            return
        own = self._own(state)
        with held(tuple(own), tuple(own.values())) as left:
            yield
        for place, value in zip(own, left, strict=True):
            if not same(value, own[place]):
                raise CallChangedError(
                    f"{place.name} is changed both between the calls of a step and by the forward pass, whose "
                    "micro-batches run later than they are called. Change it before the first micro-batch of a step."
                )

    def _own(self, state: CallState) -> dict[Place, Any]:
        """What `state` saw otherwise than it is now."""
        known = self._differences.get(id(state))
        if known is None or known[0] is not state or known[1] is not self._newest:
            differing = {place: state.values.get(place, ABSENT) for place in _differing(state, self._newest)}
            own = {
                place: value
                for place, value in differing.items()
                if place not in self._advanced and not (isinstance(place, Items) and value is ABSENT)
            }  # a list that the call did not see stays as it is: what led to it leads elsewhere
            known = self._differences[id(state)] = (state, self._newest, own)
        return known[2]


def _no_queue() -> None:
    """Of a model whose calls nobody queues (yet)."""


def _differing(one: CallState, other: CallState) -> list[Place]:
    """The places where they differ."""
    places = [*one.values, *(place for place in other.values if place not in one.values)]
    return [place for place in places if not same(one.values.get(place, ABSENT), other.values.get(place, ABSENT))]


def _replaced(before: dict[Place, Any], now: dict[Place, Any]) -> str | None:
    """What differs, of what both have."""
    return next((place.name for place, value in before.items() if place in now and not same(value, now[place])), None)
