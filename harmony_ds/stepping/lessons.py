"""Plans learn: when steps take longer or shorter than was predicted, what they did is recorded, and planned with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from harmony_ds.runtime.timeline import StepTimeline
from harmony_ds.scheduler.plan import Plan
from harmony_ds.scheduler.spans import Span
from harmony_ds.scheduler.trace import ExecutedStep

_STEADY = 8
"""So many steps of a plan are timed before it is judged."""
_OFF = 0.1
_RECORDED = 3
_MOST = 3
"""No more lessons are learned than this."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """What came of steps that took something else than was predicted.

    Attributes:
        predicted_ms, measured_ms: of a step.
        kept_ms, found_ms: predicted with what was learned: of the plan that ran, and of the best one found.
        exchanged: whether the second runs now.
    """

    predicted_ms: float
    measured_ms: float
    kept_ms: float
    found_ms: float
    exchanged: bool

    def __str__(self) -> str:
        what = f"another plan of {self.found_ms:,.1f} ms" if self.exchanged else "the plan stayed"
        return (
            f"steps of {self.measured_ms:,.1f} ms where {self.predicted_ms:,.1f} were predicted; with the times that "
            f"were recorded {self.kept_ms:,.1f}, and {what}"
        )


class Lessons:
    """Times steps, and records a few of them when they are off."""

    def __init__(
        self,
        timeline: StepTimeline,
        learn: Callable[[float, Sequence[Sequence[Span]]], None],
        finish: Callable[[], None],
    ) -> None:
        """`learn` is called with the typical step's ms and the spans of those recorded; `finish` waits for updates."""
        self._timeline = timeline
        self._learn = learn
        self._finish = finish
        self._plan: Plan | None = None
        self._times: list[float] = []
        self._recording: ExitStack | None = None
        self._steps: list[ExecutedStep] = []
        self._count = 0
        self._due: tuple[float, list[Sequence[Span]]] | None = None
        self._left = _MOST

    @contextmanager
    def step(self, plan: Plan, predicted_ms: float) -> Iterator[None]:
        """Around a full step that runs as `plan`, the one in force, says."""
        if not self._left:
            yield
            return
        if plan is not self._plan:
            self.forget()
            self._plan = plan
        if self._is_off(predicted_ms) and self._recording is None and not self._timeline.is_recording:
            self._recording = ExitStack()
            self._steps = self._recording.enter_context(self._timeline.recording(self._finish))
            self._count = 0
        begin = time.perf_counter()
        try:
            yield
        except BaseException:
            self.forget()
            raise
        self._passed((time.perf_counter() - begin) * 1e3)

    def _is_off(self, predicted_ms: float) -> bool:
        if len(self._times) <= _STEADY:  # the first touches memory for the first time
            return False
        return abs(predicted_ms / statistics.median(self._times[-_STEADY:]) - 1) > _OFF

    def _passed(self, step_ms: float) -> None:
        if self._recording is None:
            self._times = [*self._times[-_STEADY:], step_ms]
            return
        self._count += 1
        if self._count == _RECORDED:
            typical, steps = statistics.median(self._times[-_STEADY:]), self._steps
            recording, self._recording = self._recording, None
            recording.close()
            self._times.clear()
            self._left -= 1
            self._due = typical, [step.spans for step in steps]

    def learn(self, plan: Plan | None) -> None:
        """What the last steps have taught of `plan`, the one in force, is planned with: between steps, since a search is no
        part of one.
        """
        due, self._due = self._due, None
        if due is not None and plan is self._plan:
            self._learn(*due)

    def forget(self) -> None:
        """Steps so far are no longer to be judged by, and what is being recorded is dropped: waits for nothing."""
        self._times.clear()
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.__exit__(InterruptedError, InterruptedError(), None)
