"""Figure of a comparison: throughput, memory, and bytes of one step."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harmony_ds.bench.report import cut_of
from harmony_ds.bench.results import Results
from harmony_ds.bench.summary import Summary, summarize


def draw(results: Results, path: Path) -> bool:
    """Write a PNG, and return whether there is one: nothing is drawn without matplotlib or without a timed round."""
    timed = [summary for summary in summarize(results) if summary.step_ms is not None]
    if not timed or find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2 + 0.9 * len(timed)), layout="constrained")
    times, places, swaps = figure.subplots(3, 1)
    _bars(times, timed, {"median of rounds": [one.items_per_s for one in timed]}, f"{results.unit} per second")
    peaks = {kind: [(one.memory[kind] or 0) / 2**30 for one in timed] for kind in ("device", "host")}
    _bars(places, timed, peaks, "peak of memory, GiB")
    moved = {way: [(one.moved[way] or 0) / 2**20 for one in timed] for way in ("to device", "to host")}
    _bars(swaps, timed, moved, "MiB between host and device in one step")
    figure.savefig(path, dpi=110)
    return True


def _bars(axes: Any, timed: list[Summary], kinds: dict[str, list[float]], label: str) -> None:
    """Draw a bar of each kind for every engine."""
    height = 0.8 / len(kinds)
    for number, (kind, values) in enumerate(kinds.items()):
        places = [index + number * height for index in range(len(timed))]
        axes.barh(places, values, 0.9 * height, label=kind)
    names = [f"{one.label}, {cut_of(one)}" if one.row.sweep else one.label for one in timed]
    axes.set_yticks([index + (len(kinds) - 1) * height / 2 for index in range(len(timed))], names)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
