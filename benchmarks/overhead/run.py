"""What harmony_ds costs per layer call, and what that is made of: a model of layers that take microseconds.

    python benchmarks/overhead/run.py
    python benchmarks/overhead/run.py --one-core

A layer call is one layer run for one micro-batch: its forward, its recomputation and its backward. The cost per layer
call is the difference of step times to plain PyTorch, divided by the layer calls of a step. How fast the engine is where
layers take milliseconds, `harmony-ds bench` says.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from child import ProfiledServer

from harmony_ds.bench.processes import Child
from harmony_ds.bench.results import Contestant, Results, environment
from harmony_ds.bench.run import Rounds, run
from harmony_ds.bench.workload import Workload

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "benchmarks" / "models" / "llama-tiny-32.json"
DS_CONFIG = {
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
}
ENGINES = ("torch-checkpoint", "torch", "harmony")
LAYERS, ACCUMULATION, PROFILED_STEPS, WARM_UP = 32, 8, 4, 4
CALLS = LAYERS * ACCUMULATION


def main() -> None:
    """Prints microseconds per layer call, and the parts of harmony's and of plain PyTorch's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--one-core", action="store_true", help="pin every process to one core")
    args = parser.parse_args()
    core = min(os.sched_getaffinity(0)) if args.one_core else None
    task = Workload(str(MODEL), DS_CONFIG, 1, 1, ACCUMULATION)
    weights_gib = sum(p.numel() * 4 for p in task.subject.model.parameters()) / 2**30
    task = Workload(str(MODEL), DS_CONFIG, 1, 1, ACCUMULATION, memory_gib=0.78 * weights_gib)
    with tempfile.TemporaryDirectory() as folder:
        timing = Rounds(args.rounds, WARM_UP, 2, core=core)
        contestants = [Contestant(name, name, task) for name in ENGINES]
        results = run(contestants, timing, Path(folder) / "r.json", False, print)
    per_call = _per_call(results)
    profiles = {name: _profile(name, task, core) for name in ("harmony", "torch-checkpoint")}
    _show(per_call, profiles)
    content = {
        "environment": {**environment("cpu"), "command": " ".join(["python", *sys.argv])},
        "task": {**task.as_json(), "model": MODEL.name},
        "layer_calls_per_step": CALLS,
        "microseconds_per_layer_call": per_call,
        "profile": profiles,
        "rounds": {label: row.rounds for label, row in results.rows.items()},
    }
    path = ROOT / "benchmarks" / "results" / f"overhead{'-one-core' if args.one_core else ''}.json"
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _per_call(results: Results) -> dict[str, float]:
    """Whole step over layer calls, per engine; and harmony's excess over each, paired by round."""
    found: dict[str, float] = {}
    for kind, name in (("drained_ms", ""), ("cpu_ms", ", CPU time")):
        harmony = results.rows["harmony"].milliseconds(kind)
        for label, row in results.rows.items():
            times = row.milliseconds(kind)
            found[label + name] = median(times) * 1e3 / CALLS
            if label != "harmony":
                excess = median([a - b for a, b in zip(harmony, times, strict=True)])
                found[f"harmony - {label}{name}"] = excess * 1e3 / CALLS
    return found


def _profile(name: str, task: Workload, core: int | None) -> dict[str, Any]:
    with Child(name, task, core, ProfiledServer) as child:
        child.start()
        child.ask("run", 0, WARM_UP)
        answer = child.ask("profile", WARM_UP, PROFILED_STEPS)
    scale = 1e6 / (PROFILED_STEPS * CALLS)
    return {
        "parts_us": {part: s * scale for part, s in sorted(answer["parts"].items(), key=lambda item: -item[1])},
        "functions": [
            {"name": name, "part": part, "calls_per_layer_call": count / (PROFILED_STEPS * CALLS), "us": s * scale}
            for name, part, count, s in answer["functions"]
        ],
    }


def _show(per_call: dict[str, float], profiles: dict[str, dict[str, Any]]) -> None:
    print(f"microseconds per layer call ({CALLS} layer calls per step)")
    for label, value in per_call.items():
        print(f"  {label:<52}{value:>9.1f}")
    ours, plain = profiles["harmony"]["parts_us"], profiles["torch-checkpoint"]["parts_us"]
    print(f"own time on the main thread, under cProfile{'harmony':>20}{'plain':>9}")
    for part, value in ours.items():
        print(f"  {part:<52}{value:>9.1f}" + (f"{plain[part]:>9.1f}" if part in plain else ""))
    print(f"  {'sum':<52}{sum(ours.values()):>9.1f}{sum(plain.values()):>9.1f}")


if __name__ == "__main__":
    main()
