"""When each task of a step ran: written down while it runs, read when it is over.

The timeline sits at four places and changes nothing of what happens there. The executor opens it around each task, and
says when a task begins to compute; the device puts it around the copies that are issued on a stream; the updater puts it
around what its thread does. On the CPU device a moment is the wall clock; on a CUDA device it is a timing event in the
stream, so that nothing waits while the step runs, and both clocks are brought together when the events are read.

What a stream waited for is not part of a span, with one exception: a backward pass that begins before its stash has
come back to the device holds that wait.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

from harmony_ds.device.base import Device, Stream, StreamContext, TakeTimestamp, Timestamp
from harmony_ds.scheduler.plan import Plan, Task
from harmony_ds.scheduler.spans import HOST, UPDATE, Span, of_device
from harmony_ds.scheduler.trace import ExecutedStep

_NOT_RECORDED = nullcontext()  # one for all: each task enters it


@dataclass(slots=True)
class _Entry:
    """What is written down of one task.

    Attributes:
        begin_ms, end_ms: when the executor began to issue it, and had issued it.
        device_bytes: what the device held then.
        moments: by stream, when its work there began and ended; the first and the last one count.
        host_ms: the same of its work on the thread of updates, which writes them down.
    """

    task: Task
    begin_ms: float
    end_ms: float = 0.0
    device_bytes: int = 0
    moments: dict[Stream, list[Timestamp]] = field(default_factory=lambda: defaultdict(list))
    host_ms: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _StepEntries:
    """What is written down of one step: when it began, and its tasks so far."""

    plan: Plan
    begin_ms: float
    entries: list[_Entry] = field(default_factory=list)


class StepTimeline:
    """Recorder of one engine's steps, while a caller records. A step that fails leaves nothing."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._steps: list[_StepEntries] | None = None  # None: no caller records
        self._step: _StepEntries | None = None  # the one that runs
        self._open: _Entry | None = None  # of the task that is being issued

    @contextmanager
    def recording(self, finish: Callable[[], None]) -> Iterator[list[ExecutedStep]]:
        """Record the steps that run in the context; the list holds them when the context has been left.

        Args:
            finish: waits for the updates that the steps have issued.

        Raises:
            RuntimeError: another recording is under way.
        """
        if self._steps is not None:
            raise RuntimeError("steps are being recorded already: leave the other record_steps() first.")
        recorded = self._steps = []
        executed: list[ExecutedStep] = []
        try:
            with self._device.watching_copies(self._timed_copies):
                yield executed
        finally:
            self._steps = None
        finish()
        executed.extend(self._read_step(step) for step in recorded)

    @contextmanager
    def step(self, plan: Plan) -> Iterator[None]:
        """Record one optimizer step, which executes `plan`: the context is open while it runs."""
        if self._steps is None:
            yield
            return
        self._step = _StepEntries(plan, _now_ms())
        try:
            yield
            self._steps.append(self._step)
        finally:
            self._step = self._open = None

    def task(self, task: Task) -> AbstractContextManager[None]:
        """Return the context in which the handler of `task` runs."""
        return _NOT_RECORDED if self._step is None else self._recorded_task(self._step, task)

    @contextmanager
    def _recorded_task(self, step: _StepEntries, task: Task) -> Iterator[None]:
        entry = self._open = _Entry(task, _now_ms())
        step.entries.append(entry)
        yield
        if Stream.COMPUTE in entry.moments:
            self.begin_compute()  # and now it ends: the last moment counts
        entry.end_ms = _now_ms()
        entry.device_bytes = self._device.allocated_bytes()
        self._open = None

    def restart_task(self) -> None:
        """Let the open task begin now: until now it has waited for an update of the step before."""
        if self._open is not None:
            self._open.begin_ms = _now_ms()

    def begin_compute(self) -> None:
        """Note that the open task issues work on the compute stream from now on, to its end."""
        if self._open is not None:
            self._open.moments[Stream.COMPUTE].append(self._device.timestamp(Stream.COMPUTE))

    def _timed_copies(self, take: TakeTimestamp, stream: Stream, issuing: StreamContext) -> StreamContext:
        """Return the context of copies of the open task that are issued on `stream`, by any thread."""
        if self._open is None:
            return issuing
        return _between_timestamps(partial(take, stream), issuing, self._open.moments[stream])

    def host_work(self) -> AbstractContextManager[None]:
        """Return a context for work that is queued now: the thread that does it enters it then."""
        return nullcontext() if self._open is None else _between_clock_readings(self._open.host_ms)

    # ---- afterwards

    def _read_step(self, step: _StepEntries) -> ExecutedStep:
        """Return what was recorded in one step, as times from its begin."""
        begin = step.begin_ms
        spans = [*self._host_spans(step), *self._device_spans(step)]
        return ExecutedStep(
            plan=step.plan,
            issued_ms=tuple((entry.begin_ms - begin, entry.end_ms - begin) for entry in step.entries),
            device_bytes=tuple(entry.device_bytes for entry in step.entries),
            spans=tuple(sorted(spans, key=lambda span: (span.begin_ms, span.end_ms))),
        )

    def _host_spans(self, step: _StepEntries) -> Iterator[Span]:
        for entry in step.entries:
            # Where nothing overlaps, the host's part in a task is the task itself.
            if self._device.copies_overlap:
                yield Span(HOST, entry.begin_ms - step.begin_ms, entry.end_ms - step.begin_ms, (entry.task,))
            if entry.host_ms:
                yield Span(UPDATE, entry.host_ms[0] - step.begin_ms, entry.host_ms[-1] - step.begin_ms, (entry.task,))

    def _device_spans(self, step: _StepEntries) -> Iterator[Span]:
        """Yield one span for all that a task did on a stream, from the first moment to the last."""
        parts: list[tuple[Task, Stream]] = []
        firsts: list[Timestamp] = []
        lasts: list[Timestamp] = []
        for entry in step.entries:
            for stream, moments in entry.moments.items():
                parts.append((entry.task, stream))
                firsts.append(moments[0])
                lasts.append(moments[-1])
        times = self._device.read_timestamps([*firsts, *lasts])
        for (task, stream), begin, end in zip(parts, times[: len(parts)], times[len(parts) :], strict=True):
            track = of_device(stream.value, step.plan.packs[task.pack].device)
            yield Span(track, begin - step.begin_ms, end - step.begin_ms, (task,))


@contextmanager
def _between_timestamps(
    take: Callable[[], Timestamp], issuing: StreamContext, moments: list[Timestamp]
) -> Iterator[None]:
    with issuing:
        moments.append(take())
        yield
        moments.append(take())


@contextmanager
def _between_clock_readings(host_ms: list[float]) -> Iterator[None]:
    host_ms.append(_now_ms())
    try:
        yield
    finally:
        host_ms.append(_now_ms())


def _now_ms() -> float:
    return time.perf_counter() * 1e3
