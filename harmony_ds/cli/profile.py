"""`harmony-ds profile`: measures a model on this machine's device and saves what was found."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harmony_ds.cli import options
from harmony_ds.cli.exits import one_sentence
from harmony_ds.subject import load_subject
from harmony_ds.survey import measure

Output = Annotated[Path, typer.Option("--output", metavar="FILE", help="Where the profile is written, as JSON.")]


def command(wanted: options.Wanted, output: Output) -> None:
    """Runs one micro-batch of MODEL, with random weights, layer by layer on the ds_config's device."""
    with one_sentence():
        config = wanted.config()
        subject = load_subject(wanted.model, wanted.shape(config), "cpu")
        profile = measure(subject.model, subject.inputs, config).profile
        output.write_text(profile.to_json(), encoding="utf-8")
    calls = len(profile.calls)
    typer.echo(
        f"{subject.name}: {calls} layer calls with {config.micro_batch} rows, on {profile.machine.name}: {output}"
    )
