"""`harmony-ds estimate`: forecast the training of a model on a machine that is only described; allocates nothing."""

from __future__ import annotations

import argparse
import gc
from dataclasses import replace

from harmony_ds.cli import options
from harmony_ds.cli.answer import answer, reply
from harmony_ds.config import Config
from harmony_ds.errors import ConfigError
from harmony_ds.estimate.lora import add_adapters
from harmony_ds.estimate.quantized import Quantization, quantize_linear_layers
from harmony_ds.estimate.subject import load_subject
from harmony_ds.estimate.survey import Survey, estimate
from harmony_ds.profiling.hardware import hardware_of

ABOUT = "Say whether MODEL fits a machine, how fast it will train there, and what limits it. Allocates nothing."

_BF16 = "bf16"


def register(parser: argparse.ArgumentParser) -> None:
    options.add_answer(parser)
    text = 'GPU, and if not the usual ones its link and host: "rtx4090/pcie4/desktop-ddr5" (without: rtx4090).'
    parser.add_argument("--machine", metavar="NAME", help=text)
    text = "A disk that reads or writes so much in a second, with what the ds_config puts there, or masters and state."
    parser.add_argument("--nvme-gb-per-s", type=options.at_least(0.001, float), metavar="GB", help=text)
    text = "Train LoRA adapters of this rank beside all linear layers but the head; MODEL itself is frozen. Needs peft."
    parser.add_argument("--lora", type=options.at_least(1), metavar="RANK", help=text)
    text = "What the frozen linear layers beside adapters are stored in: in 16 bits (bf16), or quantized (nf4, int8)."
    parser.add_argument("--base", choices=[_BF16, *(how.value for how in Quantization)], default=_BF16, help=text)


def command(args: argparse.Namespace) -> int:
    if args.base != _BF16 and args.lora is None:
        raise ConfigError(
            f"--base {args.base} freezes the model's layers: say what is trained beside them (--lora 16)."
        )
    hardware = replace(hardware_of(args.machine or "rtx4090"), disk_gb_per_s=args.nvme_gb_per_s)

    def survey(config: Config) -> Survey:
        subject = load_subject(args.model, "meta", config.micro_batch, args.sequence)
        if args.base != _BF16:
            quantize_linear_layers(subject.model, Quantization(args.base))
        if args.lora is not None:
            add_adapters(subject.model, args.lora)
        return estimate(subject, config, hardware)

    gc.disable()  # an estimate leaves little to collect, and a fifth of its time went into looking for it
    try:
        found = answer(args, survey, hardware.host_budget_bytes)
    finally:
        gc.enable()
    note = "" if args.machine else "assumed: name yours with --machine; `harmony-ds machines` lists them"
    return reply(found, args.json, note)
