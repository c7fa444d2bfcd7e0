"""A plan as a table: time goes down, a row for each time that a pack runs; what moves meanwhile stands beside it.

Knows tasks by their letters (see `scheduler.plan`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harmony_ds.scheduler.plan import Pack, Plan, Policy, Task

_WIDTH = 120
_WIDEST_CELL = 24
_ROWS_SHOWN = 48  # of each pass; of more, the first and the last
_RUNS = {"F": "forward", "L": "fused", "B": "backward"}
_HEADINGS = ("pass", "pack", "calls", "weights", "gradients", "swap in", "runs", "stash", "swap out", "update", "then")
_RIGHT = ("pack", "weights", "gradients")
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


@dataclass(slots=True)
class _Visit:
    """The tasks from the first swap-in issued before a pack runs to the last one before the next pack's."""

    pack: int = -1
    letter: str = ""
    tasks: list[Task] = field(default_factory=list)

    def numbers(self, letter: str) -> list[int]:
        """Packs, or micro-batches where there are any, of the tasks of that letter."""
        found = [task for task in self.tasks if task.kind.value == letter]
        return [task.pack if task.micro_batch < 0 else task.micro_batch for task in found]


def format_plan(plan: Plan) -> str:
    """Its packs, in the order in which they run. The same plan always prints the same."""
    visits, closing = _visits(plan.tasks, plan.policy.updates_last)
    rows = [row for part in _rounds(plan, visits) for row in part]
    table = [_HEADINGS, *(row for _, same in groupby(rows, key=lambda row: row[0]) for row in _fewer(list(same)))]
    shown = [column for column in range(len(_HEADINGS)) if any(row[column] for row in table[1:])]
    lines = [*_head(plan), "", *_aligned([[_cut(row[column]) for column in shown] for row in table])]
    return "\n".join([*lines, *_closing(closing, plan.policy.overlap_update), "", *_legend(plan)])


def ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 as "0-2,5"; 3, 2, 1 as "3-1"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and abs(number - runs[-1][-1]) == 1 and (len(runs[-1]) < 2 or number - runs[-1][-1] == _step(runs[-1])):
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _step(run: list[int]) -> int:
    return run[1] - run[0]


def _head(plan: Plan) -> Iterator[str]:
    policy, packing = plan.policy, plan.packing
    cuts = "the same packs both ways" if len(plan.packs) == len(packing.backward) else "cut differently"
    yield (
        f"{len(packing.forward)} packs forward, {len(packing.backward)} backward ({cuts}), "
        f"{plan.micro_batches} micro-batches in a group"
    )
    yield f"device peak {amount(plan.peak_bytes)} planned, {amount(plan.resident_bytes)} of it all the time"
    away = sum(index in packing.forward[: policy.stash_on_host] for index in packing.forward)
    stash = f"of {away} forward packs on the host" if away else "on the device"
    if not policy.grouping:
        yield "no grouping: each micro-batch passes all packs on its own"
    if not policy.overlap_update:
        yield "no overlap of updates: all else waits for them"
    if policy.forward_rows or policy.backward_rows:
        yield (
            f"micro-batches go through layers in pieces of {policy.forward_rows or 'all'} rows forward and "
            f"{policy.backward_rows or 'all'} rows backward"
        )
    yield f"stash {stash}; updates {_when(policy)}; swap-ins {'one pack ahead' if policy.prefetch else 'when needed'}"


def _when(policy: Policy) -> str:
    """Updates happen."""
    arriving = "as gradients arrive" if policy.grouping else "as the last micro-batch's gradients arrive"
    if policy.deferred_update:
        return "when the norm of all gradients is known"
    return "when the backward pass is over" if policy.updates_last else arriving


def _visits(tasks: Sequence[Task], updates_last: bool) -> tuple[list[_Visit], list[Task]]:
    """The visits, and what comes behind the last one."""
    visits = [_Visit()]
    closing: list[Task] = []
    for task in tasks:
        letter, current = task.kind.value, visits[-1]
        if closing or letter == "N" or (updates_last and letter in "UD"):
            closing.append(task)
            continue
        runs = letter in _RUNS
        other = current.letter and ((runs and (letter, task.pack) != (current.letter, current.pack)) or letter == "I")
        if other or (letter == "T" and current.letter and task.pack != current.pack):
            current = _Visit()
            visits.append(current)
        if runs:
            current.letter, current.pack = letter, task.pack
        current.tasks.append(task)
    return [visit for visit in visits if visit.letter], closing


def _rounds(plan: Plan, visits: Sequence[_Visit]) -> Iterator[list[tuple[str, ...]]]:
    """The rows; where micro-batches pass alone, those of the first and of the last."""
    last = plan.micro_batches - 1
    if plan.policy.grouping or last < 2:
        yield [_row(plan, visit) for visit in visits]
        return
    yield [_row(plan, visit) for visit in visits if 0 in visit.numbers(visit.letter)]
    yield [(f"... {last - 1} times more", *("" for _ in _HEADINGS[1:]))]
    yield [_row(plan, visit) for visit in visits if last in visit.numbers(visit.letter)]


def _row(plan: Plan, visit: _Visit) -> tuple[str, ...]:
    pack = plan.packs[visit.pack]
    out, back = visit.numbers("S"), visit.numbers("T")
    updates = [f"on host {ranges(visit.numbers('U'))}"] if visit.numbers("U") else []
    updates += ["on device"] if visit.numbers("D") else []
    return (
        _RUNS[visit.letter],
        str(pack.index),
        ranges(pack.positions) if len(pack.positions) > 1 else str(pack.positions[0]),
        amount(pack.weight_bytes),
        "" if visit.letter == "F" else amount(pack.gradient_bytes),
        ranges(visit.numbers("I")),
        _marked(visit.letter, visit.numbers(visit.letter)),
        " ".join([f"out {ranges(out)}"] * bool(out) + [f"in {ranges(back)}"] * bool(back)),
        ranges(visit.numbers("O")),
        " ".join(updates),
        _fate(plan, pack, visit),
    )


def _marked(letter: str, micro_batches: list[int]) -> str:
    return f"{letter} {ranges(micro_batches)}"


def _fate(plan: Plan, pack: Pack, visit: _Visit) -> str:
    """What becomes of the weights."""
    if pack.index in plan.policy.resident:
        return "resident"
    return "evicted" if pack.index in visit.numbers("E") else "kept"


def _fewer(rows: list[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    if len(rows) <= _ROWS_SHOWN:
        yield from rows
        return
    half = _ROWS_SHOWN // 2
    yield from rows[:half]
    yield (f"... {len(rows) - 2 * half} more", *("" for _ in _HEADINGS[1:]))
    yield from rows[-half:]


def _aligned(table: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    right = [heading in _RIGHT for heading in table[0]]
    for row in table:
        cells = [
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(row, widths, right, strict=True)
        ]
        yield _cut("  ".join(cells).rstrip(), _WIDTH)


def _closing(tasks: Sequence[Task], overlap: bool) -> Iterator[str]:
    if not tasks:
        return
    updates = [task.pack for task in tasks if task.kind.value == "U"]
    there = [task.pack for task in tasks if task.kind.value == "D"]
    under = ", under the next forward pass" if overlap else ""
    parts = ["norm of all gradients"] if any(task.kind.value == "N" for task in tasks) else []
    parts += [f"updates of {ranges(updates)} on the host{under}"] if updates else []
    parts += [f"updates of {ranges(there)} on the device"] if there else []
    yield _cut("then      " + "; ".join(parts), _WIDTH)


def _legend(plan: Plan) -> Iterator[str]:
    yield "swap in, swap out, update: packs. runs, stash: micro-batches; F forward, L forward with loss and backward,"
    stays = plan.policy.kept or not plan.policy.fuse_last_pack
    kept = " A kept pack waits on the device for its backward pass." if stays else ""
    yield f"B recompute and backward.{kept}"


def _cut(text: str, width: int = _WIDEST_CELL) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def amount(nbytes: int) -> str:
    """Bytes for people."""
    for unit, name in _UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:,.1f} {name}"
    return f"{nbytes} B"
