"""What `harmony-ds bench` prints: who won by what, and two tables that fit a terminal. The page has one."""

from __future__ import annotations

from harmony_ds.bench.results import Results
from harmony_ds.bench.summary import Summary, setting, verdict
from harmony_ds.estimate.text import columns, wrapped
from harmony_ds.scheduler.grid import amount

_TIMES = ("engine", "micro-batches", "{unit}/step", "step ms", "low..high", "{unit}/s", "MFU", "harmony/it")
_PLACES = ("device peak", "host peak", "to device", "to host", "sent", "loss diff.")
_ON_TERMINAL = ((0, 1, 3, 4, 5, 7), (0, 8, 9, 10, 11, 12, 13))
_DIFFERENT = {True: "", False: " !", None: " (not exact by design)"}


def headers(unit: str) -> tuple[str, ...]:
    """Of the columns that `cells` fills."""
    return tuple(name.format(unit=unit) for name in (*_TIMES, *_PLACES))


def report(results: Results, summaries: list[Summary]) -> str:
    """For a terminal of 80 columns."""
    timed = [cells(summary) for summary in summaries if summary.drained_ms is not None]
    heads = headers(results.unit)
    parts = [wrapped(setting(results)), *map(wrapped, verdict(summaries, results.unit))]
    if timed:
        for whole in _ON_TERMINAL:
            which = [i for i in whole if any(row[i] for row in timed)]
            parts.append(columns([heads[i] for i in which], [[row[i] for i in which] for row in timed]))
    parts += [wrapped(f"{one.label}: {one.status}", "  ") for one in summaries if one.drained_ms is None]
    if any(summary.traffic == "by formula" for summary in summaries):
        parts.append("* by formula, not counted")
    return "\n\n".join(parts)


def cells(summary: Summary) -> tuple[str, ...]:
    """One contestant; where nothing was timed, why, behind the sizes."""
    sizes = (summary.label, f"{summary.accumulation} x {summary.micro_batch}", f"{summary.items:,}")
    if summary.drained_ms is None:
        return (*sizes, summary.status)
    drained = summary.drained_ms
    rate = summary.items_per_s or 0.0
    mark = "*" if summary.traffic == "by formula" else ""
    return (
        *sizes,
        f"{drained.median:,.1f}",
        f"{drained.low:,.0f}..{drained.high:,.0f}",
        f"{rate:,.0f}" if rate >= 100 else f"{rate:,.1f}",
        "" if summary.utilization is None else f"{summary.utilization:.0%}",
        "" if summary.ratio is None else f"{summary.ratio.median:.2f}",
        *(_bytes(nbytes) for nbytes in (summary.device_peak_bytes, summary.host_peak_bytes)),
        *(_bytes(nbytes) + mark for nbytes in (summary.host_to_device, summary.device_to_host)),
        _bytes(summary.sent),
        _difference(summary),
    )


def _difference(summary: Summary) -> str:
    if summary.loss_difference is None:
        return "reference" if summary.losses_agree is None else ""
    return f"{summary.loss_difference:.1e}{_DIFFERENT[summary.losses_agree]}"


def _bytes(value: int | None) -> str:
    return "" if value is None else amount(value)
