"""`harmony-ds bench`: which engine to use for a model, on this machine, under a memory cap."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from harmony_ds.bench import engines
from harmony_ds.bench.ablation import ablated, equal_results
from harmony_ds.bench.page import write_page
from harmony_ds.bench.results import Contestant, Results
from harmony_ds.bench.run import Rounds, best_micro_batch, run
from harmony_ds.bench.summary import Summary, losses_agree, summarize
from harmony_ds.bench.table import report
from harmony_ds.bench.workload import Workload
from harmony_ds.cli import options
from harmony_ds.errors import ConfigError

LOSSES_DIFFER = 4


@dataclass(frozen=True)
class Raced(options.Wanted):
    """The model and the ds_config, for several engines."""

    engines: str | None = None
    accumulation: str | None = None
    device_memory_gib: float | None = None
    device: str | None = None
    threads: int | None = None
    processes: int = 1
    uncapped: str | None = None
    ablate: bool = False

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

    rounds: int = 5
    steps: int = 2
    warmup_steps: int = 2
    one_core: bool = False
    limit_s: float | None = None
    sweep: bool | None = None
    together: bool | None = None

    def timing(self, device: str) -> Rounds:
        alive = device == "cpu" if self.together is None else self.together
        return Rounds(self.rounds, self.warmup_steps, self.steps, alive, 0 if self.one_core else None, self.limit_s)


def command(
    wanted: Raced, turns: Turns, output: Path = Path("harmony-bench.json"), resume: bool = False, as_json: bool = False
) -> int:
    """Trains MODEL under several engines and compares step times, memory, bytes moved and losses."""
    contestants = list(_contestants(wanted))
    if not contestants:
        raise ConfigError("none of these engines can run here: name others with --engines.")
    timing = turns.timing(wanted.on)
    sweeps: dict[str, dict[str, Any]] = {}
    if not wanted.ablate and (wanted.on == "cuda" if turns.sweep is None else turns.sweep):
        contestants, sweeps = _with_best(contestants, timing, output, resume)
    results = run(contestants, timing, output, resume, _tell)
    results.sweeps.update(sweeps)
    results.save(output)
    page = output.with_suffix(".html")
    write_page(
        results, page, "harmony_ds, mechanism by mechanism" if wanted.ablate else "Training engines, head to head"
    )
    summaries = summarize(results)
    if as_json:
        print(json.dumps([asdict(summary) for summary in summaries], indent=1))
    else:
        print(report(results, summaries))
    print(f"written: {output}, {page}", file=sys.stderr)
    return _verdict(results, summaries, wanted.ablate)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _verdict(results: Results, summaries: list[Summary], ablate: bool) -> int:
    """The exit code: whether all computed the same."""
    if ablate:
        differing = [label for label, equal in equal_results(results).items() if not equal]
        if differing:
            _tell(f"losses are not those of harmony as it is: {', '.join(differing)}")
        return LOSSES_DIFFER if differing else 0
    agree = losses_agree(summaries)
    if not agree:
        _tell("losses do not agree: these engines do not compute the same.")
    return 0 if agree else LOSSES_DIFFER


def _contestants(wanted: Raced) -> Iterator[Contestant]:
    task = _task(wanted)
    counts = _counts(wanted.accumulation, task.accumulation)
    for one in (replace(task, accumulation=count) for count in counts):
        yield from ablated(one) if wanted.ablate else _engines(one, wanted, len(counts) > 1)


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
        threads=wanted.threads or (1 if wanted.on == "cpu" else torch.get_num_threads() // wanted.processes),
        devices=wanted.processes,
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


def _engines(task: Workload, wanted: Raced, several: bool) -> Iterator[Contestant]:
    """Ours first."""
    every = sorted(engines.names(), key=lambda name: name != "harmony")
    free = replace(task, memory_gib=None)
    for name, label, own in (
        *((name, name, task) for name in (every if wanted.engines is None else wanted.engines.split(","))),
        *((name, f"{name}, uncapped", free) for name in (wanted.uncapped.split(",") if wanted.uncapped else ())),
    ):
        reason = engines.adapter(name).refusal(task)
        if reason is not None:
            _tell(f"{label} is left out: {reason}")
        else:
            yield Contestant(f"{label} | {task.items:,} {task.subject.unit}" if several else label, name, own)
    if (wanted.devices or 1) > 1:  # the others run on one device
        ours = {**task.ds_config, "harmony": {**task.ds_config["harmony"], "devices": 1}}
        label = "harmony, one device"
        one = replace(task, ds_config=ours)
        yield Contestant(f"{label} | {task.items:,} {task.subject.unit}" if several else label, "harmony", one)


def _with_best(
    contestants: list[Contestant], timing: Rounds, output: Path, resume: bool
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
            best, sweeps[contestant.label] = best_micro_batch(contestant, timing, _tell)
            if best is not None:
                found.append(best)
    return found, sweeps
