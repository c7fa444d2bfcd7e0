"""Sum up the rounds of each engine: medians, spreads, ratios to harmony, and whether losses agree."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harmony_ds.bench.results import Results, Row

_REFERENCES = ("torch", "torch-checkpoint", "harmony")

# Two fp32 engines add up in different orders; DeepSpeed's ZeRO-2 sums bf16 gradients in bf16. On CUDA kernels differ too.
_TOLERANCES = {(4, "cpu"): 1e-5, (4, "cuda"): 1e-3, (2, "cpu"): 2e-3, (2, "cuda"): 2e-2}
"""By the bytes of a number that is computed with, and the device."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and largest of several values."""

    median: float
    low: float
    high: float

    @staticmethod
    def from_values(values: list[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Summary:
    """One line of the report: a row among the others of its comparison.

    Attributes:
        items: tokens (or samples) of a step.
        step_ms: time of a step to the end of all updates; None where no round was timed.
        ratio: harmony's time over this row's, round by round: a slow phase of the machine slows both of a pair.
        loss_difference: the largest relative distance from the reference's losses; None for the reference.
        memory: peaks in bytes, by "device" and "host".
        moved: bytes of one step of each device, by "to device", "to host" and "sent" (to other processes).
        by_formula: whether those bytes were not counted.
    """

    label: str
    row: Row
    items: int
    step_ms: Spread | None
    ratio: Spread | None
    loss_difference: float | None
    losses_agree: bool
    memory: Mapping[str, int | None]
    moved: Mapping[str, int | None]
    by_formula: bool

    @property
    def items_per_s(self) -> float:
        assert self.step_ms is not None
        return self.items / self.step_ms.median * 1e3

    @property
    def status(self) -> str:
        """The reason why there are no numbers."""
        if self.row.error is None:
            return "no round was timed"
        return ("out of memory: " if self.row.out_of_memory else "") + self.row.error


def summarize(results: Results) -> list[Summary]:
    """Return a summary of every row, in their order."""
    return [_summary(label, row, results) for label, row in results.rows.items()]


def _summary(label: str, row: Row, results: Results) -> Summary:
    alike = [other for other in results.rows.values() if other.task.samples == row.task.samples]
    times = {number: times["drained_ms"] for number, times in row.rounds.items()}
    ours = next((other.rounds for other in alike if other.engine == "harmony"), {})
    ratios = [ours[number]["drained_ms"] / times[number] for number in ours.keys() & times.keys()]
    difference, traffic = _loss_difference(row, alike), _traffic(row.report)
    return Summary(
        label,
        row,
        items=results.sample_items * row.task.samples,
        step_ms=Spread.from_values(list(times.values())) if times else None,
        ratio=Spread.from_values(ratios) if ratios else None,
        loss_difference=difference,
        losses_agree=(difference or 0.0) <= tolerance(results),
        memory={kind: row.report.get(f"{kind}_peak_bytes") for kind in ("device", "host")},
        moved={
            "to device": _total(traffic.get("host_to_device")),
            "to host": _total(traffic.get("device_to_host")),
            "sent": row.report.get("sent_bytes"),
        },
        by_formula=traffic.get("how") == "by formula",
    )


def _loss_difference(row: Row, alike: list[Row]) -> float | None:
    losses = (other for name in _REFERENCES for other in alike if other.engine == name and other.losses)
    reference = next(losses, row)
    if reference is row or not row.losses:
        return None
    pairs = zip(row.losses, reference.losses, strict=False)
    return max(abs(a - b) / max(abs(b), 1e-30) for a, b in pairs)


def _traffic(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the bytes by direction and kind: those that were counted, if any."""
    own: Mapping[str, Any] = report.get("traffic", {})
    copied = report.get("copied_bytes")
    if copied is None or own.get("how") == "counted by the engine":
        return own
    return {way: {"by the CUDA profiler": nbytes} for way, nbytes in copied.items()}


def _total(by_kind: Mapping[str, int] | None) -> int | None:
    return None if by_kind is None else sum(by_kind.values())


def tolerance(results: Results) -> float:
    """Return how much a loss may differ, relative."""
    task = next(iter(results.rows.values())).task
    return _TOLERANCES[task.settings.compute_dtype.itemsize, task.device]
