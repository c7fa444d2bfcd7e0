"""Who is told of each task that has run."""

from __future__ import annotations

from collections.abc import Callable

from harmony_ds.scheduler.plan import Task

OnTask = Callable[[int, int, Task], None]
"""From the tasks that are done, those of the step, and the last one."""


class Progress:
    """At most one is."""

    def __init__(self) -> None:
        self._told: OnTask | None = None

    def tell(self, listener: OnTask | None) -> None:
        """From now on `listener` is told, and nobody else."""
        self._told = listener

    def note(self, done: int, total: int, task: Task) -> None:
        """`task` has run, as number `done` of `total`."""
        if self._told is not None:
            self._told(done, total, task)
