"""The commands, put together."""

from __future__ import annotations

import typer

from harmony_ds.cli import convert, estimate, machines, plan, profile, trace

app = typer.Typer(
    name="harmony-ds",
    help="Training of models larger than the device: will it fit, how fast will it be, and what would help.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("estimate")(estimate.command)
app.command("plan")(plan.command)
app.command("profile")(profile.command)
app.command("trace")(trace.command)
app.command("machines")(machines.command)
app.command("convert")(convert.command)
