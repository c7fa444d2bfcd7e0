"""Python's garbage: collections around steps, and what failed calls keep alive."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

_STEPS = 8
"""After so many steps, everything made since the objects were frozen is searched for garbage."""
_MANY = 100_000
"""More objects than this take too long to search (20 ms): they are frozen, too."""


def release_frames(error: BaseException) -> None:
    """Clear the variables of functions that have failed with `error` and its causes: they hold tensors on the device."""
    at: BaseException | None = error
    while at is not None:
        traceback.clear_frames(at.__traceback__)
        at = at.__cause__ or at.__context__


@contextmanager
def no_collections() -> Iterator[None]:
    """Open a context in which Python does not look for garbage, unless the program asks for it.

    For work that makes very many small objects and hardly a cycle: a search for a plan took a fifth of its time for it.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class StepCollections:
    """Keeper of Python's full garbage collections: cheap ones during steps, complete ones between them.

    A step makes so many objects that every few steps (of a large model every step) Python makes a full collection, which
    goes through all of torch and transformers: 0.2 to 0.3 s in which nothing is launched. So the objects that are there
    when the first step begins are frozen: no collection goes through them.

    made before the first step     frozen until somebody makes a full collection between steps, which goes through all
    made later, in steps or not    collected as ever, and by a full collection every `_STEPS` steps
    """

    def __init__(self) -> None:
        self.froze = False
        """Whether objects are frozen, and it was for steps."""
        self._running: set[object] = set()  # one for each step that runs, in whichever thread
        self._until_full = _STEPS

    @contextmanager
    def step(self) -> Iterator[None]:
        """Open the context of a step."""
        token = object()
        self._running.add(token)
        try:
            self._begin_step()
            yield
        finally:
            self._running.discard(token)

    def _begin_step(self) -> None:
        if self._unfreeze_for_all not in gc.callbacks:
            gc.callbacks.append(self._unfreeze_for_all)
        self._until_full -= 1
        if not self.froze:
            gc.collect(1)  # what has been garbage for a short time would be frozen
            self._freeze()
        elif self._until_full <= 0:
            gc.collect()
            self._until_full = _STEPS
            if len(gc.get_objects()) > _MANY:
                self._freeze()

    def _freeze(self) -> None:
        gc.freeze()
        self.froze = True
        self._until_full = _STEPS

    def _unfreeze_for_all(self, phase: str, info: Mapping[str, int]) -> None:
        """Let a full collection between steps go through everything; Python calls this around every collection."""
        if phase == "start" and info["generation"] == 2 and self.froze and not self._running:
            gc.unfreeze()
            self.froze = False


_COLLECTIONS = StepCollections()  # of the process, as the collector is


def collection_within_steps() -> Callable[[], AbstractContextManager[None]]:
    """Return the context of a step: `StepCollections.step`, unless the program has frozen objects, which stay frozen.

    Asked once for an engine: the answer is counted object by object, 40 ms for half a million.
    """
    if not _COLLECTIONS.froze and gc.get_freeze_count():
        return nullcontext
    return _COLLECTIONS.step
