"""Python's garbage: collection within a step, and what failed calls keep alive."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


def release_frames(error: BaseException) -> None:
    """Clear the variables of functions that have failed with `error` and its causes: they hold tensors on the device."""
    at: BaseException | None = error
    while at is not None:
        traceback.clear_frames(at.__traceback__)
        at = at.__cause__ or at.__context__


def collection_within_steps() -> Callable[[], AbstractContextManager[None]]:
    """Return the context of a step: `only_new_garbage`, unless the program has frozen objects, which stay frozen.

    Asked once for an engine: the answer is counted object by object, 40 ms for half a million.
    """
    return nullcontext if gc.get_freeze_count() else only_new_garbage


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """While open, a collection goes only through objects that were made meanwhile.

    A step makes so many that every few steps (of a large model every step) there is a full collection, which goes through
    all of torch and transformers: 0.2 to 0.3 s in which nothing is launched.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
