"""The table that `harmony-ds bench` prints."""

from __future__ import annotations

from rich.table import Table

from harmony_ds.bench.summary import Summary
from harmony_ds.scheduler.grid import amount


def headers(unit: str) -> tuple[str, ...]:
    """Of the columns that `cells` fills."""
    sizes = ("engine", "micro-batch", f"{unit}/step")
    times = ("step ms", "low..high", f"{unit}/s", "MFU", "harmony/it")
    return (*sizes, *times, "device peak", "host peak", "to device", "to host", "loss diff.")


def table(summaries: list[Summary], unit: str) -> Table:
    """One line per contestant, for a terminal."""
    out = Table(box=None, header_style="bold", pad_edge=False)
    first, *others = headers(unit)
    out.add_column(first, overflow="fold", min_width=16)
    for header in others:
        out.add_column(header, justify="right")
    for summary in summaries:
        out.add_row(*cells(summary))
    return out


def cells(summary: Summary) -> tuple[str, ...]:
    """One contestant; where nothing was timed, why, behind the sizes."""
    sizes = (summary.label, f"{summary.micro_batch} x {summary.accumulation}", f"{summary.items:,}")
    if summary.drained_ms is None:
        return (*sizes, summary.status)
    drained = summary.drained_ms
    rate = summary.items_per_s or 0.0
    return (
        *sizes,
        f"{drained.median:,.1f}",
        f"{drained.low:,.0f}..{drained.high:,.0f}",
        f"{rate:,.0f}" if rate >= 100 else f"{rate:,.1f}",
        "" if summary.utilization is None else f"{summary.utilization:.0%}",
        "" if summary.ratio is None else f"{summary.ratio.median:.2f}",
        _bytes(summary.device_peak_bytes),
        _bytes(summary.host_peak_bytes),
        _bytes(summary.host_to_device) + _mark(summary),
        _bytes(summary.device_to_host) + _mark(summary),
        _difference(summary),
    )


def _mark(summary: Summary) -> str:
    """An asterisk where bytes are computed and not counted."""
    return "*" if summary.traffic == "by formula" else ""


def _difference(summary: Summary) -> str:
    if summary.loss_difference is None:
        return "reference" if summary.losses_agree is None else ""
    mark = {True: "", False: " !", None: " (not exact by design)"}[summary.losses_agree]
    return f"{summary.loss_difference:.1e}{mark}"


def _bytes(value: int | None) -> str:
    return "" if value is None else amount(value)
