"""Measurements of the last optimizer steps: bytes, memory and time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from harmony_ds.offload.ledger import Beside, Traffic
from harmony_ds.scheduler.plan import Plan
from harmony_ds.step.engine_state import EngineState

_STEPS_KEPT = 32


class StepRecord:
    """Measures optimizer steps, and keeps what was measured of the last ones.

    Attributes:
        micro_batches: in the last step.
        step_ms: the time of the last step.
        planned_ms: the times of the last steps that ran as the plan says, without the plan's first.
        peaks: the most bytes in use on each device during the last step.
        traffic: the bytes that the last step moved; None before the first.
        beside: the calls without gradients since the step before.
        sent_bytes: what the last step sent from this process's device to others'.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._planner = state.planner
        self.micro_batches = 0
        self.step_ms = 0.0
        self.planned_ms: deque[float] = deque(maxlen=_STEPS_KEPT)
        self.peaks: tuple[int, ...] = (0,)
        self.traffic: Traffic | None = None
        self.beside = Beside()
        self.sent_bytes = 0
        self._sent_before = 0
        self._plan: Plan | None = None  # that `planned_ms` is of

    @contextmanager
    def step(self, micro_batches: int, as_planned: bool) -> Iterator[None]:
        """Measure the optimizer step that is taken in this context; `as_planned`: over a full group that runs at once."""
        device = self._state.device
        device.watch_peak()
        begin = time.perf_counter()
        try:
            yield
        finally:  # the bytes of a step that fails are not the next one's
            traffic, beside = self._state.ledger.drain(), self._state.ledger.drain_beside()
            sent_before, self._sent_before = self._sent_before, self._state.runtime.world.sent_bytes
        self.step_ms = (time.perf_counter() - begin) * 1e3
        if self._plan is not self._planner.plan:  # the first step of a plan touches memory for the first time
            self._plan = self._planner.plan
            self.planned_ms.clear()
        elif as_planned:
            self.planned_ms.append(self.step_ms)
        self.peaks = device.peaks()
        self.traffic = traffic
        self.beside = beside
        self.sent_bytes = self._sent_before - sent_before
        self.micro_batches = micro_batches
