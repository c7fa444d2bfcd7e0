"""Draw the README's figure from measured steps: `python benchmarks/gpu/figure.py`.

It reads three comparisons of a Llama of 3.1 billion parameters under a cap of 24 GiB, and the printed result of
ZeRO-3's best micro-batch, and writes docs/images/gpu.png.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Patch

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
FIGURE = ROOT / "docs" / "images" / "gpu.png"
GIB = 2**30
COMPARISONS = {
    "32 micro-batches of 1 row\n(H100)": "llama-3b-24gib-32768tok-mb1-noclip.json",
    "4 micro-batches of 8 rows\n(H200)": "h200/llama-3b-24gib-32768tok-mb8-noclip.json",
    "16 micro-batches of 8 rows\n(H200)": "h200/llama-3b-24gib-131072tok-mb8-noclip.json",
}
BEST = "h200/zero3-best-micro-batch.txt"


@dataclass(frozen=True)
class Bar:
    """One engine in one comparison: seconds of a step, and GiB over the link in both directions."""

    seconds: float
    gib: float


ENGINES = {
    "harmony": ("harmony_ds, 24 GiB", "#1f77b4"),
    "deepspeed-zero3-offload": ("ZeRO-3 offload, 24 GiB, the same micro-batches", "#e07b39"),
    "best": ("ZeRO-3 offload, 24 GiB, its best: 1 micro-batch of 32 rows", "#f3c29f"),
    "torch-checkpoint, uncapped": ("plain PyTorch with checkpointing, no cap: 60 GiB", "#b5b5b5"),
}


def bars() -> dict[str, dict[str, Bar]]:
    """Return the bars of every comparison, by its name and the engine's."""
    found = {name: _measured(json.loads((RESULTS / file).read_text())) for name, file in COMPARISONS.items()}
    best = (RESULTS / BEST).read_text()
    milliseconds = re.search(r"^deepspeed-zero3-offload +1 x 32 +([\d,.]+)", best, re.MULTILINE)
    gib = re.search(r"^deepspeed-zero3-offload .* ([\d.]+) GiB +([\d.]+) GiB +reference", best, re.MULTILINE)
    assert milliseconds
    assert gib
    seconds = float(milliseconds[1].replace(",", "")) / 1e3
    found[list(COMPARISONS)[1]]["best"] = Bar(seconds, float(gib[1]) + float(gib[2]))
    return found


def _measured(result: dict[str, Any]) -> dict[str, Bar]:
    return {
        name: Bar(
            min(times["drained_ms"] for times in row["rounds"].values()) / 1e3,
            sum(row["report"]["copied_bytes"].values()) / GIB,
        )
        for name, row in result["rows"].items()
    }


def draw(comparisons: dict[str, dict[str, Bar]], path: Path) -> None:
    """Draw step times and traffic side by side."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.6, 4.4))
    _panel(left, "seconds per optimizer step", {name: _of(row, "seconds") for name, row in comparisons.items()})
    _panel(right, "GiB over the link per step", {name: _of(row, "gib") for name, row in comparisons.items()})
    right.set_yticklabels([])
    handles = [Patch(color=colour) for _, colour in ENGINES.values()]
    figure.legend(handles, [label for label, _ in ENGINES.values()], loc="lower center", ncols=2, frameon=False)
    figure.suptitle("Llama of 3.1 billion parameters, bf16, rows of 1,024 tokens, AdamW, no clipping", fontsize=11)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(path, dpi=120)


def _of(row: dict[str, Bar], quantity: str) -> dict[str, float]:
    return {engine: getattr(bar, quantity) for engine, bar in row.items()}


def _panel(axes: Axes, title: str, values: dict[str, dict[str, float]]) -> None:
    """Draw one group of horizontal bars for each comparison, each with its number."""
    places, place = [], 0.0
    longest = max(max(row.values()) for row in values.values())
    for row in values.values():
        first = place
        for engine in (name for name in ENGINES if name in row):
            axes.barh(place, row[engine], height=0.9, color=ENGINES[engine][1])
            number = f"{row[engine]:.1f}" if row[engine] < 100 else f"{row[engine]:.0f}"
            axes.text(
                row[engine] + longest * 0.012, place, "0" if row[engine] < 0.05 else number, va="center", fontsize=9
            )
            place += 1
        places.append((first + place - 1) / 2)
        place += 0.8
    axes.set_yticks(places, list(values))
    axes.invert_yaxis()
    axes.set(xlabel=title, xlim=(0, longest * 1.13))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


if __name__ == "__main__":
    draw(bars(), FIGURE)
    print(f"written: {FIGURE.relative_to(ROOT)}")
