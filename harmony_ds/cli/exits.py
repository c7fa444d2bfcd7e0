"""How commands end: 0 it fits, 1 the input is wrong, 2 the command line is wrong (typer's), 3 it does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from harmony_ds.errors import HarmonyError

WRONG_INPUT = 1
DOES_NOT_FIT = 3


@contextmanager
def one_sentence() -> Iterator[None]:
    """Errors of the user's input end the command with what they say, and no traceback."""
    try:
        yield
    except (HarmonyError, OSError) as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"error: {error}", markup=False)
        raise typer.Exit(WRONG_INPUT) from error
