"""The order in which the passes of packs over a group of micro-batches are issued, on one device or on several.

Each device runs its packs one after the other, and each pack all micro-batches. A micro-batch passes a pack when it has
passed the one before. On several devices that makes a wave: while one device runs micro-batch 1 through its pack, the next
runs micro-batch 0 through the following one. Tasks are issued in the order of predicted times:

    begin(visit, m) = max of end(visit before, m), end(visit, m - 1), end(visit before on this device, last m)
    end(visit, m) = begin(visit, m) + the time of the visit's pass

A run is issued when it begins; what moves its results, and what comes after the last run of a visit, when it has ended:
copies share streams, where one issued too early would hold up those of micro-batches that are ready before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from harmony_ds.scheduler.plan import Pack, Task, TaskKind


@dataclass(slots=True)
class Visit:
    """One pack in one pass.

    Attributes:
        runs: by micro-batch, the tasks that run it through the pack; in the last pack it may come there twice.
        before, after: tasks around all of them.
    """

    pack: Pack
    runs: list[tuple[int, list[Task]]] = field(default_factory=list)
    is_backward: bool = False
    before: list[Task] = field(default_factory=list)
    after: list[Task] = field(default_factory=list)

    @property
    def pass_ms(self) -> float:
        return self.pack.backward_ms if self.is_backward else self.pack.forward_ms


def issued(visits: Sequence[Visit], last_first: bool = False) -> Iterator[Task]:
    """Return the tasks of `visits`, in the order in which each micro-batch passes them. `last_first`: the updates of the
    last packs end first, so that the swap-ins of their devices are issued first.
    """
    if len({visit.pack.device for visit in visits}) > 1:
        yield from _in_waves(visits, last_first)
        return
    for visit in visits:
        yield from visit.before
        for _, tasks in visit.runs:
            yield from tasks
        yield from visit.after


def _in_waves(visits: Sequence[Visit], last_first: bool) -> Iterator[Task]:
    passed: dict[int, float] = {}  # by micro-batch: when it passed its last visit
    free: dict[int, float] = {}  # by device: when it has done its last run
    known = all(visit.pack.forward_ms and visit.pack.backward_ms for visit in visits)
    following = _following(visits)
    first = {visit.pack.device: visit for visit in reversed(visits)}
    begun = sorted(first.values(), key=lambda visit: visit.pack.index, reverse=last_first)
    order: list[tuple[float, int, int, list[Task]]] = [(0.0, -1, 0, visit.before) for visit in begun]
    for number, visit in enumerate(visits):
        here, pass_ms = visit.pack.device, visit.pass_ms if known else 1.0
        last_run = {m: place for place, (m, _) in enumerate(visit.runs)}
        for place, (m, tasks) in enumerate(visit.runs):
            begin = max(passed.get(m, 0.0), free.get(here, 0.0))
            end = passed[m] = free[here] = begin + pass_ms
            before = visit.before if place == 0 and visit is not first[here] else []
            order.append((begin, number, 2 * place, [*before, *tasks]))
            moved = _moved(visit, following.get((number, m)), m) if place == last_run[m] else []
            order.append((end, number, 2 * place + 1, [*moved, *(visit.after if place == len(visit.runs) - 1 else [])]))
    for *_, tasks in sorted(order, key=lambda one: one[:3]):
        yield from tasks


def _moved(visit: Visit, after: Visit | None, micro_batch: int) -> list[Task]:
    """Return what takes the results of `visit` to the device of the visit that comes next."""
    if after is None or after.pack.device == visit.pack.device:
        return []
    back = after.is_backward and visit.is_backward
    return [Task(TaskKind.MOVE_BACK if back else TaskKind.MOVE, after.pack.index, micro_batch)]


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
