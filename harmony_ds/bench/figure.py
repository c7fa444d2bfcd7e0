"""Draw a comparison of engines: throughput, memory, and bytes moved in one step."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

from harmony_ds.bench.report import cut_of
from harmony_ds.bench.results import Results
from harmony_ds.bench.summary import summarize


def draw(results: Results, path: Path) -> bool:
    """Write a PNG, and return whether there is one: nothing is drawn without matplotlib or without a timed round."""
    timed = [summary for summary in summarize(results) if summary.step_ms is not None]
    if not timed or find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    panels = {f"{results.unit} per second": [one.items_per_s for one in timed]}
    for kind in ("device", "host"):
        panels[f"{kind} peak, GiB"] = [_scaled(one.memory[kind], 2**30) for one in timed]
    for way in ("to device", "to host"):
        panels[f"MiB {way} a step"] = [_scaled(one.moved[way], 2**20) for one in timed]
    names = [f"{one.label}, {cut_of(one)}" if one.row.sweep else one.label for one in timed]
    figure = Figure(figsize=(14, 1.2 + 0.35 * len(timed)), layout="constrained")
    for axes, (title, values) in zip(figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
        axes.bar_label(axes.barh(names, values), fmt="{:,.3g}", padding=2)
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.3)  # for the numbers
    axes.invert_yaxis()
    figure.savefig(path, dpi=110)
    return True


def _scaled(nbytes: int | None, unit: int) -> float:
    return math.nan if nbytes is None else nbytes / unit  # no bar, and no number
