"""Summary of an engine's rounds: medians, spreads, ratios of rounds, agreement of losses."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harmony_ds.bench.engines import adapter
from harmony_ds.bench.results import Results, Row

_REFERENCES = ("torch", "torch-checkpoint", "harmony")

# Two fp32 engines add up in different orders; DeepSpeed's ZeRO-2 sums bf16 gradients in bf16. On CUDA kernels differ too.
_TOLERANCES = {("fp32", "cpu"): 1e-5, ("fp32", "cuda"): 1e-3, ("half", "cpu"): 2e-3, ("half", "cuda"): 2e-2}


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    low: float
    high: float

    @staticmethod
    def of(values: list[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Summary:
    """One line of the report.

    Attributes:
        is_best: whether the micro-batch is the fastest of those that were tried.
        status: "ok", or why there are no numbers.
        step_ms: to the end of all updates.
        items_per_s: tokens (or samples) per second, of the median step.
        ratio: harmony's step time over this engine's, round by round.
        host_to_device, device_to_host: bytes of one step, of each device; `traffic` says how they are known.
        sent: bytes that a device sends to others in one step, as counted in the collectives; None where there are none.
        loss_difference: the largest relative distance from the reference's losses; None for the reference.
        losses_agree: None where there is nothing to compare, or the engine is not exact by design.
    """

    label: str
    engine: str
    micro_batch: int
    accumulation: int
    is_best: bool
    items: int
    status: str = "ok"
    step_ms: Spread | None = None
    items_per_s: float | None = None
    ratio: Spread | None = None
    device_peak_bytes: int | None = None
    host_peak_bytes: int | None = None
    host_to_device: int | None = None
    device_to_host: int | None = None
    sent: int | None = None
    traffic: str = ""
    loss_difference: float | None = None
    losses_agree: bool | None = None


def summarize(results: Results) -> list[Summary]:
    """Return a summary of every contestant, in their order."""
    return [_summary(results, label, row) for label, row in results.rows.items()]


def losses_agree(summaries: list[Summary]) -> bool:
    """Return whether no engine computed something else."""
    return not any(summary.losses_agree is False for summary in summaries)


def tolerance(results: Results) -> float:
    """Return how much a loss may differ, relative."""
    task = next(iter(results.rows.values())).task
    half = any(bool(task["ds_config"].get(key, {}).get("enabled")) for key in ("bf16", "fp16"))
    return _TOLERANCES["half" if half else "fp32", task["device"]]


def _summary(results: Results, label: str, row: Row) -> Summary:
    status = "ok" if row.rounds else "no round was timed"
    if row.error is not None:
        status = ("out of memory: " if row.out_of_memory else "") + row.error
    items, task = results.items_per_step[label], row.task
    sizes = (label, row.engine, task["micro_batch"], task["accumulation"], label in results.sweeps, items, status)
    if not row.rounds:
        return Summary(*sizes)
    step_ms, report = Spread.of(row.milliseconds()), row.report
    to_device, to_host, how = _traffic(report)
    difference, agree = _losses(results, label, row)
    return Summary(
        *sizes,
        step_ms=step_ms,
        items_per_s=items / step_ms.median * 1e3,
        ratio=_ratio(results, row),
        device_peak_bytes=report.get("device_peak_bytes"),
        host_peak_bytes=report.get("host_peak_bytes"),
        host_to_device=to_device,
        device_to_host=to_host,
        sent=report.get("sent_bytes"),
        traffic=how,
        loss_difference=difference,
        losses_agree=agree,
    )


def _ratio(results: Results, row: Row) -> Spread | None:
    """Return harmony's time over this row's, round by round: a slow phase of the machine slows both of a pair."""
    harmony = next((r.rounds for r in _same_step(results, row) if r.engine == "harmony"), {})
    ratios = [harmony[n]["drained_ms"] / row.rounds[n]["drained_ms"] for n in harmony.keys() & row.rounds.keys()]
    return Spread.of(ratios) if ratios else None


def _same_step(results: Results, row: Row) -> list[Row]:
    samples = row.task["micro_batch"] * row.task["accumulation"]
    return [r for r in results.rows.values() if r.task["micro_batch"] * r.task["accumulation"] == samples]


def _losses(results: Results, label: str, row: Row) -> tuple[float | None, bool | None]:
    same = _same_step(results, row)
    reference = next((r for name in _REFERENCES for r in same if r.engine == name and r.losses), None)
    if reference is None or reference is results.rows[label] or not row.losses:
        return None, None
    pairs = zip(row.losses, reference.losses, strict=False)
    difference = max(abs(a - b) / max(abs(b), 1e-30) for a, b in pairs)
    return difference, difference <= tolerance(results) if adapter(row.engine).is_exact else None


def _traffic(report: Mapping[str, Any]) -> tuple[int | None, int | None, str]:
    counted, own = report.get("copied_bytes"), report.get("traffic")
    if own is not None and (counted is None or own["how"].startswith("counted")):
        return sum(own["host_to_device"].values()), sum(own["device_to_host"].values()), own["how"]
    if counted is not None:
        return counted["host_to_device"], counted["device_to_host"], "counted by the CUDA profiler"
    return None, None, ""
