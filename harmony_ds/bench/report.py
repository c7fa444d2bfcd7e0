"""Write the report of a comparison as Markdown that reads well on a terminal: setting, verdict, two tables, notes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from harmony_ds.bench.results import Results
from harmony_ds.bench.summary import Summary, summarize, tolerance
from harmony_ds.bench.workload import Workload
from harmony_ds.estimate.text import columns, wrapped
from harmony_ds.scheduler.grid import amount, counted

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_TIMES = ("engine", "micro-batches", "step ms", "low..high", "{unit}/s", "harmony/it")
_PLACES = ("engine", "device peak", "host peak", "to device", "to host", "sent", "loss diff.")


def report(results: Results, figure: Path | None = None) -> str:
    """Return the whole report, with `figure` beside it."""
    summaries = summarize(results)
    timed = [summary for summary in summaries if summary.step_ms is not None]
    parts = [wrapped(_setting(results)), *(wrapped(line) for line in _verdicts(timed, results.unit))]
    if not results.finished:
        parts.append("The comparison was interrupted; `--resume` goes on with it.")
    if timed:
        parts.append(columns([name.format(unit=results.unit) for name in _TIMES], [_times(one) for one in timed]))
        parts.append(columns(_PLACES, [_places(one) for one in timed]))
    parts += [wrapped(f"{one.label}: {one.status}") for one in summaries if one.step_ms is None]
    parts.append("\n".join(wrapped(f"- {note}", "  ") for note in _notes(results, summaries)))
    if figure is not None:
        parts.append(f"![throughput, memory and bytes of a step]({figure.name})")
    return "\n\n".join(parts)


def _setting(results: Results) -> str:
    """Describe what was compared: model, step, dtypes, machine, memory cap."""
    task, machine, rows = next(iter(results.rows.values())).task, results.environment, results.rows.values()
    devices = task.devices
    dtype, summed = (_DTYPES[one] for one in (task.settings.compute_dtype, task.settings.accumulation_dtype))
    steps = {row.task.accumulation: None for row in rows if row.engine == "harmony"} or {task.accumulation: None}
    counts = ", ".join(str(count) for count in steps)
    items = ", ".join(f"{count:,}" for count in sorted({one.items for one in summarize(results)}))
    where = machine.get("gpu") or f"{machine['cpu']} as the device, {task.threads} thread(s) a process"
    each_rows = counted(task.rows, "row")
    each = "" if devices == 1 else f" on each of {devices} devices"
    return (
        f"{Path(task.model).name}: {results.parameters:,} parameters; {counts} micro-batches of {each_rows}{each}, {items} "
        f"{results.unit} a step; computed in {dtype}, gradients summed in {summed}; {where}; {cap_of(task)}."
    )


def cap_of(task: Workload) -> str:
    """Return how much device memory the engines had."""
    if task.memory_gib is None:
        return "no cap on device memory"
    engines = "for every engine" if task.device == "cuda" else "kept by harmony alone: a CPU enforces none"
    return f"device memory capped at {task.memory_gib:g} GiB, {engines}"


def _verdicts(timed: list[Summary], unit: str) -> list[str]:
    """Say for each size of a step that several engines took which won by what, with harmony's time against the others'."""
    verdicts = []
    for size in sorted({one.items for one in timed}):
        of_size = sorted((one for one in timed if one.items == size), key=lambda one: -one.items_per_s)
        if len(of_size) == 1:  # nothing to compare it with
            continue
        names = [one.label.partition(" | ")[0] for one in of_size]  # without the size, where there are several
        text = f"{size:,} {unit} a step: {names[0]} is fastest, {size / of_size[0].items_per_s * 1e3:,.1f} ms."
        ratios = [
            f"{one.ratio.median:.2f} of {name}'s time ({one.ratio.low:.2f} to {one.ratio.high:.2f}"
            f"{': no clear winner' if one.ratio.low < 1 < one.ratio.high else ''})"
            for name, one in zip(names, of_size, strict=True)
            if one.ratio is not None and one.row.engine != "harmony"
        ]
        verdicts.append(text + (f" harmony takes {', '.join(ratios)}." if ratios else ""))
    return verdicts


def _times(one: Summary) -> list[str]:
    assert one.step_ms is not None
    return [
        one.label.replace("|", "/"),
        cut_of(one),
        f"{one.step_ms.median:,.1f}",
        f"{one.step_ms.low:,.0f}..{one.step_ms.high:,.0f}",
        f"{one.items_per_s:,.0f}" if one.items_per_s >= 100 else f"{one.items_per_s:,.1f}",
        "" if one.ratio is None else f"{one.ratio.median:.2f}",
    ]


def cut_of(one: Summary) -> str:
    """Return how the engine cut a step's samples: micro-batches x rows."""
    return f"{one.row.task.accumulation} x {one.row.task.micro_batch}{' (best)' if one.row.sweep else ''}"


def _places(one: Summary) -> list[str]:
    cells = ["" if nbytes is None else amount(nbytes) for nbytes in (*one.memory.values(), *one.moved.values())]
    if one.by_formula:
        cells[2:4] = [f"{cell}*" for cell in cells[2:4]]
    loss = (
        "reference" if one.loss_difference is None else f"{one.loss_difference:.1e}{'' if one.losses_agree else ' !'}"
    )
    return [one.label.replace("|", "/"), *cells, loss]


def _notes(results: Results, summaries: list[Summary]) -> list[str]:
    timing = results.timing
    notes = [
        f"Medians of up to {timing.rounds} rounds of {timing.steps} steps, the engines by turns, after "
        f"{timing.warmup_steps} warm-up steps; times end when no update is under way any longer.",
        "harmony/it: the median over rounds of harmony's time divided by the engine's; below 1, harmony is faster.",
        f"Losses of all steps are compared with the first of torch, torch-checkpoint and harmony: at most "
        f"{tolerance(results):g} apart, relative.",
    ]
    if any(summary.by_formula for summary in summaries):
        notes.append("* by formula, not counted; without the weights that recomputation gathers again.")
    for label, row in results.rows.items():
        tried = (f"{rows} rows: {_tried(found)}" for rows, found in row.sweep.items())
        if row.sweep:
            notes.append(f"{label}, micro-batches tried: {', '.join(tried)}.")
    return notes


def _tried(found: dict[str, Any]) -> str:
    return f"{found['step_ms']:,.0f} ms" if "step_ms" in found else found["error"]
