"""Tell the user of a command what it is busy with."""

from __future__ import annotations

import sys


def tell(line: str) -> None:
    """Print a line on standard error at once."""
    print(line, file=sys.stderr, flush=True)
