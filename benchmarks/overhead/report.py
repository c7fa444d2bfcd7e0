"""Rows of timings to a table, and to JSON: medians, spreads, ratios per round, agreement of losses."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from rounds import Row, Timing
from workload import Workload

GOALS = {"plain": 1.10, "zero3_offload": 0.75, "zero2_offload": 1.0}
LOSS_TOLERANCES = {"fp32": 1e-5, "bf16": 2e-3}


def summarize(rows: dict[str, Row], tolerance: float) -> dict[str, dict[str, Any]]:
    """Per engine: medians and spreads in ms per step, harmony's ratios to it, distance of its losses from plain's."""
    return {label: _summary(row, rows["harmony"], rows["plain"], tolerance) for label, row in rows.items()}


def _summary(row: Row, harmony: Row, plain: Row, tolerance: float) -> dict[str, Any]:
    if row.error is not None or not row.step_ms:
        return {"error": row.error or "no round was timed"}
    difference = max((abs(a - b) for a, b in zip(row.losses, plain.losses, strict=False)), default=None)
    return {
        "step_ms": _spread(row.step_ms),
        "drained_step_ms": _spread(row.drained_ms),
        "cpu_step_ms": _spread(row.cpu_ms),
        "harmony_ratio": _ratios(harmony.step_ms, row.step_ms),
        "harmony_drained_ratio": _ratios(harmony.drained_ms, row.drained_ms),
        "harmony_cpu_ratio": _ratios(harmony.cpu_ms, row.cpu_ms),
        "goal": GOALS.get(row.label),
        "loss_difference": difference,
        "losses_agree": difference is not None and difference <= tolerance,
        "losses": row.losses,
        "settings": row.settings,
    }


def _spread(values: list[float]) -> dict[str, Any]:
    return {"median": median(values), "min": min(values), "max": max(values), "all": values}


def _ratios(harmony: list[float], other: list[float]) -> dict[str, Any] | None:
    # Round by round: what slows the machine down slows both of a pair down.
    ratios = [a / b for a, b in zip(harmony, other, strict=False)]
    return _spread(ratios) if ratios else None


def table(summaries: dict[str, dict[str, Any]]) -> str:
    """One line per engine."""
    lines = [
        f"{'engine':<24}{'step ms':>10}{'min':>10}{'max':>10}{'drained':>10}{'CPU ms':>10}"
        f"{'harmony/it':>12}{'drained':>9}{'CPU':>7}{'goal':>7}{'loss diff':>11}"
    ]
    for label, summary in summaries.items():
        if "error" in summary:
            lines.append(f"{label:<24}failed: {summary['error']}")
            continue
        step = summary["step_ms"]
        ratio, drained, cpu = (summary[f"harmony_{kind}ratio"] for kind in ("", "drained_", "cpu_"))
        lines.append(
            f"{label:<24}{step['median']:>10.1f}{step['min']:>10.1f}{step['max']:>10.1f}"
            f"{summary['drained_step_ms']['median']:>10.1f}{summary['cpu_step_ms']['median']:>10.1f}"
            f"{_number(ratio):>12}{_number(drained):>9}{_number(cpu):>7}"
            f"{summary['goal'] or '':>7}{_difference(summary):>11}"
        )
    return "\n".join(lines)


def _number(ratio: dict[str, Any] | None) -> str:
    return "" if ratio is None else f"{ratio['median']:.3f}"


def _difference(summary: dict[str, Any]) -> str:
    difference = summary["loss_difference"]
    if difference is None:
        return ""
    return f"{difference:.1e}" + ("" if summary["losses_agree"] else "!")


def machine() -> dict[str, Any]:
    """What the numbers depend on, without the machine's name."""
    packages = ("torch", "deepspeed", "transformers")
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
    }


def _cpu_model() -> str:
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def describe(workload: Workload, timing: Timing) -> dict[str, Any]:
    """The workload, the timing and what follows from them."""
    return {
        "workload": asdict(workload),
        "parameters": workload.parameters,
        "weight_gib": workload.weight_gib,
        "budget_gib": workload.budget_gib,
        "micro_batch": workload.micro_batch,
        "tokens_per_step": workload.tokens,
        "weights_and_compute": workload.dtype,
        "optimizer_state": "fp32",
        "timing": {**asdict(timing), "limit_s": timing.limit_s if isfinite(timing.limit_s) else None},
        "one_core": timing.core is not None,
        "threads_per_process": 1,
        "loss_tolerance": LOSS_TOLERANCES[workload.dtype],
    }


def write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
