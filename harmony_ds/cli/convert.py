"""`harmony-ds convert`: a checkpoint of DeepSpeed or harmony_ds, in another layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from harmony_ds.checkpoint import Layout, convert
from harmony_ds.cli import options
from harmony_ds.cli.exits import one_sentence

Source = Annotated[
    Path, typer.Argument(metavar="SRC", help="A checkpoint, or a folder of several (then the latest, or --tag).")
]
Target = Annotated[Path, typer.Argument(metavar="DST", help="The folder to write into; made if it is not there.")]
To = Annotated[
    Layout,
    typer.Option("--to", help="The layout; hf: weights alone, as from_pretrained reads them beside a config.json."),
]
Tag = Annotated[str | None, typer.Option("--tag", help="Which checkpoint in SRC.")]
SubGroup = Annotated[
    int, typer.Option("--sub-group-size", min=1, help="deepspeed-zero3: that of the ds_config it will go on with.")
]


def command(
    source: Source,
    target: Target,
    to: To,
    tag: Tag = None,
    sub_group_size: SubGroup = 1_000_000_000,
    as_json: options.Json = False,
) -> None:
    """Writes the checkpoint SRC into DST in another layout. Pickles of DeepSpeed are read without executing them."""
    with one_sentence():
        written = convert(source, target, to, tag, sub_group_size)
    if as_json:
        typer.echo(json.dumps({"written": str(written), "layout": to.value}))
    else:
        typer.echo(f"{written} is a checkpoint of the layout {to.value}.")
