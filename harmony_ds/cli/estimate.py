"""`harmony-ds estimate`: a model of any size on a machine that is only described, in seconds and without allocating it."""

from __future__ import annotations

from harmony_ds.cli import options
from harmony_ds.cli.answer import Case, answer
from harmony_ds.cli.show import reply
from harmony_ds.config import Config
from harmony_ds.profiler.hardware import Hardware, hardware_of
from harmony_ds.subject import BatchShape, load_subject
from harmony_ds.survey import Survey, estimate

_ASSUMED = "rtx4090"


def command(
    wanted: options.Planned,
    machine: str | None = None,
    host_memory_gib: float | None = None,
    advice: bool = True,
    as_json: bool = False,
) -> int:
    """Says whether MODEL fits a machine, how fast it will train there, and what limits it. Allocates nothing."""
    hardware = hardware_of(machine or _ASSUMED)
    case = estimated(wanted, hardware, options.host_bytes(host_memory_gib))

    def resurvey(rows: int) -> Survey:
        return _survey(wanted.model, BatchShape(rows, wanted.sequence), case.config, hardware)

    note = "" if machine else "assumed: name yours with --machine; `harmony-ds machines` lists them"
    return reply(answer(case, resurvey, advice), as_json, note)


def estimated(wanted: options.Wanted, hardware: Hardware, host_budget_bytes: int | None) -> Case:
    """The case of a model on a machine that is only described."""
    config = wanted.config()
    subject = load_subject(wanted.model, wanted.shape(config), "meta")
    survey = estimate(subject.model, subject.inputs, config, hardware)
    return Case(subject, config, survey, host_budget_bytes or hardware.host_budget_bytes)


def _survey(model: str, shape: BatchShape, config: Config, hardware: Hardware) -> Survey:
    subject = load_subject(model, shape, "meta")
    return estimate(subject.model, subject.inputs, config, hardware)
