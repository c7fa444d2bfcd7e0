"""What the engine says while its user waits: lines of the logger `harmony_ds.status`.

If the program handles no logs of ours, these lines and all warnings go to standard error, and say whose they are.
"""

from __future__ import annotations

import logging
import sys

STATUS = logging.getLogger("harmony_ds.status")


def say(text: str) -> None:
    """Log `text` where a user sees it by default."""
    # A level that the program or the ds_config's "log_level" has set for all of our loggers is theirs.
    STATUS.setLevel(logging.INFO if logging.getLogger("harmony_ds").level == logging.NOTSET else logging.NOTSET)
    STATUS.info("%s", text)


def has_own_handler(name: str) -> bool:
    """Return whether something else than this file handles the logs of the logger `name`."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if any(handler is not _UNHANDLED for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


class _UnhandledToStderr(logging.Handler):
    """Writes what no other handler of the program gets to standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        if not has_own_handler(record.name):
            sys.stderr.write(f"[harmony_ds] {record.getMessage()}\n")
            sys.stderr.flush()


_UNHANDLED = _UnhandledToStderr()
logging.getLogger("harmony_ds").addHandler(_UNHANDLED)
