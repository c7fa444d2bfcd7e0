"""Measurements of the last optimizer steps: bytes, memory and time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from harmony_ds.offload.ledger import Beside, Traffic
from harmony_ds.scheduler.grid import counted
from harmony_ds.scheduler.plan import Plan
from harmony_ds.step.engine_state import EngineState

_STEPS_KEPT = 32


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """What was measured of one optimizer step.

    Attributes:
        micro_batches: in the step.
        step_ms: the engine's time for it, at the boundary and before it; without the program's own.
        peaks: the most bytes in use on each device while it ran.
        planned_peak_bytes: the most that a run of it was to take.
        traffic: the bytes that it moved.
        beside: the calls without gradients since the step before.
        sent_bytes: what it sent from this process's device to others'.
        deviation: how it differed from what the plan's time is predicted for; "": not at all.
    """

    micro_batches: int
    step_ms: float
    peaks: tuple[int, ...]
    planned_peak_bytes: int
    traffic: Traffic
    beside: Beside
    sent_bytes: int
    deviation: str


@dataclass(slots=True)
class _Runs:
    """What has run of the open step.

    Attributes:
        ms: the engine's time so far.
        peaks: the most bytes in use on each device so far; (): nothing has run.
        planned_peak_bytes: the most that one of the runs was to take.
        forwards_alone: forward passes that ran for themselves.
        groups: how many micro-batches each run of forward and backward passes had; those whose calls are joined are one.
    """

    ms: float = 0.0
    peaks: tuple[int, ...] = ()
    planned_peak_bytes: int = 0
    forwards_alone: int = 0
    groups: list[int] = field(default_factory=list)


class StepRecord:
    """Measures optimizer steps, and keeps what was measured of the last ones.

    Parts of a step may run before its boundary, since the program reads a loss or a gradient: they are measured, too.

    Attributes:
        last: the last step; None before the first.
        planned_ms: the times of the last steps that ran as the plan says, without the plan's first.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._planner = state.planner
        self.last: MeasuredStep | None = None
        self.planned_ms: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._runs = _Runs()
        self._is_working = False
        self._sent_before = 0
        self._plan: Plan | None = None  # that `planned_ms` is of

    @property
    def peaks(self) -> tuple[int, ...]:
        """The most bytes in use on each device during the last step, and what has run of the open one."""
        last = (0,) if self.last is None else self.last.peaks
        return _most(last, self._runs.peaks)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Measure the time that the engine works for the open step."""
        if self._is_working:
            yield
            return
        self._is_working, begin = True, time.perf_counter()
        try:
            yield
        finally:
            self._is_working = False
            self._runs.ms += (time.perf_counter() - begin) * 1e3

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time that measuring the model takes within a step."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            if self._is_working:
                self._runs.ms -= (time.perf_counter() - begin) * 1e3

    @property
    def planned_peak_bytes(self) -> int:
        """The most that the plan takes, or a run of the last step or of the open one was to take."""
        plan, last = self._planner.plan, self.last
        of_plan = 0 if plan is None else plan.peak_bytes
        return max(of_plan, 0 if last is None else last.planned_peak_bytes, self._runs.planned_peak_bytes)

    def note_peaks(self, planned_peak_bytes: int) -> None:
        """Note the peaks of a run of the open step, since the device began to watch them, and what was planned."""
        self._runs.peaks = _most(self._state.device.peaks(), self._runs.peaks)
        self._runs.planned_peak_bytes = max(planned_peak_bytes, self._runs.planned_peak_bytes)

    def note_forward_alone(self) -> None:
        """Note that the forward pass of one micro-batch has run for itself."""
        self._runs.forwards_alone += 1

    def note_group(self, micro_batches: int) -> None:
        """Note that forward and backward passes of so many micro-batches have run, of joined ones as one."""
        self._runs.groups.append(micro_batches)

    def forget_step(self) -> None:
        """Forget the open step, which is dropped: its bytes are not the next one's."""
        self._runs = _Runs()
        self._state.ledger.drain()
        self._sent_before = self._state.runtime.world.sent_bytes

    def finish_step(self, micro_batches: int) -> None:
        """Note that the open step has been taken, over so many micro-batches."""
        runs, self._runs = self._runs, _Runs()
        sent_before, self._sent_before = self._sent_before, self._state.runtime.world.sent_bytes
        self.last = MeasuredStep(
            micro_batches=micro_batches,
            step_ms=runs.ms,
            peaks=runs.peaks or self._state.device.peaks(),
            planned_peak_bytes=runs.planned_peak_bytes,
            traffic=self._state.ledger.drain(),
            beside=self._state.ledger.drain_beside(),
            sent_bytes=self._sent_before - sent_before,
            deviation=self._deviation(runs, micro_batches),
        )
        if self._plan is not self._planner.plan:  # the first step of a plan touches memory for the first time
            self._plan = self._planner.plan
            self.planned_ms.clear()
        elif not self.last.deviation:
            self.planned_ms.append(runs.ms)

    def _deviation(self, runs: _Runs, micro_batches: int) -> str:
        """Return how a step differed from what is predicted: a whole group that runs at once."""
        plan = self._planner.plan
        if plan is None or not runs.groups:
            return "the program made its gradients, not the plan"
        joined_count = plan.policy.joined_count
        if -(-micro_batches // joined_count) != plan.micro_batches:
            planned = plan.micro_batches * joined_count
            return f"it had {counted(micro_batches, 'micro-batch')}, and the plan is for {planned}"
        if runs.forwards_alone:
            passes = counted(runs.forwards_alone, "forward pass")
            return f"losses or outputs were read before the step, and {passes} ran alone"
        if len(runs.groups) > 1:
            return f"gradients were read before the step, and its micro-batches ran in {len(runs.groups)} groups"
        if runs.groups[0] != plan.micro_batches:
            return "its layer calls were not joined as planned"
        return ""


def _most(peaks: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    """Return the larger of two peaks of each device; `others` may be ()."""
    if not others:
        return peaks
    if len(peaks) != len(others):  # before the first step there is one, of nothing
        return others
    return tuple(map(max, peaks, others))
