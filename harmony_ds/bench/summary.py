"""From rounds to what is said of an engine: medians, spreads, ratios of rounds, agreement of losses."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
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
        host_to_device, device_to_host: bytes of one step, of each device; `traffic` says how they are known.
        sent: bytes that a device sends to others in one step, as counted in the collectives; None where there are none.
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
    sent: int | None = None
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


def setting(results: Results) -> str:
    """What was compared, in one paragraph: model, step, dtypes, machine, memory cap."""
    tasks = [row.task for row in results.rows.values()]
    task, machine = tasks[0], results.environment
    config = task["ds_config"]
    dtype = next((name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled")), "fp32")
    summed = config.get("data_types", {}).get("grad_accum_dtype") or "fp32"
    steps = sorted(
        {(one["accumulation"], one["micro_batch"]) for one in tasks if one["memory_gib"] == task["memory_gib"]}
    )
    items = sorted({*results.items_per_step.values()})
    where = machine.get("gpu") or f"{machine['cpu']} as the device, {_counted(task['threads'], 'thread')} a process"
    devices = task.get("devices", 1)
    each = "" if devices == 1 else f" on each of {devices} devices"
    cap = "no cap on device memory"
    if task["memory_gib"] is not None:
        whom = "for every engine" if task["device"] == "cuda" else "kept by harmony alone: a CPU enforces none"
        cap = f"device memory capped at {task['memory_gib']:g} GiB, {whom}"
    cuts = ", ".join(f"{_counted(count, 'micro-batch')} of {_counted(rows, 'row')}" for count, rows in steps)
    return (
        f"{Path(task['model']).name}: {results.parameters:,} parameters; {cuts}{each}, "
        f"{', '.join(f'{count:,}' for count in items)} {results.unit} a step; computed in {dtype}, gradients summed in "
        f"{summed}; {where}; {cap}."
    )


def verdict(summaries: list[Summary], unit: str) -> list[str]:
    """Who won by what: a line for each size of a step, with harmony's time against the others'."""
    timed = [summary for summary in summaries if summary.drained_ms is not None]
    sizes = sorted({summary.items for summary in timed})
    return [_verdict([one for one in timed if one.items == size], unit) for size in sizes]


def _verdict(timed: list[Summary], unit: str) -> str:
    by_time = sorted(timed, key=lambda one: one.drained_ms.median if one.drained_ms else 0.0)
    best, *others = by_time
    assert best.drained_ms is not None
    fastest = f"{best.items:,} {unit} a step: {_name(best)} is fastest, {best.drained_ms.median:,.1f} ms"
    ratios = [
        f"{one.ratio.median:.2f} of {_name(one)}'s time ({one.ratio.low:.2f} to {one.ratio.high:.2f}{_even(one.ratio)})"
        for one in (best, *others)
        if one.ratio is not None and one.engine != "harmony"
    ]
    return f"{fastest}." + (f" harmony takes {', '.join(ratios)}." if ratios else "")


def _name(summary: Summary) -> str:
    """Without the size of a step, which a label has where there are several."""
    return summary.label.partition(" | ")[0]


def _even(ratio: Spread) -> str:
    return ": no clear winner" if ratio.low < 1 < ratio.high else ""


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('ch') else 's'}"


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
        sent=row.report.get("sent_bytes"),
        traffic=how,
        loss_difference=difference,
        losses_agree=agree,
    )


def _utilization(results: Results, label: str, ms: float) -> float | None:
    if results.peak_tflops is None:
        return None
    devices: int = results.rows[label].task.get("devices", 1)
    return results.flops_per_step[label] / devices / (ms * 1e-3) / (results.peak_tflops[0] * 1e12)


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
