"""A plan as a table: time goes down, a row for each time that a pack runs; what moves meanwhile stands beside it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from harmony_ds.scheduler.crossing import crossing_moves
from harmony_ds.scheduler.plan import Plan, Task, TaskKind
from harmony_ds.scheduler.tiles import Tiles

_WIDTH = 120
_WIDEST_CELL = 24
_ROWS_SHOWN = 96  # of more, the first and the last
_RUNS = {
    TaskKind.FORWARD: "forward",
    TaskKind.FORWARD_FOR_GRAPH: "forward",
    TaskKind.FUSED: "fused",
    TaskKind.BACKWARD: "backward",
    TaskKind.BACKWARD_FROM_GRAPH: "backward",
}
_HEADINGS = (
    "pass",
    "pack",
    "calls",
    "weights",
    "gradients",
    "swap in",
    "runs",
    "stash",
    "crossing",
    "swap out",
    "update",
    "then",
)
_RIGHT = ("pack", "weights", "gradients")
_RUNS_AT = _HEADINGS.index("runs")
_LEGEND = (
    "swap in, swap out, update: packs. runs, stash, crossing: micro-batches; F forward, L forward, loss and backward,",
    "B recompute and backward; K forward, its graph is kept; P back through that. A kept pack waits on the device for",
    "its backward pass. A pack without a row: parameters outside all layer calls.",
)
_MOVES_IN = (TaskKind.STASH_IN, TaskKind.CROSSING_IN, TaskKind.CROSSING_GRADIENTS_IN)
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


@dataclass(slots=True)
class _PackRun:
    """One row of the table: from the first swap-in issued before a pack runs to the last task before the next row's.

    Attributes:
        runs: the first task that runs the pack; None: there is none yet.
        begins: the place of that task among the plan's tasks.
    """

    runs: Task | None = None
    begins: int = 0
    tasks: list[Task] = field(default_factory=list)

    def goes_on(self, task: Task) -> bool:
        """Return whether `task` still belongs to this row."""
        if self.runs is None:
            return True
        if task.kind in _RUNS:
            return (task.kind, task.pack) == (self.runs.kind, self.runs.pack)
        return task.kind is not TaskKind.SWAP_IN


def format_plan(plan: Plan) -> str:
    """Return a table for people, at most 120 columns wide: a row for each time that a pack runs, in order of time. The
    same plan always prints the same.
    """
    pack_runs, closing = _pack_runs(plan)
    headings = [*_HEADINGS]
    if plan.policy.pipeline > 1:
        headings[_RUNS_AT : _RUNS_AT + 1] = [f"device {device}" for device in range(plan.policy.pipeline)]
    table = [tuple(headings), *_fewer([_row(plan, run, run.runs) for run in pack_runs if run.runs])]
    shown = [column for column in range(len(headings)) if any(row[column] for row in table[1:])]
    lines = [*_head(plan), "", *_aligned([[_cut(row[column]) for column in shown] for row in table])]
    return "\n".join([*lines, *_closing(closing), "", *_LEGEND])


def ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 as "0-2,5"; 3, 2, 1 as "3-1"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number - runs[-1][-1] in ((-1, 1) if len(runs[-1]) < 2 else (runs[-1][1] - runs[-1][0],)):
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _head(plan: Plan) -> Iterator[str]:
    policy, packing = plan.policy, plan.packing
    cuts = "the same packs both ways" if len(packing.covering) == len(packing.backward) else "cut differently"
    forward, group = counted(len(packing.forward), "pack"), counted(plan.micro_batches, "micro-batch")
    yield f"{forward} forward, {len(packing.backward)} backward ({cuts}), {group} in a group"
    yield f"device peak {amount(plan.peak_bytes)} planned, {amount(plan.resident_bytes)} of it all the time"
    if policy.pipeline > 1:
        peaks = ", ".join(amount(peak) for peak in plan.device_peaks)
        yield f"packs are dealt to {policy.pipeline} devices in turn (peaks {peaks}); a column shows what each runs"
    away = len(packing.forward[: policy.stash_on_host])
    stash = f"of {away} forward packs on the host" if away else "on the device"
    if not policy.grouping:
        yield "no grouping: each micro-batch passes all packs on its own"
    if policy.joined_count > 1:
        yield f"layer calls take the rows of {policy.joined_count} micro-batches, which are one in what follows"
    if policy.forward_rows or policy.backward_rows:
        yield (
            f"micro-batches go through layers in slices of {policy.forward_rows or 'all'} rows forward and "
            f"{policy.backward_rows or 'all'} rows backward"
        )
    tiles = Tiles.from_policy(policy)
    if tiles.cut:
        yield str(tiles)
    updates = "when the norm of all gradients is known" if policy.deferred_update else "as gradients arrive"
    yield f"stash {stash}; updates {updates}; swap-ins {'one pack ahead' if policy.prefetch else 'when needed'}"
    if crossing_moves(packing, policy):
        yield "what micro-batches hold between two packs (crossing tensors) waits on the host"


def _pack_runs(plan: Plan) -> tuple[list[_PackRun], Sequence[Task]]:
    """Return the rows of the table in order of time, and the tasks from the norm on."""
    tasks = plan.tasks
    end = next((place for place, task in enumerate(tasks) if task.kind is TaskKind.NORM), len(tasks))
    pack_runs: list[_PackRun] = []
    for device in range(plan.policy.pipeline):
        own = [_PackRun()]
        early: defaultdict[int, list[Task]] = defaultdict(list)  # by pack: what comes back while another pack runs
        for place, task in enumerate(tasks[:end]):
            if plan.packs[task.pack].device != device:
                continue
            runs = own[-1].runs
            if task.kind in _MOVES_IN and runs is not None and runs.pack != task.pack:
                early[task.pack].append(task)
                continue
            if not own[-1].goes_on(task):
                own.append(_PackRun())
            if task.kind in _RUNS and own[-1].runs is None:
                own[-1].runs, own[-1].begins = task, place
                own[-1].tasks += early.pop(task.pack, [])
            own[-1].tasks.append(task)
        pack_runs += own
    return sorted(pack_runs, key=lambda run: run.begins), tasks[end:]


def _numbers(tasks: Iterable[Task], kind: TaskKind) -> list[int]:
    """Packs, or micro-batches where there are any, of the tasks of that kind."""
    return [task.pack if task.micro_batch < 0 else task.micro_batch for task in tasks if task.kind is kind]


def _row(plan: Plan, run: _PackRun, runs: Task) -> tuple[str, ...]:
    pack, numbers = plan.packs[runs.pack], partial(_numbers, run.tasks)
    out, back, updates = numbers(TaskKind.STASH_OUT), numbers(TaskKind.STASH_IN), numbers(TaskKind.UPDATE)
    crossing_out = numbers(TaskKind.CROSSING_OUT) + numbers(TaskKind.CROSSING_GRADIENTS_OUT)
    crossing_in = numbers(TaskKind.CROSSING_IN) + numbers(TaskKind.CROSSING_GRADIENTS_IN)
    updated: list[str] = []
    if updates:
        updated.append(f"on host {ranges(updates)}")
    if numbers(TaskKind.UPDATE_ON_DEVICE):
        updated.append("on device")
    ran = f"{runs.kind.value} {ranges(numbers(runs.kind))}"
    evicted = "evicted" if pack.index in numbers(TaskKind.EVICT) else "kept"
    return (
        _RUNS[runs.kind],
        str(pack.index),
        ranges(pack.positions) if len(pack.positions) > 1 else str(pack.positions[0]),
        amount(pack.weight_bytes),
        "" if _RUNS[runs.kind] == "forward" else amount(pack.gradient_bytes),
        ranges(numbers(TaskKind.SWAP_IN)),
        *["" if device != pack.device else ran for device in range(plan.policy.pipeline)],
        _moves(out, back),
        _moves(crossing_out, crossing_in),
        ranges(numbers(TaskKind.SWAP_OUT)),
        " ".join(updated),
        "resident" if pack.index in plan.policy.resident else evicted,
    )


def _moves(out: Sequence[int], back: Sequence[int]) -> str:
    """Return which micro-batches leave the device and come back: "out 0-3 in 1-3"."""
    leaving = [f"out {ranges(out)}"] if out else []
    returning = [f"in {ranges(back)}"] if back else []
    return " ".join(leaving + returning)


def _fewer(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    left = len(rows) - _ROWS_SHOWN
    if left <= 0:
        return rows
    half = _ROWS_SHOWN // 2
    return [*rows[:half], (f"... {left} more", *("" for _ in rows[0][1:])), *rows[-half:]]


def _aligned(table: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    right = [heading in _RIGHT for heading in table[0]]
    for row in table:
        cells = [
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(row, widths, right, strict=True)
        ]
        yield _cut("  ".join(cells).rstrip(), _WIDTH)


def _closing(tasks: Sequence[Task]) -> Iterator[str]:
    updates, there = _numbers(tasks, TaskKind.UPDATE), _numbers(tasks, TaskKind.UPDATE_ON_DEVICE)
    parts = ["norm of all gradients"]
    parts += [f"updates of {ranges(updates)} on the host, under the next forward pass"] if updates else []
    parts += [f"updates of {ranges(there)} on the device"] if there else []
    if tasks:
        yield _cut("then      " + "; ".join(parts), _WIDTH)


def _cut(text: str, width: int = _WIDEST_CELL) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def counted(number: int, noun: str) -> str:
    """Return "1 pack", "2 packs", "2 micro-batches"."""
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith(("ch", "ss")) else "s")


def amount(nbytes: int) -> str:
    """Bytes for people."""
    for unit, name in _UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:,.1f} {name}"
    return f"{nbytes} B"


def gib_number(nbytes: int) -> str:
    """Return GiB that hold `nbytes`, for harmony.device_memory_gib: four digits, rounded up."""
    if nbytes <= 0:
        return "0"
    gib = nbytes / 2**30
    step = 10.0 ** (math.floor(math.log10(gib)) - 3)
    return f"{math.ceil(gib / step) * step:.4g}"


def duration(ms: float) -> str:
    """Milliseconds for people."""
    return f"{ms / 1e3:,.1f} s" if ms >= 1e3 else f"{ms:.1f} ms"
