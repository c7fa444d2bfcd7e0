"""`harmony-ds bench`: which engine to use for a model, on this machine, under a memory cap."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from harmony_ds.bench import engines
from harmony_ds.bench.ablation import ablated, equal_results
from harmony_ds.bench.page import write_page
from harmony_ds.bench.results import Contestant, Results
from harmony_ds.bench.run import Tell, Timing, best_micro_batch, run
from harmony_ds.bench.summary import losses_agree, summarize
from harmony_ds.bench.table import table
from harmony_ds.bench.task import Task
from harmony_ds.cli import options
from harmony_ds.cli.exits import one_sentence
from harmony_ds.errors import ConfigError

LOSSES_DIFFER = 4

Engines = Annotated[
    str | None,
    typer.Option("--engines", metavar="A,B,...", help="Engines, harmony among them (default: all that can run here)."),
]
Accumulations = Annotated[
    str | None,
    typer.Option("--accumulation", metavar="N,M,...", help="Micro-batches in a step; several give a curve."),
]
Output = Annotated[
    Path, typer.Option("--output", metavar="FILE", help="The results, as JSON; the page is written beside it.")
]
Uncapped = Annotated[
    str | None,
    typer.Option("--uncapped", metavar="A,B,...", help="Engines that run without the memory cap, beside the others."),
]
Sweep = Annotated[
    bool | None,
    typer.Option(
        "--sweep/--no-sweep",
        help="Also run the others at their own best micro-batch (default: where the memory cap holds for all, on CUDA).",
    ),
]
Together = Annotated[
    bool | None,
    typer.Option(
        "--together/--apart", help="All processes live at once, or one at a time (default: together on the CPU)."
    ),
]


def command(  # noqa: PLR0913, PLR0917 - one per option
    model: options.Model,
    output: Output = Path("harmony-bench.json"),
    engine_names: Engines = None,
    ds_config: options.DsConfig = None,
    micro_batch: options.MicroBatch = None,
    sequence: options.Sequence = None,
    accumulation: Accumulations = None,
    device_memory_gib: options.DeviceMemory = None,
    device: Annotated[
        str | None, typer.Option("--device", help='"cpu" or "cuda" (default: CUDA if there is one).')
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Timed turns of every engine.")] = 5,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps in a turn.")] = 2,
    warmup_steps: Annotated[int, typer.Option("--warmup-steps", min=1, help="Steps before the first turn.")] = 2,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Per process (CPU: 1; CUDA: all cores).")
    ] = None,
    one_core: Annotated[bool, typer.Option("--one-core", help="Pin every process to one core.")] = False,
    limit_s: Annotated[
        float | None, typer.Option("--limit-s", min=1, help="Begin no turn after so many seconds.")
    ] = None,
    uncapped: Uncapped = None,
    sweep: Sweep = None,
    together: Together = None,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="harmony alone, each of its mechanisms switched off.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what --output already holds.")] = False,
    as_json: options.Json = False,
) -> None:
    """Trains MODEL under several engines and compares step times, memory, bytes moved and losses."""
    console = Console(stderr=as_json, highlight=False, soft_wrap=False)
    with one_sentence():
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device not in ("cpu", "cuda"):
            raise ConfigError(f'--device is "cpu" or "cuda", not "{device}".')
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"torch {torch.__version__} sees no CUDA device here: use --device cpu.")
        task = _task(options.Wanted(ds_config, micro_batch, sequence, None, device_memory_gib), model, device, threads)
        core = 0 if one_core else None
        alive = device == "cpu" if together is None else together
        timing = Timing(rounds, warmup_steps, steps, alive, core, limit_s)
        tasks = [replace(task, accumulation=count) for count in _counts(accumulation, task.accumulation)]
        tell = _teller(console)
        contestants = [
            c
            for one in tasks
            for c in (ablated(one) if ablate else _contestants(one, engine_names, uncapped, len(tasks) > 1, tell))
        ]
        if not contestants:
            raise ConfigError("none of these engines can run here: name others with --engines.")
        sweeps: dict[str, dict[str, Any]] = {}
        if not ablate and (device == "cuda" if sweep is None else sweep):
            contestants, sweeps = _with_best(contestants, timing, output, resume, tell)
        results = run(contestants, timing, output, resume, tell)
        results.sweeps.update(sweeps)
        results.save(output)
    page = output.with_suffix(".html")
    write_page(results, page, "harmony_ds, mechanism by mechanism" if ablate else "Training engines, head to head")
    _finish(console, results, (output, page), as_json, ablate)


def _task(wanted: options.Wanted, model: str, device: str, threads: int | None) -> Task:
    config = wanted.config()
    raw = {key: value for key, value in config.raw.items() if key != "train_batch_size"}
    memory = config.harmony.device_memory_gib
    return Task(
        model=model,
        ds_config=copy.deepcopy(raw),
        rows=config.micro_batch,
        micro_batch=config.micro_batch,
        accumulation=config.gradient_accumulation_steps,
        sequence=wanted.sequence,
        device=device,
        memory_gib=memory,
        threads=threads or (1 if device == "cpu" else torch.get_num_threads()),
    )


def _counts(given: str | None, default: int) -> list[int]:
    if given is None:
        return [default]
    try:
        counts = [int(count) for count in given.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise ConfigError(f'--accumulation is "{given}": give whole numbers of at least 1, as 4,8,16.')
    return counts


def _contestants(
    task: Task, given: str | None, uncapped: str | None, several: bool, tell: Tell
) -> Iterator[Contestant]:
    """Ours first."""
    wanted = sorted(engines.names(), key=lambda name: name != "harmony") if given is None else given.split(",")
    free = replace(task, memory_gib=None)
    for name, label, own in (
        *((name, name, task) for name in wanted),
        *((name, f"{name}, uncapped", free) for name in (uncapped.split(",") if uncapped else ())),
    ):
        reason = engines.adapter(name).unavailable(task)
        if reason is not None:
            tell(f"{label} is left out: {reason}")
        else:
            yield Contestant(f"{label} | {task.items:,} {task.subject.unit}" if several else label, name, own)


def _with_best(
    contestants: list[Contestant], timing: Timing, output: Path, resume: bool, tell: Tell
) -> tuple[list[Contestant], dict[str, dict[str, Any]]]:
    """The contestants, and those of them that are not ours once more at their best micro-batch."""
    if resume and output.is_file():
        begun = Results.load(output)
        known = begun.wanted["contestants"]
        return [Contestant(label, one["engine"], Task(**one["task"])) for label, one in known.items()], begun.sweeps
    found: list[Contestant] = []
    sweeps: dict[str, dict[str, Any]] = {}
    for contestant in contestants:
        found.append(contestant)
        if contestant.engine != "harmony" and contestant.task.memory_gib is not None:
            best, sweeps[contestant.label] = best_micro_batch(contestant, timing, tell)
            if best is not None:
                found.append(best)
    return found, sweeps


def _teller(console: Console) -> Tell:
    def tell(line: str) -> None:
        console.print(f"[dim]{line}[/]" if console.is_terminal else line, soft_wrap=True)

    return tell


def _finish(console: Console, results: Results, written: tuple[Path, Path], as_json: bool, ablate: bool) -> None:
    summaries = summarize(results)
    if as_json:
        typer.echo(json.dumps([asdict(summary) for summary in summaries], indent=1))
    wide = Console(stderr=as_json, highlight=False, width=max(console.width, 190))
    wide.print(table(summaries, results.unit))
    if any(summary.traffic == "by formula" for summary in summaries):
        console.print("* by formula, not counted")
    console.print(f"written: {written[0]}, {written[1]}", markup=False, soft_wrap=True)
    if ablate:
        differing = [label for label, equal in equal_results(results).items() if not equal]
        if differing:
            console.print(f"losses are not those of harmony as it is: {', '.join(differing)}", markup=False)
            raise typer.Exit(LOSSES_DIFFER)
    elif not losses_agree(summaries):
        console.print("losses do not agree: these engines do not compute the same.")
        raise typer.Exit(LOSSES_DIFFER)
