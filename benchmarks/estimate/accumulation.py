"""The README's figure: what crosses the link in a step, and how long a micro-batch takes, against accumulation.

    python benchmarks/estimate/accumulation.py            plans anew, a minute a point
    python benchmarks/estimate/accumulation.py --draw     from benchmarks/results/accumulation.json

Llama-2 7B on an RTX 4090 that is described, not there: the plans are those that would run, their times are the
simulator's. "For each micro-batch" is this engine with grouping switched off; ZeRO-3's bytes are by formula.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from harmony_ds.cli.options import DEFAULT
from harmony_ds.config import load_config
from harmony_ds.config.paths import with_values
from harmony_ds.estimate.forecast import Situation, forecast
from harmony_ds.estimate.subject import BatchShape, load_subject
from harmony_ds.estimate.survey import estimate, update_cost
from harmony_ds.profiler.hardware import hardware_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "accumulation.json"
FIGURE = ROOT / "docs" / "images" / "accumulation.svg"
MODEL, MACHINE, SEQUENCE = "llama-2-7b", "rtx4090", 2048
COUNTS = (1, 2, 4, 8, 16, 32)
GIB = 2**30
Points = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="only draw what the results hold")
    if not parser.parse_args().draw:
        points = [point(count, grouping) for count in COUNTS for grouping in (True, False)]
        RESULTS.write_text(json.dumps(points, indent=1) + "\n", encoding="utf-8")
    draw(json.loads(RESULTS.read_text(encoding="utf-8")))


def point(accumulation: int, grouping: bool) -> dict[str, Any]:
    """One step as it would be planned."""
    values = {"gradient_accumulation_steps": accumulation, "harmony.grouping": grouping}
    config = load_config(with_values(DEFAULT, values))
    hardware = hardware_of(MACHINE)
    spec = str(Path(__file__).parent / "models" / f"{MODEL}.json")
    subject = load_subject(spec, BatchShape(1, SEQUENCE), "meta")
    survey = estimate(subject.model, subject.inputs, config, hardware)
    now = forecast(Situation(survey, update_cost(config).states, hardware.host_budget_bytes, subject.items))
    found = {
        "accumulation": accumulation,
        "grouping": grouping,
        "step_ms": now.prediction.step_ms,
        "swapped_bytes": now.prediction.swaps.total,
        "zero3_offload_bytes": now.zero3_offload_bytes,
    }
    print(json.dumps(found), flush=True)
    return found


def draw(points: Points) -> None:
    """Two panels, in the same colours for the same thing."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    grouped, alone = ([one for one in points if one["grouping"] is grouping] for grouping in (True, False))
    with rc_context({"svg.hashsalt": "accumulation", "font.size": 10}):
        figure = Figure(figsize=(8.6, 3.3), layout="constrained")
        left, right = figure.subplots(1, 2)
        lines = (
            (left, alone, "zero3_offload_bytes", "ZeRO-3 offload (formula)", "#9aa4b2", ":"),
            (left, alone, "swapped_bytes", "swapped for each micro-batch", "#d1495b", "--"),
            (left, grouped, "swapped_bytes", "harmony_ds: once a step", "#1f6feb", "-"),
            (right, alone, "step_ms", "swapped for each micro-batch", "#d1495b", "--"),
            (right, grouped, "step_ms", "harmony_ds: once a step", "#1f6feb", "-"),
        )
        for axes, rows, what, label, colour, style in lines:
            per = [row["accumulation"] * 1e3 if what == "step_ms" else GIB for row in rows]
            values = [row[what] / unit for row, unit in zip(rows, per, strict=True)]
            axes.plot(
                [row["accumulation"] for row in rows], values, style, color=colour, label=label, marker="o", lw=2, ms=4
            )
        for axes, title in ((left, "GiB over the link in a step"), (right, "seconds for each micro-batch")):
            axes.set_title(title, loc="left", fontsize=10)
            axes.set_xscale("log", base=2)
            axes.set_xticks(COUNTS, [str(count) for count in COUNTS])
            axes.set_xlabel("micro-batches in a step (gradient accumulation)")
            axes.set_ylim(0, None)
            axes.spines[["top", "right"]].set_visible(False)
        left.legend(frameon=False, fontsize=9)
        right.legend(frameon=False, fontsize=9)
        figure.savefig(FIGURE, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")), facecolor="white")
    print(f"written: {FIGURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
