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


def command(  # noqa: PLR0913, PLR0917 - one per option
    model: options.Model,
    machine: MachineName = "rtx4090",
    ds_config: options.DsConfig = None,
    micro_batch: options.MicroBatch = None,
    sequence: options.Sequence = None,
    accumulation: options.Accumulation = None,
    device_memory_gib: options.DeviceMemory = None,
    host_memory_gib: options.HostMemory = None,
    advice: Advice = True,
    as_json: options.Json = False,
) -> None:
    """Says whether MODEL fits a machine, how fast it will train there, and what limits it. Allocates nothing."""
    wanted = options.Wanted(ds_config, micro_batch, sequence, accumulation, device_memory_gib)
    with one_sentence():
        hardware = hardware_of(machine)
        case = estimated(model, wanted, hardware, options.host_bytes(host_memory_gib))
        found = answer(case, lambda rows: _survey(model, BatchShape(rows, sequence), case.config, hardware), advice)
    reply(found, as_json)


def estimated(model: str, wanted: options.Wanted, hardware: Hardware, host_budget_bytes: int | None) -> Case:
    """The case of a model on a machine that is only described."""
    config = wanted.config()
    subject = load_subject(model, wanted.shape(config), "meta")
    survey = estimate(subject.model, subject.inputs, config, hardware)
    return Case(subject, config, survey, host_budget_bytes or hardware.host_budget_bytes)


def _survey(model: str, shape: BatchShape, config: Config, hardware: Hardware) -> Survey:
    subject = load_subject(model, shape, "meta")
    return estimate(subject.model, subject.inputs, config, hardware)
