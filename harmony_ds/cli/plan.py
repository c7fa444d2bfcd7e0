"""`harmony-ds plan`: the answers of `estimate` for this machine as measured now, or as a profile of it says."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from harmony_ds.cli import options
from harmony_ds.cli.answer import answer_of, reply
from harmony_ds.config import Config
from harmony_ds.errors import ProfileError
from harmony_ds.estimate.subject import load_subject
from harmony_ds.estimate.survey import Survey, measure, with_profile
from harmony_ds.offload.host_memory import free_host_bytes
from harmony_ds.profiler.profile import Profile

ABOUT = "Say how MODEL will be trained on this machine: the plan, its time and memory, and what limits it."


def register(parser: argparse.ArgumentParser) -> None:
    options.add_answer(parser)
    add_profile(parser)


def add_profile(parser: argparse.ArgumentParser) -> None:
    """Add `--profile`."""
    text = "A profile that `harmony-ds profile` saved. Without one: measure now."
    parser.add_argument("--profile", type=Path, metavar="FILE", help=text)


def command(args: argparse.Namespace) -> int:
    known = None if args.profile is None else read_profile(args.profile)
    found = answer_of(args, partial(survey_here, known), free_host_bytes())
    return reply(found, args.json, "" if args.profile is None else f"as {args.profile} says")


def survey_here(known: Profile | None, model: str, sequence: int | None, config: Config) -> Survey:
    """Load a model and survey it: measured now unless a profile of it is `known`."""
    subject = load_subject(model, "cpu" if known is None else "meta", config.micro_batch, sequence)
    return measure(subject, config) if known is None else with_profile(subject, config, known)


def read_profile(path: Path) -> Profile:
    """Read a profile that `harmony-ds profile` saved."""
    try:
        return Profile.from_json(path.read_text(encoding="utf-8"))
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error
