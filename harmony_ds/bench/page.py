"""One self-contained HTML page: the numbers, what they were measured on, and figures that need no network."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harmony_ds.bench.results import Results
from harmony_ds.bench.summary import Summary, setting, summarize, tolerance, verdict
from harmony_ds.bench.table import cells, headers

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1440px; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1em 0 }
table { display: block; font-size: 13px; overflow-x: auto }
th, td { text-align: right; padding: .3em .6em; border-bottom: 1px solid #ddd; white-space: nowrap }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 14em }
tr.ours td { font-weight: 600 } .note { color: #666; font-size: 13px } td.bad { color: #b00020; text-align: left }
svg { max-width: 100%; height: auto } figure { margin: 1.5em 0 } figcaption { color: #555; font-size: 13px }
pre { background: #f6f6f6; padding: 1em; overflow-x: auto; font-size: 12px }
"""
_OURS, _OTHERS = "#1f6feb", "#9aa4b2"


def write_page(results: Results, path: Path, title: str = "Training engines, head to head") -> None:
    """The report of a comparison."""
    summaries = summarize(results)
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{escape(title)}</h1>",
        *_introduction(results, summaries),
        _table(results, summaries),
        *_figures(results, summaries),
        *_small_print(results, summaries),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def _introduction(results: Results, summaries: list[Summary]) -> Iterable[str]:
    yield f"<p>{escape(setting(results))}</p>"
    yield from (f"<p><b>{escape(line)}</b></p>" for line in verdict(summaries, results.unit))
    if not results.finished:
        yield "<p><b>The comparison was interrupted</b>; <code>--resume</code> goes on with it.</p>"


def _table(results: Results, summaries: list[Summary]) -> str:
    heads = "".join(f"<th>{escape(head)}</th>" for head in headers(results.unit))
    mixed = len({summary.engine for summary in summaries}) > 1
    rows = "".join(
        f"<tr{' class=ours' if mixed and summary.engine == 'harmony' else ''}>{_row(summary, len(headers('')))}</tr>"
        for summary in summaries
    )
    return f"<table><tr>{heads}</tr>{rows}</table>"


def _row(summary: Summary, columns: int) -> str:
    *filled, last = (escape(cell) for cell in cells(summary))
    left = columns - len(filled)
    end = f"<td>{last}</td>" if left == 1 else f"<td class=bad colspan={left}>{last}</td>"
    return "".join(f"<td>{cell}</td>" for cell in filled) + end


def _small_print(results: Results, summaries: list[Summary]) -> Iterable[str]:
    rounds = max((len(row.rounds) for row in results.rows.values()), default=0)
    peak = results.peak_tflops
    notes = [
        f"Medians of up to {rounds} rounds of {results.wanted['steps']} steps, the engines by turns, after "
        f"{results.wanted['warmup_steps']} warm-up steps; times end when no update is under way any longer.",
        "harmony/it: the median over rounds of harmony's time divided by the engine's; below 1, harmony is faster.",
        "MFU: model FLOPs (three forward passes; recomputation is not counted) over "
        + ("an unknown peak." if peak is None else f"{peak[0]:,.3g} TFLOP/s ({peak[1]})."),
        f"Losses of all steps are compared with the first of torch, torch-checkpoint and harmony; relative, at most "
        f"{tolerance(results):g}.",
    ]
    if any(summary.traffic == "by formula" for summary in summaries):
        notes.append("* computed by formula from the engine's source, not counted; without what recomputation gathers.")
    yield "".join(f"<p class=note>{escape(note)}</p>" for note in notes)
    for engine, found in results.sweeps.items():
        tried = ", ".join(
            f"{rows} rows: " + (f"{one['step_ms']:,.0f} ms" if "step_ms" in one else _failure(one))
            for rows, one in found.items()
        )
        yield f"<p class=note>{escape(engine)}, micro-batches tried: {escape(tried)}.</p>"
    settings = {label: row.report.get("settings") for label, row in results.rows.items()}
    for heading, content in (("Environment", results.environment), ("Settings", settings)):
        yield f"<details><summary>{heading}</summary><pre>{escape(json.dumps(content, indent=1))}</pre></details>"


def _failure(found: dict[str, Any]) -> str:
    return "out of memory" if found["out_of_memory"] else str(found["error"])


def _figures(results: Results, summaries: list[Summary]) -> Iterable[str]:
    timed = [summary for summary in summaries if summary.drained_ms is not None]
    if not timed:
        return
    if find_spec("matplotlib") is None:
        yield "<p class=note>Figures need matplotlib: pip install matplotlib, then --resume.</p>"
        return
    if len(timed) > 1 and {summary.engine for summary in timed} == {"harmony"}:
        yield _figure(lambda axes: _draw_waterfall(axes, timed), "What each mechanism is worth: step time without it.")
    throughput = _draw_curve if len({summary.items for summary in timed}) > 1 else _draw_throughput
    yield _figure(lambda axes: throughput(axes, timed, results.unit), "Throughput.")
    yield _figure(lambda axes: _draw_memory(axes, timed), "Peaks of device and host memory, GiB.")
    if any(summary.host_to_device for summary in timed):
        yield _figure(lambda axes: _draw_swaps(axes, results, timed), "Bytes between host and device in one step.")
    yield _figure(lambda axes: _draw_losses(axes, results), "Losses of all steps, one line over the other.")


def _figure(draw: Callable[[Any], None], caption: str) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.add_subplot()
    draw(axes)
    axes.spines[["top", "right"]].set_visible(False)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = text.getvalue()
    return f"<figure>{svg[svg.index('<svg') :]}<figcaption>{escape(caption)}</figcaption></figure>"


def _colour(summary: Summary) -> str:
    return _OURS if summary.engine == "harmony" else _OTHERS


def _legend_above(axes: Any) -> None:
    """A legend that covers nothing."""
    axes.figure.legend(loc="outside upper center", ncols=5, fontsize=8, frameon=False)


def _draw_throughput(axes: Any, timed: list[Summary], unit: str) -> None:
    names = [summary.label for summary in timed]
    axes.barh(names, [summary.items_per_s for summary in timed], color=[_colour(summary) for summary in timed])
    for index, summary in enumerate(timed):
        assert summary.drained_ms is not None
        ends = [summary.items / ms * 1e3 for ms in (summary.drained_ms.high, summary.drained_ms.low)]
        axes.plot(ends, [index, index], color="#333", linewidth=1.5)
    axes.invert_yaxis()
    axes.set_xlabel(f"{unit} per second (line: slowest to fastest round)")


def _draw_curve(axes: Any, timed: list[Summary], unit: str) -> None:
    """A line for each engine over the sizes of a step."""
    lines: dict[str, list[Summary]] = {}
    for summary in timed:
        lines.setdefault(summary.label.partition(" | ")[0], []).append(summary)
    for label, points in lines.items():
        style = {"color": _OURS, "linewidth": 2.5} if points[0].engine == "harmony" else {}
        axes.plot([p.items for p in points], [p.items_per_s for p in points], marker="o", label=label, **style)
    sizes = sorted({summary.items for summary in timed})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set(xlabel=f"{unit} per step", ylabel=f"{unit} per second", ylim=(0, None))
    _legend_above(axes)


def _draw_waterfall(axes: Any, timed: list[Summary]) -> None:
    """Step time in percent of harmony's as it is, round by round; the bar begins where harmony's ends."""
    others = [summary for summary in timed if summary.ratio is not None and summary is not timed[0]]
    for index, summary in enumerate(others):
        assert summary.ratio is not None
        slower = [100 / value - 100 for value in (summary.ratio.median, summary.ratio.high, summary.ratio.low)]
        axes.barh(index, slower[0], left=100, color="#d1495b" if slower[0] > 0 else "#2a9d8f")
        axes.plot([100 + slower[1], 100 + slower[2]], [index, index], color="#333", linewidth=1.5)
        axes.annotate(f" {slower[0]:+.0f} %", (100 + max(slower), index), va="center", fontsize=8)
    axes.set_yticks(range(len(others)), [summary.label for summary in others])
    axes.axvline(100, color=_OURS, linewidth=2)
    axes.invert_yaxis()
    axes.set_xlabel("step time, % of harmony as it is (line: the rounds' range)")


def _draw_memory(axes: Any, timed: list[Summary]) -> None:
    places = range(len(timed))
    for offset, kind in ((-0.2, "device"), (0.2, "host")):
        values = [(getattr(summary, f"{kind}_peak_bytes") or 0) / 2**30 for summary in timed]
        axes.barh([place + offset for place in places], values, height=0.36, label=kind)
    axes.set_yticks(list(places), [summary.label for summary in timed])
    axes.invert_yaxis()
    _legend_above(axes)


def _draw_swaps(axes: Any, results: Results, timed: list[Summary]) -> None:
    kinds: dict[str, list[float]] = {}
    for index, summary in enumerate(timed):
        traffic = results.rows[summary.label].report.get("traffic") or {}
        for direction, arrow in (("host_to_device", "in"), ("device_to_host", "out")):
            for kind, moved in (traffic.get(direction) or {}).items():
                if moved:
                    kinds.setdefault(f"{kind} {arrow}", [0.0] * len(timed))[index] = moved / 2**20
    left = [0.0] * len(timed)
    names = [summary.label for summary in timed]
    for kind, values in kinds.items():
        axes.barh(names, values, left=left, label=kind)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set_xlim(0, 1.05 * max(left) or 1)  # bars of no length would end the axis
    axes.set_xlabel("MiB per step")
    _legend_above(axes)


def _draw_losses(axes: Any, results: Results) -> None:
    styles = ("-", "--", "-.", ":")
    for index, (label, row) in enumerate(results.rows.items()):
        if row.losses:
            axes.plot(row.losses, styles[index % 4], label=label, linewidth=3 - 0.4 * (index % 6), alpha=0.8)
    axes.set(xlabel="step", ylabel="loss")
    _legend_above(axes)
