"""What the engine says while its user waits: lines of the logger `harmony_ds.status`.

If the program handles no logs of ours, the lines go to standard error.
"""

from __future__ import annotations

import logging
import sys

STATUS = logging.getLogger("harmony_ds.status")


def say(text: str) -> None:
    """Log `text` where a user sees it by default."""
    # A level that the program or the ds_config's "log_level" has set for all of our loggers is theirs.
    STATUS.setLevel(logging.INFO if logging.getLogger("harmony_ds").level == logging.NOTSET else logging.NOTSET)
    if not STATUS.handlers:
        STATUS.addHandler(_UnhandledToStderr())
    STATUS.info("%s", text)


class _UnhandledToStderr(logging.Handler):
    """Writes what no other handler of the program gets to standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return
            logger = logger.parent if logger.propagate else None
        sys.stderr.write(f"[harmony_ds] {record.getMessage()}\n")
        sys.stderr.flush()
