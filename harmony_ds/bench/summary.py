"""From rounds to what is said of an engine: medians, spreads, ratios of rounds, agreement of losses."""

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
        status: "ok", or why there are no numbers.
        items_per_s: tokens (or samples) per second, of the median step, to the end of all updates.
        utilization: model FLOPs over what the device could do in that time; None where its peak is not known.
        ratio: harmony's drained step time over this engine's, round by round.
        host_to_device, device_to_host: bytes of one step; `traffic` says how they are known.
        loss_difference: the largest relative distance from the reference's losses; None for the reference.
        losses_agree: None where there is nothing to compare, or the engine is not exact by design.
    """

    label: str
    engine: str
    micro_batch: int
    accumulation: int
    items: int
    status: str
    step_ms: Spread | None = None
    drained_ms: Spread | None = None
    cpu_ms: Spread | None = None
    items_per_s: float | None = None
    utilization: float | None = None
    ratio: Spread | None = None
    device_peak_bytes: int | None = None
    host_peak_bytes: int | None = None
    host_to_device: int | None = None
    device_to_host: int | None = None
    traffic: str = ""
    loss_difference: float | None = None
    losses_agree: bool | None = None


def summarize(results: Results) -> list[Summary]:
    """In the order of the contestants."""
    return [_summary(results, label, row) for label, row in results.rows.items()]


def losses_agree(summaries: list[Summary]) -> bool:
    """Whether nobody computed something else."""
    return not any(summary.losses_agree is False for summary in summaries)


def tolerance(results: Results) -> float:
    """Relative, of a loss."""
    task = next(iter(results.rows.values())).task
    config = task["ds_config"]
    half = any(bool(config.get(key, {}).get("enabled")) for key in ("bf16", "fp16"))
    return _TOLERANCES["half" if half else "fp32", task["device"]]


def _summary(results: Results, label: str, row: Row) -> Summary:
    task = row.task
    items = results.items_per_step[label]
    status = "ok"
    if row.error is not None:
        status = ("out of memory: " if row.out_of_memory else "") + row.error
    elif not row.rounds:
        status = "no round was timed"
    if not row.rounds:
        return Summary(label, row.engine, task["micro_batch"], task["accumulation"], items, status)
    drained = Spread.of(row.milliseconds("drained_ms"))
    coming, going, how = _traffic(row.report)
    difference, agree = _losses(results, label, row)
    return Summary(
        label=label,
        engine=row.engine,
        micro_batch=task["micro_batch"],
        accumulation=task["accumulation"],
        items=items,
        status=status,
        step_ms=Spread.of(row.milliseconds()),
        drained_ms=drained,
        cpu_ms=Spread.of(row.milliseconds("cpu_ms")),
        items_per_s=items / drained.median * 1e3,
        utilization=_utilization(results, label, drained.median),
        ratio=_ratio(results, row),
        device_peak_bytes=row.report.get("device_peak_bytes"),
        host_peak_bytes=row.report.get("host_peak_bytes"),
        host_to_device=coming,
        device_to_host=going,
        traffic=how,
        loss_difference=difference,
        losses_agree=agree,
    )


def _utilization(results: Results, label: str, ms: float) -> float | None:
    if results.peak_tflops is None:
        return None
    return results.flops_per_step[label] / (ms * 1e-3) / (results.peak_tflops[0] * 1e12)


def _ratio(results: Results, row: Row) -> Spread | None:
    """Round by round: what slows the machine down slows both of a pair down."""
    harmony = next((r for r in _same_step(results, row) if r.engine == "harmony" and r.rounds), None)
    if harmony is None:
        return None
    both = sorted({*harmony.rounds} & {*row.rounds})
    return Spread.of([harmony.rounds[n]["drained_ms"] / row.rounds[n]["drained_ms"] for n in both]) if both else None


def _same_step(results: Results, row: Row) -> list[Row]:
    samples = row.task["micro_batch"] * row.task["accumulation"]
    return [r for r in results.rows.values() if r.task["micro_batch"] * r.task["accumulation"] == samples]


def _losses(results: Results, label: str, row: Row) -> tuple[float | None, bool | None]:
    same = _same_step(results, row)
    reference = next((r for name in _REFERENCES for r in same if r.engine == name and r.losses), None)
    if reference is None or reference is results.rows[label]:
        return None, None
    pairs = list(zip(row.losses, reference.losses, strict=False))
    if not pairs:
        return None, None
    difference = max(abs(a - b) / max(abs(b), 1e-30) for a, b in pairs)
    return difference, difference <= tolerance(results) if adapter(row.engine).is_exact else None


def _traffic(report: Mapping[str, Any]) -> tuple[int | None, int | None, str]:
    counted = report.get("copied_bytes")
    own = report.get("traffic")
    if own is not None and (counted is None or own["how"].startswith("counted")):
        return sum(own["host_to_device"].values()), sum(own["device_to_host"].values()), own["how"]
    if counted is not None:
        return counted["host_to_device"], counted["device_to_host"], "counted by the CUDA profiler"
    return None, None, ""
