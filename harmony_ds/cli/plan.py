"""`harmony-ds plan`: what `estimate` says, for this machine as measured now, or as it was measured before."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from harmony_ds.cli.answer import answered
from harmony_ds.cli.options import Asked
from harmony_ds.cli.show import reply
from harmony_ds.config import Config
from harmony_ds.errors import ConfigError, ProfileError
from harmony_ds.estimate.subject import BatchShape, Subject, load_subject
from harmony_ds.estimate.survey import Survey, measure, with_profile
from harmony_ds.offload.host_limits import free_host_bytes
from harmony_ds.profiler.profile import Profile


def command(asked: Asked, profile: Path | None = None) -> int:
    """Says how MODEL will be trained on this machine: the plan, its time and memory, and what limits it."""
    known = None if profile is None else read_profile(profile)
    found = answered(asked, partial(surveyed, known=known), free_host_bytes())
    return reply(found, asked.as_json, "" if profile is None else f"as {profile} says")


def surveyed(model: str, shape: BatchShape, config: Config, known: Profile | None) -> tuple[Subject, Survey]:
    """The model, measured now unless a profile of it is `known`."""
    if known is None:
        subject = load_subject(model, shape, "cpu")
        return subject, measure(subject.model, subject.inputs, config)
    subject = load_subject(model, shape, "meta")
    return subject, with_profile(subject.model, subject.inputs, config, known)


def read_profile(path: Path) -> Profile:
    """A profile that `harmony-ds profile` saved."""
    if not path.is_file():
        raise ConfigError(f"there is no profile {path}: make one with `harmony-ds profile`.")
    try:
        return Profile.from_json(path.read_text(encoding="utf-8"))
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error
