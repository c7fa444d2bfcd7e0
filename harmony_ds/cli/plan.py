"""`harmony-ds plan`: forecast as `estimate` does, for this machine, measured now or by a saved profile."""

from __future__ import annotations

import argparse
from functools import partial

from harmony_ds.cli.answer import answer, reply
from harmony_ds.config import Config
from harmony_ds.errors import ProfileError
from harmony_ds.estimate.subject import load_subject
from harmony_ds.estimate.survey import Survey, measure, with_profile
from harmony_ds.offload.host_memory import free_host_bytes
from harmony_ds.scheduler.profile import Profile


def command(args: argparse.Namespace) -> int:
    found = answer(args, partial(survey_here, args), free_host_bytes())
    return reply(found, args.json, "" if args.profile is None else f"as {args.profile} says")


def survey_here(args: argparse.Namespace, config: Config) -> Survey:
    """Load the model and survey it, by its profile or measured now."""
    if args.profile is None:
        return measure(load_subject(args.model, "cpu", config.micro_batch, args.sequence), config)
    try:
        profile = Profile.from_json(args.profile.read_text(encoding="utf-8"))
    except ProfileError as error:
        raise ProfileError(f"{args.profile}: {error}") from error
    return with_profile(load_subject(args.model, "meta", config.micro_batch, args.sequence), config, profile)
