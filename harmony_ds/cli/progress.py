"""Progress line of work that takes long."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LONG_S = 2.0


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Print `what` on stderr if the context takes longer than two seconds."""
    timer = threading.Timer(_LONG_S, print, (f"{what} ...",), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
