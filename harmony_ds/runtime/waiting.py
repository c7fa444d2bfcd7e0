"""Swap-ins that wait for an update of the step before, while packs that are on the device compute.

A plan issues a pack's swap-in one pack ahead. Where its update is still under way, the thread that issues tasks would
wait for it and launch nothing: the swap-in is left for later, until its update is done or a task needs its pack.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from harmony_ds.runtime.runtime import Runtime
from harmony_ds.scheduler.plan import Plan, Task, TaskKind

Charged = tuple[Task, int]
"""A task, and the bytes that it may take beside its pack's."""


class WaitingSwapIns:
    """Scheduler of the swap-ins of one run of `plan`: it puts them where they hold nothing up."""

    def __init__(self, runtime: Runtime, plan: Plan) -> None:
        self._runtime = runtime
        self._plan = plan
        self._waiting: deque[Charged] = deque()

    def placed(self, tasks: Iterable[Charged]) -> Iterator[Charged]:
        """Yield `tasks`, some swap-ins later: in their order, and before any other task of their packs.

        Some may be left, for the next tasks or `left`.
        """
        for task, nbytes in tasks:
            yield from self._ready(task.pack)
            if self._may_wait(task):
                self._waiting.append((task, nbytes))
            else:
                yield task, nbytes

    def left(self) -> Iterator[Charged]:
        """Yield the swap-ins that no task has needed."""
        while self._waiting:
            yield self._waiting.popleft()

    def _ready(self, pack: int) -> Iterator[Charged]:
        while self._waiting:
            first = self._waiting[0][0]
            if self._is_updating(first) and all(task.pack != pack for task, _ in self._waiting):
                return
            yield self._waiting.popleft()

    def _may_wait(self, task: Task) -> bool:
        """Return whether `task` is a swap-in that may wait; after one that waits it has to, since they share a stream.

        Those that other devices take part in stay at their place in the plan.
        """
        if task.kind is not TaskKind.SWAP_IN or self._plan.policy.shared or not self._runtime.device.copies_overlap:
            return False
        return bool(self._plan.packs[task.pack].positions) and (bool(self._waiting) or self._is_updating(task))

    def _is_updating(self, task: Task) -> bool:
        updater, plan = self._runtime.updater, self._plan
        return any(updater.is_pending(owner.needed_at) for owner in plan.owners_of(plan.packs[task.pack]))
