"""`harmony-ds bench`: which engine to use for a model, on this machine, under a memory cap."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch

from harmony_ds.bench import engines
from harmony_ds.bench.ablation import ablated, equal_results
from harmony_ds.bench.figure import draw
from harmony_ds.bench.report import report
from harmony_ds.bench.results import Contestant, Results
from harmony_ds.bench.run import Rounds, best_micro_batch, run
from harmony_ds.bench.summary import losses_agree, summarize
from harmony_ds.bench.workload import Workload
from harmony_ds.cli import options
from harmony_ds.errors import ConfigError

ABOUT = "Train MODEL under several engines and compare step times, memory, bytes moved and losses."
LOSSES_DIFFER = 4


def register(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    add, count, names = parser.add_argument, options.at_least(1), "A,B,..."
    text = "Engines, harmony among them, by name or module:name (default: all that can run here)."
    add("--engines", metavar=names, help=text)
    add("--uncapped", metavar=names, help="Engines that run without the memory cap, beside the others.")
    text = "Micro-batches in a step; several give a curve."
    add("--accumulation", dest="counts", metavar="N,M,...", help=text)
    add("--device", choices=("cpu", "cuda"), help="Default: CUDA if there is one.")
    add("--processes", type=count, default=1, metavar="N", help="Replicas, each a process with a device of its own.")
    add("--threads", type=count, metavar="N", help="Per process (CPU: 1; CUDA: all cores).")
    add("--one-core", action="store_true", help="Pin every process to one core.")
    add("--ablate", action="store_true", help="harmony alone, each of its mechanisms switched off.")
    text = "Run the other engines at their own best micro-batch (default: yes)."
    add("--sweep", action=argparse.BooleanOptionalAction, default=True, help=text)
    add("--rounds", type=count, default=5, metavar="N", help="Timed turns of every engine.")
    add("--steps", type=count, default=2, metavar="N", help="Optimizer steps in a turn.")
    add("--warmup-steps", type=count, default=2, metavar="N", help="Steps before the first turn.")
    add("--apart", action="store_true", help="One process alive at a time (on CUDA always).")
    add("--limit-s", type=options.at_least(1, float), metavar="S", help="Begin no turn after so many seconds.")
    text = "The results, as JSON; the report (.md) and figure (.png) are written beside it."
    add("--output", type=Path, default=Path("harmony-bench.json"), metavar="FILE", help=text)
    add("--resume", action="store_true", help="Go on with what --output already holds.")
    options.add_json(parser)


def command(args: argparse.Namespace) -> int:
    contestants = list(_contestants(args))
    if not contestants:
        raise ConfigError("none of these engines can run here: name others with --engines.")
    core = 0 if args.one_core else None
    together = contestants[0].task.device == "cpu" and not args.apart
    sweeps = {}
    if args.resume and args.output.is_file():
        known = Results.load(args.output)
        sweeps = known.sweeps
        found = {label: Workload(**row.task) for label, row in known.rows.items() if label in sweeps}
        contestants = [replace(one, task=found.get(one.label, one.task)) for one in contestants]
    elif args.sweep and not args.ablate:
        for index, one in enumerate(contestants):
            if one.engine != "harmony":
                contestants[index], sweeps[one.label] = best_micro_batch(one, core, _tell)
    timing = Rounds(args.rounds, args.warmup_steps, args.steps, together, core, args.limit_s)
    results = run(contestants, timing, args.output, args.resume, _tell)
    results.sweeps.update(sweeps)
    results.save(args.output)
    figure, page = args.output.with_suffix(".png"), args.output.with_suffix(".md")
    drawn = draw(results, figure)
    text = report(results, figure if drawn else None)
    page.write_text(text + "\n", encoding="utf-8")
    print(json.dumps([asdict(one) for one in summarize(results)], indent=1) if args.json else text)
    _tell(f"written: {args.output}, {page}" + (f", {figure}" if drawn else "; a figure needs matplotlib"))
    return _exit_code(results, args.ablate)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _exit_code(results: Results, ablate: bool) -> int:
    differing = [label for label, equal in equal_results(results).items() if not equal] if ablate else []
    if differing:
        _tell(f"losses are not those of harmony as it is: {', '.join(differing)}")
    elif not ablate and not losses_agree(summarize(results)):
        _tell("losses do not agree: these engines do not compute the same.")
    else:
        return 0
    return LOSSES_DIFFER


def _contestants(args: argparse.Namespace) -> Iterator[Contestant]:
    task = _task(args)
    counts = [task.accumulation] if args.counts is None else _numbers(args.counts)
    for one in (replace(task, accumulation=count) for count in counts):
        for contestant in ablated(one) if args.ablate else _engines(one, args):
            label = contestant.label
            sized = f"{label} | {one.items:,} {task.subject.unit}" if len(counts) > 1 and not args.ablate else label
            yield replace(contestant, label=sized)


def _task(args: argparse.Namespace) -> Workload:
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"torch {torch.__version__} sees no CUDA device here: use --device cpu.")
    config, threads = options.config_of(args), 1 if device == "cpu" else torch.get_num_threads() // args.processes
    return Workload(
        model=args.model,
        ds_config={key: value for key, value in config.raw.items() if key != "train_batch_size"},
        rows=config.micro_batch,
        micro_batch=config.micro_batch,
        accumulation=config.gradient_accumulation_steps,
        sequence=args.sequence,
        device=device,
        memory_gib=config.harmony.device_memory_gib,
        threads=args.threads or threads,
        devices=args.processes,
    )


def _numbers(text: str) -> list[int]:
    counts = [int(count) for count in text.split(",") if count.isdecimal()]
    if len(counts) != text.count(",") + 1 or min(counts) < 1:
        raise ConfigError(f'--accumulation is "{text}": give whole numbers of at least 1, as 4,8,16.')
    return counts


def _engines(task: Workload, args: argparse.Namespace) -> Iterator[Contestant]:
    chosen = engines.names() if args.engines is None else args.engines.split(",")
    uncapped = args.uncapped.split(",") if args.uncapped else ()
    for name, suffix, own in (
        *((name, "", task) for name in chosen),
        *((name, ", uncapped", replace(task, memory_gib=None)) for name in uncapped),
    ):
        label = name.rpartition(":")[2] + suffix
        reason = engines.adapter(name).refusal(task)
        if reason is None:
            yield Contestant(label, name, own)
        else:
            _tell(f"{label} is left out: {reason}")
    if (args.devices or 1) > 1:  # the others run on one device
        one = {**task.ds_config, "harmony": {**task.ds_config["harmony"], "devices": 1}}
        yield Contestant("harmony, one device", "harmony", replace(task, ds_config=one))
