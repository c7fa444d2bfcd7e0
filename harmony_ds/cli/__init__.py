"""The command `harmony-ds`: say whether a model fits a machine, how fast it trains there, and what would help."""

from __future__ import annotations

import atexit
import gc
import sys


def main() -> None:
    """Run the console script, and look for no garbage when the process ends."""
    from harmony_ds.cli.app import run

    atexit.register(gc.freeze)
    sys.exit(run(sys.argv[1:]))
