"""The command `harmony-ds`: will it fit, how fast will it be, and what would help."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the console script."""
    from harmony_ds.cli.app import run

    sys.exit(run(sys.argv[1:]))
