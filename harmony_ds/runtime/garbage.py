"""Python's garbage collection within a step."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """While open, a collection goes only through objects that were made meanwhile.

    A step makes so many that every few steps (of a large model every step) there is a full collection, which goes through
    all of torch and transformers: 0.2 to 0.3 s in which nothing is launched.
    """
    if gc.get_freeze_count():  # somebody else has frozen objects, who may not want them thawed
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
