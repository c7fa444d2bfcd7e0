"""Draw a comparison of engines: throughput, memory, and bytes moved in one step."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

from harmony_ds.bench.report import cap_of, cut_of
from harmony_ds.bench.results import Results
from harmony_ds.bench.summary import summarize


def draw(results: Results, path: Path) -> bool:
    """Write a PNG, and return whether there is one: nothing is drawn without matplotlib or without a timed round."""
    timed = [summary for summary in summarize(results) if summary.step_ms is not None]
    if not timed or find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    task = timed[0].row.task
    sizes = " and ".join(f"{items:,}" for items in sorted({one.items for one in timed}))
    panels = {f"{results.unit} a second": [one.items_per_s for one in timed]}
    for kind in ("device", "host"):
        panels[f"{kind} peak, GiB"] = [_scaled(one.memory[kind], 2**30) for one in timed]
    for way in ("to device", "to host"):
        panels[f"MiB {way} a step"] = [_scaled(one.moved[way], 2**20) for one in timed]
    names = [f"{one.label}, {cut_of(one)}" if one.row.sweep else one.label for one in timed]
    figure = Figure(figsize=(14, 2.0 + 0.35 * len(timed)), layout="constrained")
    figure.suptitle(
        f"{Path(task.model).name}, {results.parameters:,} parameters, {sizes} {results.unit} a step; {cap_of(task)}"
    )
    for axes, (title, values) in zip(figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
        numbers = [readable(value) for value in values]
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.bar_label(axes.barh(names, values), labels=numbers, padding=4, bbox=ground)
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_formatter(lambda value, _position: f"{value:,g}")
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.margins(x=0.3)  # for the numbers
        if title.startswith("device peak") and task.memory_gib is not None:
            axes.axvline(task.memory_gib, color="black", linestyle="--", linewidth=1)
            axes.annotate(f"cap {task.memory_gib:g}", (task.memory_gib, 1.0), xycoords=("data", "axes fraction"))
    axes.invert_yaxis()
    figure.savefig(path, dpi=110)
    return True


def readable(value: float) -> str:
    """Return a number in at least three digits, with separators; nothing where there is none."""
    if math.isnan(value):
        return ""
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2
    text = f"{value:,.{decimals}f}"
    return f"{value:.1g}" if value and float(text.replace(",", "")) == 0 else text


def _scaled(nbytes: int | None, unit: int) -> float:
    return math.nan if nbytes is None else nbytes / unit  # no bar, and no number
