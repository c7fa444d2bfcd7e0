"""Swap-ins that wait for an update: a pass over the tasks of a step that issues them later.

The host updates weights after a step, while the next one has begun. The thread that issues tasks stops at the swap-in of a
pack until the host has updated that pack, and a plan issues it one pack early: nothing of the packs before it, which are on
the device already, would be issued meanwhile. So such a swap-in is issued after some of their runs.

What enters: the tasks as they were composed, and by pack a number of runs. What leaves: the same tasks, where the first
swap-in of each pack comes after so many more runs, such as two for pack 1:

    I0 I1 F0.0 F0.1 F0.2 E0 I2 F1.0 ...
    I0 F0.0 F0.1 I1 F0.2 E0 I2 F1.0 ...

Swap-ins of one device, which share a stream, keep their order. None comes later than the first task that needs its weights,
nor than the first eviction on its device, whose memory comes free when all that was issued before has been computed. So
weights are on the device for no longer than without the pass, and the step takes no more memory.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from harmony_ds.scheduler.plan import RUNS, Packing, Task, TaskKind


@dataclass(frozen=True, slots=True)
class _Delayed:
    """A swap-in that has not been issued yet; it will be once `runs` runs of the step have been issued."""

    task: Task
    runs: int


def delay_swap_ins(tasks: Iterable[Task], packing: Packing, delays: tuple[int, ...]) -> list[Task]:
    """Return `tasks` with the first swap-in of each pack so many runs later as `delays` says, by pack; empty: none."""
    if not any(delays):
        return list(tasks)
    issued: list[Task] = []
    runs = 0
    seen: set[int] = set()
    waiting: defaultdict[int, deque[_Delayed]] = defaultdict(deque)  # by device
    for task in tasks:
        device = packing.packs[task.pack].device
        if task.kind is TaskKind.SWAP_IN and task.pack not in seen:
            seen.add(task.pack)
            if delays[task.pack] or waiting[device]:
                waiting[device].append(_Delayed(task, runs + delays[task.pack]))
                continue
        if task.kind in RUNS:
            for several in waiting.values():
                while several and several[0].runs <= runs:
                    issued.append(several.popleft().task)
            while any(delayed.task.pack == task.pack for delayed in waiting[device]):
                issued.append(waiting[device].popleft().task)
            runs += 1
        elif task.kind is TaskKind.EVICT:
            while waiting[device]:
                issued.append(waiting[device].popleft().task)
        issued.append(task)
    return issued
