"""`harmony-ds estimate`: a model of any size on a machine that is only described, in seconds and without allocating it."""

from __future__ import annotations

from typing import Annotated

import typer

from harmony_ds.cli import options
from harmony_ds.cli.answer import Case, answer
from harmony_ds.cli.exits import one_sentence
from harmony_ds.cli.show import reply
from harmony_ds.config import Config
from harmony_ds.profiler.hardware import Hardware, hardware_of
from harmony_ds.subject import BatchShape, load_subject
from harmony_ds.survey import Survey, estimate

MachineName = Annotated[
    str,
    typer.Option("--machine", help='GPU, and if not the usual ones its link and host: "rtx4090/pcie4/desktop-ddr5".'),
]
Advice = Annotated[bool, typer.Option(help="Also say what would help most (plans a few times more).")]


def command(
    wanted: options.Planned,
    machine: MachineName = "rtx4090",
    host_memory_gib: options.HostMemory = None,
    advice: Advice = True,
    as_json: options.Json = False,
) -> None:
    """Says whether MODEL fits a machine, how fast it will train there, and what limits it. Allocates nothing."""
    with one_sentence():
        hardware = hardware_of(machine)
        case = estimated(wanted, hardware, options.host_bytes(host_memory_gib))

        def resurvey(rows: int) -> Survey:
            return _survey(wanted.model, BatchShape(rows, wanted.sequence), case.config, hardware)

        found = answer(case, resurvey, advice)
    reply(found, as_json)


def estimated(wanted: options.Wanted, hardware: Hardware, host_budget_bytes: int | None) -> Case:
    """The case of a model on a machine that is only described."""
    config = wanted.config()
    subject = load_subject(wanted.model, wanted.shape(config), "meta")
    survey = estimate(subject.model, subject.inputs, config, hardware)
    return Case(subject, config, survey, host_budget_bytes or hardware.host_budget_bytes)


def _survey(model: str, shape: BatchShape, config: Config, hardware: Hardware) -> Survey:
    subject = load_subject(model, shape, "meta")
    return estimate(subject.model, subject.inputs, config, hardware)
