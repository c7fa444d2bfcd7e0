"""`harmony-ds profile`: measures a model on this machine's device and saves what was found."""

from __future__ import annotations

from pathlib import Path

from harmony_ds.cli.options import Wanted
from harmony_ds.estimate.subject import load_subject
from harmony_ds.estimate.survey import measure


def command(wanted: Wanted, output: Path) -> None:
    """Runs one micro-batch of MODEL, with random weights, layer by layer on the ds_config's device."""
    config = wanted.config()
    subject = load_subject(wanted.model, wanted.shape(config), "cpu")
    profile = measure(subject.model, subject.inputs, config).profile
    output.write_text(profile.to_json(), encoding="utf-8")
    calls, rows = len(profile.calls), config.micro_batch
    print(f"{subject.name}: {calls} layer calls with {rows} rows, on {profile.machine.name}: {output}")
