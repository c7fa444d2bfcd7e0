"""The order in which the passes of packs over a group of micro-batches are issued, on one device or on several.

Each device runs its packs one after the other, and each pack all micro-batches. A micro-batch passes a pack when it has
passed the one before. On several devices that makes a wave: while one device runs micro-batch 1 through its pack, the next
runs micro-batch 0 through the following one. Tasks are issued in the order of slots, which count as if all passes took the
same time:

    slot(visit, m) = 1 + max of slot(visit before, m), slot(visit, m - 1), slot(visit before on this device, last m)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from harmony_ds.scheduler.plan import Pack, Task, TaskKind


@dataclass(slots=True)
class Visit:
    """One pack in one pass.

    Attributes:
        runs: by micro-batch, the tasks that run it through the pack.
        before, after: tasks around all of them.
    """

    pack: Pack
    runs: list[tuple[int, list[Task]]] = field(default_factory=list)
    is_backward: bool = False
    before: list[Task] = field(default_factory=list)
    after: list[Task] = field(default_factory=list)


def issued(visits: Sequence[Visit]) -> Iterator[Task]:
    """The tasks of `visits`, which are in the order in which each micro-batch passes them."""
    if len({visit.pack.device for visit in visits}) > 1:
        yield from _in_waves(visits)
        return
    for visit in visits:
        yield from visit.before
        for _, tasks in visit.runs:
            yield from tasks
        yield from visit.after


def _in_waves(visits: Sequence[Visit]) -> Iterator[Task]:
    passed: dict[int, int] = {}  # by micro-batch: the slot in which it passed its last visit
    free: dict[int, int] = {}  # by device: its last slot
    order: list[tuple[int, int, int]] = []  # slot, visit, place among its runs
    for number, visit in enumerate(visits):
        for place, (m, _) in enumerate(visit.runs):
            slot = 1 + max(passed.get(m, -1), free.get(visit.pack.device, -1))
            passed[m] = free[visit.pack.device] = slot
            order.append((slot, number, place))
    following = _following(visits)
    first = {visit.pack.device: visit for visit in reversed(visits)}
    for visit in first.values():
        yield from visit.before
    for _, number, place in sorted(order):
        visit = visits[number]
        micro_batch, tasks = visit.runs[place]
        if place == 0 and visit is not first[visit.pack.device]:
            yield from visit.before
        yield from tasks
        after = following.get((number, micro_batch))
        if after is not None and after.pack.device != visit.pack.device:
            back = after.is_backward and visit.is_backward
            yield Task(TaskKind.MOVE_BACK if back else TaskKind.MOVE, after.pack.index, micro_batch)
        if place == len(visit.runs) - 1:
            yield from visit.after


def _following(visits: Sequence[Visit]) -> dict[tuple[int, int], Visit]:
    """By visit and micro-batch: the visit that comes next."""
    following: dict[tuple[int, int], Visit] = {}
    latest: dict[int, int] = {}
    for number, visit in enumerate(visits):
        for m, _ in visit.runs:
            if m in latest:
                following[latest[m], m] = visit
            latest[m] = number
    return following
