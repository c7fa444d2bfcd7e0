"""`harmony-ds estimate`: forecast the training of a model on a machine that is only described; allocates nothing."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

from harmony_ds.cli.answer import answer, reply
from harmony_ds.config import Config
from harmony_ds.errors import ConfigError
from harmony_ds.estimate.lora import add_adapters
from harmony_ds.estimate.quantized import Quantization, quantize_linear_layers
from harmony_ds.estimate.subject import load_subject
from harmony_ds.estimate.survey import Survey, estimate
from harmony_ds.profiling.hardware import hardware_of
from harmony_ds.runtime.garbage import no_collections

_BF16 = "bf16"


def command(args: argparse.Namespace) -> int:
    if args.base != _BF16 and args.lora is None:
        raise ConfigError(
            f"--base {args.base} freezes the model's layers: say what is trained beside them (--lora 16)."
        )
    hardware = replace(hardware_of(args.machine or "rtx4090"), disk_gb_per_s=args.nvme_gb_per_s)

    def survey(config: Config, base: str = args.base) -> Survey:
        subject = load_subject(args.model, "meta", config.micro_batch, args.sequence)
        if base != _BF16:
            quantize_linear_layers(subject.model, Quantization(base))
        if args.lora is not None:
            add_adapters(subject.model, args.lora)
        return estimate(subject, config, hardware)

    smallest = Quantization.NF4.value
    with_nf4 = None if args.lora is None or args.base == smallest else partial(survey, base=smallest)
    with no_collections():
        found = answer(args, survey, hardware.host_budget_bytes, with_nf4)
    note = "" if args.machine else "assumed: name yours with --machine; `harmony-ds machines` lists them"
    return reply(found, args.json, note)
