"""The commands, put together."""

from __future__ import annotations

import typer

from harmony_ds.cli import bench, convert, estimate, machines, plan, profile, trace
from harmony_ds.cli.options import flat

app = typer.Typer(
    name="harmony-ds",
    help="Training of models larger than the device: will it fit, how fast will it be, and what would help.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _room in (estimate, plan, profile, trace, machines, bench, convert):
    app.command(_room.__name__.rpartition(".")[2])(flat(_room.command))
