"""Lines about work that takes long."""

from __future__ import annotations

import sys


def tell(line: str) -> None:
    """Print a line on standard error at once."""
    print(line, file=sys.stderr, flush=True)
