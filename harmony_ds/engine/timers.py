"""Times of optimizer steps: by kind of task, and in samples per second."""

from __future__ import annotations

import time

from harmony_ds.scheduler.plan import BACKWARD_KINDS, FORWARD_KINDS, TaskKind

FIRST_TIMED = 2
"""Steps that the throughput leaves out, as DeepSpeed's does."""
_TIMERS = {
    "fwd": FORWARD_KINDS,
    "fwd_bwd": (TaskKind.FUSED,),
    "bwd": BACKWARD_KINDS,
    "swap_in": (TaskKind.SWAP_IN, TaskKind.GATHER, TaskKind.STASH_IN),
    "swap_out": (TaskKind.REDUCE, TaskKind.SWAP_OUT, TaskKind.STASH_OUT, TaskKind.EVICT, TaskKind.FREE_GRADIENTS),
    "step": (TaskKind.UPDATE, TaskKind.UPDATE_ON_DEVICE, TaskKind.NORM),
}
_TIMER_OF = {kind: name for name, kinds in _TIMERS.items() for kind in kinds}


class TaskTimes:
    """Milliseconds of a step by kind of task, on the engine's thread. CUDA only issues tasks: time is found in waits.

    Attributes:
        last: of the last step, by timer.
    """

    def __init__(self) -> None:
        self.last: dict[str, float] = {}
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._ms = dict.fromkeys(_TIMERS, 0.0)
        self._since = time.perf_counter()

    def note(self, kind: TaskKind) -> None:
        """Charge the time since the last task to one of `kind`."""
        now = time.perf_counter()
        self._ms[_TIMER_OF[kind]] += (now - self._since) * 1e3
        self._since = now

    def end(self) -> None:
        """End the step; the time after its tasks is the update's."""
        self.note(TaskKind.UPDATE)
        self.last = self._ms


class Throughput:
    """Samples per second from step to step, under the names of DeepSpeed's `ThroughputTimer`."""

    def __init__(self) -> None:
        self.global_step_count = self.epoch_count = 0
        self.current = 0.0
        self._samples = 0
        self._began = self._last = 0.0

    def update_epoch_count(self) -> None:
        """Count an epoch of the caller's."""
        self.epoch_count += 1

    def step(self, samples: int) -> None:
        """Count an optimizer step over `samples`, which is over now."""
        now = time.perf_counter()
        self.global_step_count += 1
        if self.global_step_count == FIRST_TIMED:
            self._began = now
        elif self.global_step_count > FIRST_TIMED:
            self._samples += samples
            self.current = samples / max(now - self._last, 1e-9)
        self._last = now

    def avg_samples_per_sec(self) -> float:
        """Return the mean since the second step; -inf before the third."""
        return self._samples / max(self._last - self._began, 1e-9) if self._samples else float("-inf")
