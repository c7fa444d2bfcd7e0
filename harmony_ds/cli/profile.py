"""`harmony-ds profile`: measure a model on this machine's device and save the result."""

from __future__ import annotations

import argparse

from harmony_ds.cli import options
from harmony_ds.cli.progress import tell
from harmony_ds.estimate.subject import load_subject
from harmony_ds.estimate.survey import measure
from harmony_ds.scheduler.grid import counted


def command(args: argparse.Namespace) -> int:
    config = options.config_of(args)
    tell(f"measuring {args.model} ...")
    subject = load_subject(args.model, "cpu", config.micro_batch, args.sequence)
    profile = measure(subject, config).profile
    args.output.write_text(profile.to_json(), encoding="utf-8")
    calls, rows = counted(len(profile.calls), "layer call"), counted(config.micro_batch, "row")
    print(f"{subject.name}: {calls} with {rows}, on {profile.machine.name}: {args.output}")
    return 0
