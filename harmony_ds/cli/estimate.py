"""`harmony-ds estimate`: a model of any size on a machine that is only described, in seconds and without allocating it."""

from __future__ import annotations

from functools import partial

from harmony_ds.cli import options
from harmony_ds.cli.answer import Case, answered
from harmony_ds.cli.show import reply
from harmony_ds.config import Config
from harmony_ds.estimate.subject import BatchShape, Subject, load_subject
from harmony_ds.estimate.survey import Survey, estimate
from harmony_ds.profiler.hardware import Hardware, hardware_of

_ASSUMED = "rtx4090"


def command(asked: options.Asked, machine: str | None = None) -> int:
    """Says whether MODEL fits a machine, how fast it will train there, and what limits it. Allocates nothing."""
    hardware = hardware_of(machine or _ASSUMED)
    found = answered(asked, partial(_surveyed, hardware=hardware), hardware.host_budget_bytes)
    note = "" if machine else "assumed: name yours with --machine; `harmony-ds machines` lists them"
    return reply(found, asked.as_json, note)


def estimated(wanted: options.Wanted, hardware: Hardware, host_budget_bytes: int | None) -> Case:
    """The case of a model on a machine that is only described."""
    config = wanted.config()
    subject, survey = _surveyed(wanted.model, wanted.shape(config), config, hardware)
    return Case(subject, config, survey, host_budget_bytes or hardware.host_budget_bytes)


def _surveyed(model: str, shape: BatchShape, config: Config, hardware: Hardware) -> tuple[Subject, Survey]:
    subject = load_subject(model, shape, "meta")
    return subject, estimate(subject.model, subject.inputs, config, hardware)
