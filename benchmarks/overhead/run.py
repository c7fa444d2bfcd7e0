"""What the engine costs: step time of harmony_ds against plain PyTorch, ZeRO-3 offload and ZeRO-2 offload.

python benchmarks/overhead/run.py --dtype fp32
python benchmarks/overhead/run.py --dtype fp32 --one-core
python benchmarks/overhead/run.py --breakdown
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import breakdown
import report
from rounds import Entry, Timing, measure, start
from workload import Workload

RESULTS = Path(__file__).resolve().parents[1] / "results"
ENGINES = ("plain", "harmony", "zero3_offload", "zero2_offload")
_SHAPE = ("hidden", "layers", "heads", "intermediate", "vocabulary", "sequence", "micro_batch", "accumulation")


def main() -> int:
    """1 if losses do not agree. An engine that fails is a row of the report."""
    args = _arguments()
    core = min(os.sched_getaffinity(0)) if args.one_core else None
    timing = Timing(args.rounds, args.warmup_rounds, args.steps_per_round, core, args.limit_s)
    workload = Workload(dtype=args.dtype, **{name: getattr(args, name) for name in _SHAPE})
    if args.breakdown:
        return _break_down(breakdown.tiny(workload), timing, args.out)
    budget = args.budget_gib if args.budget_gib is not None else 0.78 * workload.weight_gib
    return _compare(replace(workload, budget_gib=round(budget, 6)), timing, args.engines, args.out)


def _compare(workload: Workload, timing: Timing, engines: list[str], out: Path | None) -> int:
    before = report.machine()
    print(
        f"{workload.parameters:,} parameters in {workload.dtype} ({workload.weight_gib:.3f} GiB), harmony's budget "
        f"{workload.budget_gib:.3f} GiB; {workload.tokens} tokens per step in {workload.accumulation} micro-batches of "
        f"{workload.micro_batch}; {'one core for all' if timing.core is not None else 'any core'}, 1 thread per process"
    )
    children = start([Entry(name, name) for name in engines], workload, timing.core)
    try:
        rows = measure(children, timing)
    finally:
        for child in children.values():
            child.close()
    summaries = report.summarize(rows, report.LOSS_TOLERANCES[workload.dtype])
    print(report.table(summaries))
    after = report.machine()["load_average"]
    print(f"load average {before['load_average'][0]:.1f} before, {after[0]:.1f} after; {before['cpu']}")
    content = {**report.describe(workload, timing), **before, "load_average_after": after, "engines": summaries}
    _write(out or RESULTS / f"overhead-{workload.dtype}{_suffix(timing)}.json", content)
    return int(any(summary.get("losses_agree") is False for summary in summaries.values()))


def _break_down(workload: Workload, timing: Timing, out: Path | None) -> int:
    before = report.machine()
    result = breakdown.breakdown(workload, timing)
    print(breakdown.text(result))
    rows = {label: asdict(row) for label, row in result.pop("rows").items()}
    content: dict[str, Any] = {**report.describe(workload, timing), **before, **result, "engines": rows}
    _write(out or RESULTS / f"overhead-breakdown-{workload.dtype}{_suffix(timing)}.json", content)
    return 0


def _suffix(timing: Timing) -> str:
    return "" if timing.core is None else "-one-core"


def _write(path: Path, content: dict[str, Any]) -> None:
    report.write(path, content)
    print(f"written: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults, shape = Timing(), {field.name: field.default for field in fields(Workload)}
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=defaults.rounds)
    parser.add_argument("--warmup-rounds", type=int, default=defaults.warmup_rounds)
    parser.add_argument("--steps-per-round", type=int, default=defaults.steps_per_round)
    parser.add_argument("--limit-s", type=float, default=defaults.limit_s, help="stop after so many seconds of rounds")
    parser.add_argument("--one-core", action="store_true", help="pin every process to one core")
    parser.add_argument("--budget-gib", type=float, help="harmony's device memory (default: 0.78 of the weights)")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--breakdown", action="store_true", help="cost per layer call, and what it is made of")
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/overhead-<dtype>.json)")
    for name in _SHAPE:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=shape[name])
    args = parser.parse_args()
    if not {"plain", "harmony"} <= set(args.engines):
        parser.error("--engines must name plain and harmony: losses and ratios are relative to them")
    return args


if __name__ == "__main__":
    sys.exit(main())
