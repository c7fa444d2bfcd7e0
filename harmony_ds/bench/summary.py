"""Summary of an engine's rounds: medians, spreads, ratios of rounds, agreement of losses."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from harmony_ds.bench.results import Results, Row

BY_FORMULA = "by formula"
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
        items: tokens (or samples) of a step.
        status: "ok", or why there are no numbers.
        is_best: whether the micro-batch is the fastest of those that were tried.
        step_ms: to the end of all updates; None where no round was timed.
        ratio: harmony's step time over this engine's, round by round.
        memory: peaks, by "device" and "host", in bytes.
        moved: bytes of one step of each device, by "to device", "to host" and "sent" (to other processes).
        traffic: how the bytes are known.
        loss_difference: the largest relative distance from the reference's losses; None for the reference.
    """

    label: str
    engine: str
    micro_batch: int
    accumulation: int
    items: int
    status: str
    is_best: bool
    step_ms: Spread | None
    ratio: Spread | None
    memory: dict[str, int | None]
    moved: dict[str, int | None]
    traffic: str
    loss_difference: float | None
    losses_agree: bool

    @property
    def items_per_s(self) -> float:
        assert self.step_ms is not None
        return self.items / self.step_ms.median * 1e3


def summarize(results: Results) -> list[Summary]:
    """Return a summary of every contestant, in their order."""
    return [_summary(results, label, row) for label, row in results.rows.items()]


def losses_agree(summaries: list[Summary]) -> bool:
    """Return whether no engine computed something else."""
    return all(summary.losses_agree for summary in summaries)


def tolerance(results: Results) -> float:
    """Return how much a loss may differ, relative."""
    task = next(iter(results.rows.values())).task
    half = any(bool(task["ds_config"].get(key, {}).get("enabled")) for key in ("bf16", "fp16"))
    return _TOLERANCES["half" if half else "fp32", task["device"]]


def _summary(results: Results, label: str, row: Row) -> Summary:
    status = "ok" if row.rounds else "no round was timed"
    if row.error is not None:
        status = ("out of memory: " if row.out_of_memory else "") + row.error
    samples = row.task["micro_batch"] * row.task["accumulation"]
    alike = [r for r in results.rows.values() if r.task["micro_batch"] * r.task["accumulation"] == samples]
    to_device, to_host, how = _traffic(row.report)
    difference = _loss_difference(row, alike)
    return Summary(
        label=label,
        engine=row.engine,
        micro_batch=row.task["micro_batch"],
        accumulation=row.task["accumulation"],
        items=results.items_per_step[label],
        status=status,
        is_best=label in results.sweeps,
        step_ms=Spread.of(row.milliseconds()) if row.rounds else None,
        ratio=_ratio(row, alike),
        memory={kind: row.report.get(f"{kind}_peak_bytes") for kind in ("device", "host")},
        moved={"to device": to_device, "to host": to_host, "sent": row.report.get("sent_bytes")},
        traffic=how,
        loss_difference=difference,
        losses_agree=difference is None or difference <= tolerance(results),
    )


def _ratio(row: Row, alike: list[Row]) -> Spread | None:
    """Return harmony's time over this row's, round by round: a slow phase of the machine slows both of a pair."""
    harmony = next((other.rounds for other in alike if other.engine == "harmony"), {})
    ratios = [harmony[n]["drained_ms"] / row.rounds[n]["drained_ms"] for n in harmony.keys() & row.rounds.keys()]
    return Spread.of(ratios) if ratios else None


def _loss_difference(row: Row, alike: list[Row]) -> float | None:
    reference = next((other for name in _REFERENCES for other in alike if other.engine == name and other.losses), row)
    if reference is row or not row.losses:
        return None
    pairs = zip(row.losses, reference.losses, strict=False)
    return max(abs(a - b) / max(abs(b), 1e-30) for a, b in pairs)


def _traffic(report: dict[str, Any]) -> tuple[int | None, int | None, str]:
    counted, own = report.get("copied_bytes"), report.get("traffic")
    if own is not None and (counted is None or own["how"].startswith("counted")):
        return sum(own["host_to_device"].values()), sum(own["device_to_host"].values()), own["how"]
    if counted is not None:
        return counted["host_to_device"], counted["device_to_host"], "counted by the CUDA profiler"
    return None, None, ""
