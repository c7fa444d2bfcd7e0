"""`harmony-ds bench`: compare harmony_ds with other engines on one model, on this machine, under a memory cap."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace

import torch

from harmony_ds.bench import engines
from harmony_ds.bench.ablation import ablated, differing
from harmony_ds.bench.figure import draw
from harmony_ds.bench.report import report
from harmony_ds.bench.results import Results, Rounds, Row
from harmony_ds.bench.run import choose_micro_batch, run
from harmony_ds.bench.summary import summarize
from harmony_ds.bench.workload import Workload
from harmony_ds.cli import options
from harmony_ds.cli.progress import tell
from harmony_ds.errors import ConfigError

LOSSES_DIFFER = 4


def command(args: argparse.Namespace) -> int:
    rows = dict(_rows(args))
    if not rows:
        raise ConfigError("none of these engines can run here: name others with --engines.")
    results = Results.empty(rows, Rounds(args.rounds, args.warmup_steps, args.steps))
    if args.resume and args.output.is_file():
        results = results.resumed(args.output)
    elif args.sweep and not args.ablate:
        for label, row in rows.items():
            if row.engine != "harmony":
                choose_micro_batch(label, row, tell)
    run(results, args.output, tell, args.limit_s)
    figure, page = args.output.with_suffix(".png"), args.output.with_suffix(".md")
    drawn = draw(results, figure)
    page.write_text(report(results, figure if drawn else None) + "\n", encoding="utf-8")
    print(json.dumps(asdict(results), indent=1) if args.json else report(results))
    tell(f"written: {args.output}, {page}" + (f", {figure}" if drawn else "; a figure needs matplotlib"))
    others = differing(results) if args.ablate else [one.label for one in summarize(results) if not one.losses_agree]
    if others:
        tell(f"losses are not the reference's: {', '.join(others)}")
    return LOSSES_DIFFER if others else 0


def _rows(args: argparse.Namespace) -> Iterator[tuple[str, Row]]:
    task = _task(args)
    counts = args.counts or [task.accumulation]
    for one in (replace(task, accumulation=count) for count in counts):
        size = (
            f" | {task.sample_items * one.samples:,} {task.subject.unit}" if len(counts) > 1 and not args.ablate else ""
        )
        for label, row in ablated(one).items() if args.ablate else _engines(one, args):
            yield label + size, row


def _task(args: argparse.Namespace) -> Workload:
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"torch {torch.__version__} sees no CUDA device here: use --device cpu.")
    config, threads = options.config_of(args), 1 if device == "cpu" else torch.get_num_threads() // args.processes
    return Workload(
        model=args.model,
        ds_config=dict(config.raw),
        rows=config.micro_batch,
        micro_batch=config.micro_batch,
        accumulation=config.gradient_accumulation_steps,
        sequence=args.sequence,
        device=device,
        memory_gib=config.harmony.device_memory_gib,
        threads=args.threads or threads,
        devices=args.processes,
    )


def _engines(task: Workload, args: argparse.Namespace) -> Iterator[tuple[str, Row]]:
    chosen = args.engines or [*engines.ENGINES]
    for name, suffix, own in (
        *((name, "", task) for name in chosen),
        *((name, ", uncapped", replace(task, memory_gib=None)) for name in args.uncapped),
    ):
        label = name.rpartition(":")[2] + suffix
        reason = engines.adapter(name).refusal(task)
        if reason is None:
            yield label, Row(name, own)
        else:
            tell(f"{label} is left out: {reason}")
    if (args.devices or 1) > 1:  # the others run on one device
        one = {**task.ds_config, "harmony": {**task.ds_config["harmony"], "devices": 1}}
        yield "harmony, one device", Row("harmony", replace(task, ds_config=one))
