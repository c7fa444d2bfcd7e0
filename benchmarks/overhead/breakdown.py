"""What harmony_ds costs per layer call, and what that is made of: a model of layers that take microseconds.

A layer call is one layer run for one micro-batch: its forward, its recomputation and its backward. The cost per layer
call is the difference of step times to plain PyTorch, divided by the layer calls of a step.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

from processes import Child
from rounds import Entry, Row, Timing, measure, start
from workload import Workload

_ENTRIES = [
    Entry("plain", "plain"),
    Entry("plain, no checkpointing", "plain", checkpointing=False),
    Entry("harmony", "harmony"),
]
_PROFILED_STEPS = 4


def tiny(workload: Workload) -> Workload:
    """32 layers of hidden size 32 over 16 tokens; weights exceed the budget here too."""
    small = replace(
        workload,
        hidden=32,
        layers=32,
        heads=4,
        intermediate=88,
        vocabulary=64,
        sequence=16,
        micro_batch=1,
    )
    return replace(small, budget_gib=0.78 * small.weight_gib)


def breakdown(workload: Workload, timing: Timing) -> dict[str, Any]:
    """Times the three ways to train, then profiles harmony_ds and plain PyTorch.

    Returns:
        The rows, microseconds per layer call, and the parts of each profile in microseconds per layer call.
    """
    children = start(_ENTRIES, workload, timing.core)
    try:
        rows = measure(children, timing)
        steps = (timing.warmup_rounds + timing.rounds) * timing.steps_per_round
        calls = workload.layers * workload.accumulation
        profiles = {
            label: _profile(children[label], steps, calls) for label in ("harmony", "plain") if not rows[label].error
        }
    finally:
        for child in children.values():
            child.close()
    return {
        "layer_calls_per_step": calls,
        "microseconds_per_layer_call": _per_call(rows, calls),
        "profile": profiles,
        "rows": rows,
    }


def _per_call(rows: dict[str, Row], calls: int) -> dict[str, float]:
    """Whole step over layer calls, per engine; and harmony's excess over each, paired by round."""
    result: dict[str, float] = {}
    harmony = rows["harmony"].drained_ms
    for label, row in rows.items():
        if not row.drained_ms:
            continue
        result[label] = median(row.drained_ms) * 1e3 / calls
        result[f"{label}, CPU time"] = median(row.cpu_ms) * 1e3 / calls
        if label != "harmony" and harmony:
            excess = [a - b for a, b in zip(harmony, row.drained_ms, strict=False)]
            result[f"harmony - {label}"] = median(excess) * 1e3 / calls
            excess = [a - b for a, b in zip(rows["harmony"].cpu_ms, row.cpu_ms, strict=False)]
            result[f"harmony - {label}, CPU time"] = median(excess) * 1e3 / calls
    return result


def _profile(child: Child, first: int, calls: int) -> dict[str, Any]:
    answer = child.ask({"profile": _PROFILED_STEPS, "first": first})
    scale = 1e6 / (_PROFILED_STEPS * calls)
    parts = sorted(answer["parts"].items(), key=lambda item: -item[1])
    return {
        "parts_us": {part: seconds * scale for part, seconds in parts},
        "functions": [
            {"name": name, "part": part, "calls_per_layer_call": count / (_PROFILED_STEPS * calls), "us": s * scale}
            for name, part, count, s in answer["functions"]
        ],
    }


def text(result: dict[str, Any]) -> str:
    """The table that is printed."""
    lines = [f"microseconds per layer call ({result['layer_calls_per_step']} layer calls per step)"]
    lines += [f"  {label:<52}{value:>9.1f}" for label, value in result["microseconds_per_layer_call"].items()]
    profiles = result["profile"]
    plain = profiles.get("plain", {}).get("parts_us", {})
    if "harmony" in profiles:
        lines.append(f"own time on the main thread, under cProfile{'harmony':>20}{'plain':>9}")
        for part, value in profiles["harmony"]["parts_us"].items():
            other = f"{plain[part]:>9.1f}" if part in plain else ""
            lines.append(f"  {part:<52}{value:>9.1f}{other}")
        lines.append(f"  {'sum':<52}{sum(profiles['harmony']['parts_us'].values()):>9.1f}{sum(plain.values()):>9.1f}")
    return "\n".join(lines)
