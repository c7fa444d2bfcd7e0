"""`harmony-ds bench`: which engine to use for a model, on this machine, under a memory cap."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from harmony_ds.bench import engines
from harmony_ds.bench.ablation import ablated, equal_results
from harmony_ds.bench.page import write_page
from harmony_ds.bench.results import Contestant, Results
from harmony_ds.bench.run import Rounds, Tell, best_micro_batch, run
from harmony_ds.bench.summary import losses_agree, summarize
from harmony_ds.bench.table import table
from harmony_ds.bench.workload import Workload
from harmony_ds.cli import options
from harmony_ds.cli.exits import one_sentence
from harmony_ds.errors import ConfigError

LOSSES_DIFFER = 4


@dataclass(frozen=True)
class Raced(options.Wanted):
    """The model and the ds_config, for several engines."""

    engines: Annotated[
        str | None,
        typer.Option(
            "--engines", metavar="A,B,...", help="Engines, harmony among them (default: all that can run here)."
        ),
    ] = None
    counts: Annotated[
        str | None,
        typer.Option("--accumulation", metavar="N,M,...", help="Micro-batches in a step; several give a curve."),
    ] = None
    device_memory_gib: Annotated[float | None, options.of_key("harmony.device_memory_gib")] = None
    device: Annotated[str | None, typer.Option("--device", help='"cpu" or "cuda" (default: CUDA if there is one).')] = (
        None
    )
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Per process (CPU: 1; CUDA: all cores).")] = (
        None
    )
    uncapped: Annotated[
        str | None,
        typer.Option(
            "--uncapped", metavar="A,B,...", help="Engines that run without the memory cap, beside the others."
        ),
    ] = None
    ablate: Annotated[bool, typer.Option("--ablate", help="harmony alone, each of its mechanisms switched off.")] = (
        False
    )

    @property
    def on(self) -> str:
        """The device.

        Raises:
            ConfigError: it is not there.
        """
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device not in ("cpu", "cuda"):
            raise ConfigError(f'--device is "cpu" or "cuda", not "{device}".')
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"torch {torch.__version__} sees no CUDA device here: use --device cpu.")
        return device


@dataclass(frozen=True)
class Turns:
    """How much is measured, and how."""

    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Timed turns of every engine.")] = 5
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps in a turn.")] = 2
    warmup_steps: Annotated[int, typer.Option("--warmup-steps", min=1, help="Steps before the first turn.")] = 2
    one_core: Annotated[bool, typer.Option("--one-core", help="Pin every process to one core.")] = False
    limit_s: Annotated[float | None, typer.Option("--limit-s", min=1, help="Begin no turn after so many seconds.")] = (
        None
    )
    sweep: Annotated[
        bool | None,
        typer.Option(
            "--sweep/--no-sweep",
            help="Also run the others at their own best micro-batch (default: where the memory cap holds for all, on "
            "CUDA).",
        ),
    ] = None
    together: Annotated[
        bool | None,
        typer.Option(
            "--together/--apart", help="All processes live at once, or one at a time (default: together on the CPU)."
        ),
    ] = None

    def timing(self, device: str) -> Rounds:
        alive = device == "cpu" if self.together is None else self.together
        return Rounds(self.rounds, self.warmup_steps, self.steps, alive, 0 if self.one_core else None, self.limit_s)


Output = Annotated[
    Path, typer.Option("--output", metavar="FILE", help="The results, as JSON; the page is written beside it.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with what --output already holds.")]


def command(
    wanted: Raced,
    turns: Turns,
    output: Output = Path("harmony-bench.json"),
    resume: Resume = False,
    as_json: options.Json = False,
) -> None:
    """Trains MODEL under several engines and compares step times, memory, bytes moved and losses."""
    console = Console(stderr=as_json, highlight=False, soft_wrap=False)
    with one_sentence():
        tell = _teller(console)
        contestants = list(_contestants(wanted, tell))
        if not contestants:
            raise ConfigError("none of these engines can run here: name others with --engines.")
        timing = turns.timing(wanted.on)
        sweeps: dict[str, dict[str, Any]] = {}
        if not wanted.ablate and (wanted.on == "cuda" if turns.sweep is None else turns.sweep):
            contestants, sweeps = _with_best(contestants, timing, output, resume, tell)
        results = run(contestants, timing, output, resume, tell)
        results.sweeps.update(sweeps)
        results.save(output)
    page = output.with_suffix(".html")
    write_page(
        results, page, "harmony_ds, mechanism by mechanism" if wanted.ablate else "Training engines, head to head"
    )
    _finish(console, results, (output, page), as_json, wanted.ablate)


def _contestants(wanted: Raced, tell: Tell) -> Iterator[Contestant]:
    task = _task(wanted)
    counts = _counts(wanted.counts, task.accumulation)
    for one in (replace(task, accumulation=count) for count in counts):
        yield from ablated(one) if wanted.ablate else _engines(one, wanted, len(counts) > 1, tell)


def _task(wanted: Raced) -> Workload:
    config = wanted.config()
    raw = {key: value for key, value in config.raw.items() if key != "train_batch_size"}
    return Workload(
        model=wanted.model,
        ds_config=copy.deepcopy(raw),
        rows=config.micro_batch,
        micro_batch=config.micro_batch,
        accumulation=config.gradient_accumulation_steps,
        sequence=wanted.sequence,
        device=wanted.on,
        memory_gib=config.harmony.device_memory_gib,
        threads=wanted.threads or (1 if wanted.on == "cpu" else torch.get_num_threads()),
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


def _engines(task: Workload, wanted: Raced, several: bool, tell: Tell) -> Iterator[Contestant]:
    """Ours first."""
    every = sorted(engines.names(), key=lambda name: name != "harmony")
    free = replace(task, memory_gib=None)
    for name, label, own in (
        *((name, name, task) for name in (every if wanted.engines is None else wanted.engines.split(","))),
        *((name, f"{name}, uncapped", free) for name in (wanted.uncapped.split(",") if wanted.uncapped else ())),
    ):
        reason = engines.adapter(name).unavailable(task)
        if reason is not None:
            tell(f"{label} is left out: {reason}")
        else:
            yield Contestant(f"{label} | {task.items:,} {task.subject.unit}" if several else label, name, own)


def _with_best(
    contestants: list[Contestant], timing: Rounds, output: Path, resume: bool, tell: Tell
) -> tuple[list[Contestant], dict[str, dict[str, Any]]]:
    """The contestants, and those of them that are not ours once more at their best micro-batch."""
    if resume and output.is_file():
        begun = Results.load(output)
        known = begun.wanted["contestants"]
        return [Contestant(label, one["engine"], Workload(**one["task"])) for label, one in known.items()], begun.sweeps
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
