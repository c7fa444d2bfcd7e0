"""What `run` found, as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.vldb22.planner.graph import Setup
from benchmarks.vldb22.planner.search import Answer
from benchmarks.vldb22.reference import LAST_PROFILED, Shipped

_HEAD = """# Harmony's published schedules, simulated and improved

<!-- written by benchmarks/vldb22/run.py -->

`python benchmarks/vldb22/run.py` writes this page ({seconds:.0f} s of one core).

These are **estimates under the original's cost model, not measurements**: its formulas and constants (11.5 GiB/s
between host and devices, shared by all of them; 8.2 GiB/s between two devices; 40 ms to free a task), its per-layer
profiles of a GTX 1080 Ti (`benchmarks/vldb22/data`), and device memory by its capacity formula. They say that the task
graphs, the bytes and the event kernel are the original's, and what a wider search gains under the same rules. They say
nothing about other hardware, nor about how long this package's engine takes.

- **Simulation:** {cases} schedules in two modes; the largest difference to the original's estimate is {error:.2f} %
  ({interpolated:.4f} % where the micro-batches are within the profile: it ends at {last} for BERT, some published
  schedules go up to 120, and times beyond are extrapolated; of the schedules found, {beyond} go beyond).
- **Bytes:** {volumes}.
- **Search:** for each schedule, under the memory of its own largest pack, the best found takes {least:.2f} % to
  {most:.1f} % less than the published one (median {median:.1f} %). {equal}

A schedule is (U_F, number of forward packs, U_B, number of backward packs), U the samples of a micro-batch. vDP is
data parallel, vPP the wrap-around pipeline; N devices, D samples a step. Gains are over our simulation of the published
schedule, which is the lower of its two estimates wherever they differ.
"""

_TABLE = """
## {title}

| model | D | mode | N | published | estimate s | simulated s | error % | bytes equal | best found | estimate s | gain % |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""

_SCALING = """
## One to eight devices

GPT2-10B, D = 32, overlapped; the published packs are (1, 26, 1, 27) for every N. Speed-ups are over one device with
the same packs. Where N does not divide 32 the first devices of vDP have one sample more.

| mode | N | published packs: s | speed-up | best found | s | speed-up |
|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One shipped schedule in one mode.

    Attributes:
        case: the schedule.
        overlap: the mode.
        simulated_s: the same schedule here.
        differences: kinds of bytes that differ.
        answer: the best schedule found under the memory of the shipped one.
    """

    case: Shipped
    overlap: bool
    simulated_s: float
    differences: tuple[str, ...]
    answer: Answer


@dataclass(frozen=True, slots=True)
class Scaling:
    """One number of devices, overlapped: milliseconds of the shipped packs and of the best schedule found."""

    setup: Setup
    shipped_ms: float
    answer: Answer


def report(rows: Sequence[Row], scalings: Sequence[Scaling], seconds: float) -> str:
    """The whole page.

    Args:
        rows: of all schedules, without and with overlap.
        scalings: the first of each mode is one device.
        seconds: that it took.
    """
    text = _head(rows, seconds)
    for title, overlap in (("Without overlap", False), ("With prefetch and offload overlapped", True)):
        text += _TABLE.format(title=title)
        text += "".join(_line(row) for row in rows if row.overlap is overlap)
    if scalings:
        text += _SCALING + "".join(_scaling_line(one, scalings) for one in scalings)
    return text


def _head(rows: Sequence[Row], seconds: float) -> str:
    gains = sorted(round(_gain(row), 3) + 0.0 for row in rows)
    errors = [(abs(_error(row)), row.case.schedule.forward_micro_batch) for row in rows]
    different = {row.case.name for row in rows if row.differences}
    equal = [f"{row.case.model} {row.case.name}" for row in rows if abs(_gain(row)) < 0.005]
    beyond = sum(row.answer.schedule.forward_micro_batch > LAST_PROFILED for row in rows)
    return _HEAD.format(
        seconds=seconds,
        cases=len(rows) // 2,
        error=max(error for error, _ in errors),
        interpolated=max((error for error, size in errors if size <= LAST_PROFILED), default=0.0),
        last=LAST_PROFILED,
        beyond=beyond or "none",
        volumes=f"differ in {sorted(different)}" if different else "of every kind equal, byte for byte, in all of them",
        least=gains[0],
        most=gains[-1],
        median=gains[len(gains) // 2],
        equal=f"Equal: {', '.join(equal)}." if equal else "",
    )


def _line(row: Row) -> str:
    case, setup = row.case, row.case.setup
    cells = [
        case.model,
        setup.batch,
        setup.mode.value,
        setup.devices,
        case.schedule,
        f"{case.time_s[row.overlap]:.2f}",
        f"{row.simulated_s:.2f}",
        f"{_error(row):+.2f}",
        "no: " + ", ".join(row.differences) if row.differences else "yes",
        row.answer.schedule,
        f"{row.answer.time_ms / 1000:.2f}",
        f"{round(_gain(row), 2) + 0.0:.2f}",
    ]
    return f"| {' | '.join(map(str, cells))} |\n"


def _error(row: Row) -> float:
    return 100 * (row.simulated_s / row.case.time_s[row.overlap] - 1)


def _gain(row: Row) -> float:
    """Percent of our simulation of the published schedule: both times are by the same rules."""
    return 100 * (1 - row.answer.time_ms / 1000 / row.simulated_s)


def _scaling_line(one: Scaling, scalings: Sequence[Scaling]) -> str:
    alone = next(other for other in scalings if other.setup.mode is one.setup.mode)
    cells = [
        one.setup.mode.value,
        one.setup.devices,
        f"{one.shipped_ms / 1000:.1f}",
        f"{alone.shipped_ms / one.shipped_ms:.2f}",
        one.answer.schedule,
        f"{one.answer.time_ms / 1000:.1f}",
        f"{alone.answer.time_ms / one.answer.time_ms:.2f}",
    ]
    return f"| {' | '.join(map(str, cells))} |\n"
