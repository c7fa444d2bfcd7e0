"""Summary of an engine's rounds: medians, spreads, ratios of rounds, agreement of losses."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

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
    """One line of the report: a row among the others of its comparison."""

    label: str
    row: Row
    results: Results

    @property
    def items(self) -> int:
        """Tokens (or samples) of a step."""
        return self.results.sample_items * self.row.task.samples

    @property
    def is_ours(self) -> bool:
        return self.row.engine == "harmony"

    @property
    def status(self) -> str:
        """Why there are no numbers, or "ok"."""
        if self.row.error is not None:
            return ("out of memory: " if self.row.out_of_memory else "") + self.row.error
        return "ok" if self.row.rounds else "no round was timed"

    @property
    def step_ms(self) -> Spread | None:
        """To the end of all updates; None where no round was timed."""
        times = [times["drained_ms"] for times in self.row.rounds.values()]
        return Spread.of(times) if times else None

    @property
    def items_per_s(self) -> float:
        assert self.step_ms is not None
        return self.items / self.step_ms.median * 1e3

    @property
    def ratio(self) -> Spread | None:
        """Time of a step of harmony over this row's, round by round: a slow phase of the machine slows both of a pair."""
        ours = next((other.rounds for other in self._alike if other.engine == "harmony"), {})
        own = self.row.rounds
        ratios = [ours[number]["drained_ms"] / own[number]["drained_ms"] for number in ours.keys() & own.keys()]
        return Spread.of(ratios) if ratios else None

    @property
    def loss_difference(self) -> float | None:
        """The largest relative distance from the reference's losses; None for the reference."""
        losses = (other for name in _REFERENCES for other in self._alike if other.engine == name and other.losses)
        reference = next(losses, self.row)
        if reference is self.row or not self.row.losses:
            return None
        pairs = zip(self.row.losses, reference.losses, strict=False)
        return max(abs(a - b) / max(abs(b), 1e-30) for a, b in pairs)

    @property
    def losses_agree(self) -> bool:
        return (self.loss_difference or 0.0) <= tolerance(self.results)

    @property
    def memory(self) -> dict[str, int | None]:
        """Peaks, by "device" and "host", in bytes."""
        return {kind: self.row.report.get(f"{kind}_peak_bytes") for kind in ("device", "host")}

    @property
    def moved(self) -> dict[str, int | None]:
        """Bytes of one step of each device, by "to device", "to host" and "sent" (to other processes)."""
        to_device, to_host = (self._traffic.get(way) for way in ("host_to_device", "device_to_host"))
        sums = {
            way: None if by is None else sum(by.values())
            for way, by in (("to device", to_device), ("to host", to_host))
        }
        return {**sums, "sent": self.row.report.get("sent_bytes")}

    @property
    def by_formula(self) -> bool:
        """Whether those bytes were not counted."""
        return bool(self._traffic.get("how") == "by formula")

    @property
    def _traffic(self) -> dict[str, Any]:
        own, copied = self.row.report.get("traffic", {}), self.row.report.get("copied_bytes")
        if copied is None or own.get("how") == "counted by the engine":
            return dict(own)
        return {way: {"by the CUDA profiler": nbytes} for way, nbytes in copied.items()}

    @property
    def _alike(self) -> list[Row]:
        return [other for other in self.results.rows.values() if other.task.samples == self.row.task.samples]


def summarize(results: Results) -> list[Summary]:
    """Return a summary of every row, in their order."""
    return [Summary(label, row, results) for label, row in results.rows.items()]


def tolerance(results: Results) -> float:
    """Return how much a loss may differ, relative."""
    task = next(iter(results.rows.values())).task
    half = any(bool(task.ds_config.get(key, {}).get("enabled")) for key in ("bf16", "fp16"))
    return _TOLERANCES["half" if half else "fp32", task.device]
