"""Samples per second."""

from __future__ import annotations

import time

FIRST_TIMED = 2
"""Steps that the throughput leaves out, as DeepSpeed's does."""


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
