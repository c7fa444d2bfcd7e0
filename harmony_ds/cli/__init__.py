"""The command `harmony-ds`: will it fit, how fast will it be, and what would help."""

from __future__ import annotations

import atexit
import gc
import sys


def main() -> None:
    """Run the console script; garbage is looked for neither among what is imported nor when the process ends."""
    gc.disable()
    from harmony_ds.cli.app import run

    gc.enable()
    atexit.register(gc.freeze)
    sys.exit(run(sys.argv[1:]))
