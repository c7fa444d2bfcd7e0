"""Figure of a comparison: throughput, memory, and bytes of one step."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harmony_ds.bench.report import cut_of
from harmony_ds.bench.results import Results
from harmony_ds.bench.summary import Summary, summarize

_OURS, _OTHERS = "#1f6feb", "#9aa4b2"


def draw(results: Results, path: Path) -> bool:
    """Write a PNG, and return whether there is one: nothing is drawn without matplotlib or without a timed round."""
    timed = [summary for summary in summarize(results) if summary.step_ms is not None]
    if not timed or find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2 + 0.9 * len(timed)), layout="constrained")
    times, places, swaps = figure.subplots(3, 1)
    if len({summary.items for summary in timed}) > 1:
        _draw_curve(times, timed, results.unit)
    else:
        _draw_throughput(times, timed, results.unit)
    peaks = {kind: [one.memory[kind] or 0 for one in timed] for kind in ("device", "host")}
    _draw_bytes(places, timed, peaks, 2**30, "peak of memory, GiB")
    moved = {way: [one.moved[way] or 0 for one in timed] for way in ("to device", "to host")}
    _draw_bytes(swaps, timed, moved, 2**20, "MiB between host and device in one step")
    for axes in (times, places, swaps):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    return True


def _name(one: Summary) -> str:
    return f"{one.label}, {cut_of(one)}" if one.row.sweep else one.label


def _draw_throughput(axes: Any, timed: list[Summary], unit: str) -> None:
    colours = [_OURS if one.is_ours else _OTHERS for one in timed]
    axes.barh([_name(one) for one in timed], [one.items_per_s for one in timed], color=colours)
    for index, one in enumerate(timed):
        assert one.step_ms is not None
        ends = [one.items / ms * 1e3 for ms in (one.step_ms.high, one.step_ms.low)]
        axes.plot(ends, [index, index], color="#333", linewidth=1.5)
    axes.invert_yaxis()
    axes.set_xlabel(f"{unit} per second (line: slowest to fastest round)")


def _draw_curve(axes: Any, timed: list[Summary], unit: str) -> None:
    """Draw a line for each engine over the sizes of a step."""
    lines: dict[str, list[Summary]] = {}
    for one in timed:
        lines.setdefault(one.label.partition(" | ")[0], []).append(one)
    for label, points in lines.items():
        style = {"color": _OURS, "linewidth": 2.5} if points[0].is_ours else {}
        axes.plot([p.items for p in points], [p.items_per_s for p in points], marker="o", label=label, **style)
    sizes = sorted({one.items for one in timed})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set(xlabel=f"{unit} per step", ylabel=f"{unit} per second", ylim=(0, None))
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def _draw_bytes(axes: Any, timed: list[Summary], kinds: dict[str, list[int]], unit: int, label: str) -> None:
    """Draw two bars for every engine."""
    for offset, (kind, values) in zip((-0.2, 0.2), kinds.items(), strict=True):
        places = [index + offset for index in range(len(timed))]
        axes.barh(places, [value / unit for value in values], height=0.36, label=kind)
    axes.set_yticks(range(len(timed)), [_name(one) for one in timed])
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
