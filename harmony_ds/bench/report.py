"""Report of a comparison, as Markdown that reads well on a terminal: setting, verdict, two tables, notes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harmony_ds.bench.results import Results
from harmony_ds.bench.summary import Spread, Summary, summarize, tolerance
from harmony_ds.estimate.text import wrapped
from harmony_ds.scheduler.grid import amount

_TIMES = ("engine", "micro-batches", "step ms", "low..high", "{unit}/s", "harmony/it")
_PLACES = ("engine", "device peak", "host peak", "to device", "to host", "sent", "loss diff.")
_BY_FORMULA = "by formula"


def report(results: Results, figure: Path | None = None) -> str:
    """Return the whole report, with `figure` beside it."""
    summaries = summarize(results)
    timed = [summary for summary in summaries if summary.step_ms is not None]
    parts = [wrapped(_setting(results)), *(wrapped(line) for line in _verdicts(timed, results.unit))]
    if not results.finished:
        parts.append("The comparison was interrupted; `--resume` goes on with it.")
    if timed:
        parts.append(_table([name.format(unit=results.unit) for name in _TIMES], [_times(one) for one in timed]))
        parts.append(_table(_PLACES, [_places(one) for one in timed]))
    parts += [wrapped(f"{one.label}: {one.status}") for one in summaries if one.step_ms is None]
    parts.append("\n".join(wrapped(f"- {note}", "  ") for note in _notes(results, summaries)))
    if figure is not None:
        parts.append(f"![throughput, memory and bytes of a step]({figure.name})")
    return "\n\n".join(parts)


def _setting(results: Results) -> str:
    """Describe what was compared: model, step, dtypes, machine, memory cap."""
    task, machine = next(iter(results.rows.values())).task, results.environment
    config, devices, memory_gib = task["ds_config"], task.get("devices", 1), task["memory_gib"]
    dtype = next((name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled")), "fp32")
    summed = config.get("data_types", {}).get("grad_accum_dtype") or "fp32"
    steps = {row.task["accumulation"]: None for row in results.rows.values() if row.engine == "harmony"}
    counts = ", ".join(str(count) for count in steps or {task["accumulation"]: None})
    items = ", ".join(f"{count:,}" for count in sorted({*results.items_per_step.values()}))
    on_cpu = f"{machine['cpu']} as the device, {_counted(task['threads'], 'thread')} a process"
    each = "" if devices == 1 else f" on each of {devices} devices"
    cap = "no cap on device memory"
    if memory_gib is not None:
        engines = "for every engine" if task["device"] == "cuda" else "kept by harmony alone: a CPU enforces none"
        cap = f"device memory capped at {memory_gib:g} GiB, {engines}"
    return (
        f"{Path(task['model']).name}: {results.parameters:,} parameters; {counts} micro-batches of "
        f"{_counted(task['rows'], 'row')}{each}, {items} {results.unit} a step; computed in {dtype}, gradients summed in "
        f"{summed}; {machine.get('gpu') or on_cpu}; {cap}."
    )


def _verdicts(timed: list[Summary], unit: str) -> list[str]:
    """Say for each size of a step which engine won by what, with harmony's time against the others'."""
    verdicts = []
    for size in sorted({summary.items for summary in timed}):
        best, *others = sorted((one for one in timed if one.items == size), key=_median_ms)
        ratios = [
            f"{one.ratio.median:.2f} of {_name(one)}'s time ({one.ratio.low:.2f} to {one.ratio.high:.2f}"
            f"{_undecided(one.ratio)})"
            for one in (best, *others)
            if one.ratio is not None and one.engine != "harmony"
        ]
        text = f"{size:,} {unit} a step: {_name(best)} is fastest, {_median_ms(best):,.1f} ms."
        verdicts.append(text + (f" harmony takes {', '.join(ratios)}." if ratios else ""))
    return verdicts


def _median_ms(summary: Summary) -> float:
    assert summary.step_ms is not None
    return summary.step_ms.median


def _name(summary: Summary) -> str:
    """Return the label without the size of a step, which it has where there are several."""
    return summary.label.partition(" | ")[0]


def _undecided(ratio: Spread) -> str:
    return ": no clear winner" if ratio.low < 1 < ratio.high else ""


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _times(one: Summary) -> list[str]:
    assert one.step_ms is not None
    rate = one.items_per_s or 0.0
    return [
        one.label.replace("|", "/"),
        f"{one.accumulation} x {one.micro_batch}{' (best)' if one.is_best else ''}",
        f"{one.step_ms.median:,.1f}",
        f"{one.step_ms.low:,.0f}..{one.step_ms.high:,.0f}",
        f"{rate:,.0f}" if rate >= 100 else f"{rate:,.1f}",
        "" if one.ratio is None else f"{one.ratio.median:.2f}",
    ]


def _places(one: Summary) -> list[str]:
    mark = "*" if one.traffic == _BY_FORMULA else ""
    peaks, moved = (one.device_peak_bytes, one.host_peak_bytes), (one.host_to_device, one.device_to_host)
    difference = "reference" if one.losses_agree is None else ""
    if one.loss_difference is not None:
        different = {True: "", False: " !", None: " (not exact by design)"}[one.losses_agree]
        difference = f"{one.loss_difference:.1e}{different}"
    numbers = [*map(_bytes, peaks), *(_bytes(nbytes, mark) for nbytes in moved), _bytes(one.sent)]
    return [one.label.replace("|", "/"), *numbers, difference]


def _bytes(nbytes: int | None, mark: str = "") -> str:
    return "" if nbytes is None else amount(nbytes) + mark


def _table(head: Sequence[str], rows: list[list[str]]) -> str:
    """Return a Markdown table without the columns that are empty: the first to the left, the others to the right."""
    columns = [column for column in zip(head, *rows, strict=True) if any(column[1:])]
    padded = []
    for number, column in enumerate(columns):
        width, align = max(map(len, column)), "<" if number == 0 else ">"
        rule = "-" * width if number == 0 else "-" * (width - 1) + ":"
        padded.append([rule if cell is None else f"{cell:{align}{width}}" for cell in (column[0], None, *column[1:])])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*padded, strict=True))


def _notes(results: Results, summaries: list[Summary]) -> list[str]:
    rounds = max((len(row.rounds) for row in results.rows.values()), default=0)
    notes = [
        f"Medians of up to {rounds} rounds of {results.wanted['steps']} steps, the engines by turns, after "
        f"{results.wanted['warmup_steps']} warm-up steps; times end when no update is under way any longer.",
        "harmony/it: the median over rounds of harmony's time divided by the engine's; below 1, harmony is faster.",
        f"Losses of all steps are compared with the first of torch, torch-checkpoint and harmony: at most "
        f"{tolerance(results):g} apart, relative.",
    ]
    if any(summary.traffic == _BY_FORMULA for summary in summaries):
        notes.append("* by formula, not counted; without the weights that recomputation gathers again.")
    for label, found in results.sweeps.items():
        times = (f"{one['step_ms']:,.0f} ms" if "step_ms" in one else _failure(one) for one in found.values())
        tried = ", ".join(f"{rows} rows: {time}" for rows, time in zip(found, times, strict=True))
        notes.append(f"{label}, micro-batches tried: {tried}.")
    return notes


def _failure(found: dict[str, object]) -> str:
    return "out of memory" if found["out_of_memory"] else str(found["error"])
