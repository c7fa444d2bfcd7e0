"""The command `harmony-ds`: will it fit, how fast will it be, and what would help."""

from __future__ import annotations

import sys


def main() -> None:
    """The console script."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.exit(f'harmony-ds needs {error.name}, which is not installed: pip install "harmony_ds[cli]".')
    from harmony_ds.cli.app import app

    app()
