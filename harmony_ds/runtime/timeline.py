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


@dataclass(slots=True)
class _Entry:
    """One task: when it was issued, and between which moments it did what; the first and the last one count."""

    task: Task
    begin_ms: float
    end_ms: float = 0.0
    device_bytes: int = 0
    moments: dict[Stream, list[Timestamp]] = field(default_factory=lambda: defaultdict(list))
    host_ms: list[float] = field(default_factory=list)  # appended by the update thread


@dataclass(slots=True)
class _Step:
    plan: Plan
    begin_ms: float
    entries: list[_Entry] = field(default_factory=list)


class StepTimeline:
    """Recorder of one engine's steps, while a caller records. A step that fails leaves nothing."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._steps: list[_Step] | None = None  # None: no caller records
        self._step: _Step | None = None
        self._open: _Entry | None = None

    @contextmanager
    def recording(self, finish: Callable[[], None]) -> Iterator[list[ExecutedStep]]:
        """Record the steps of a context; they are in the list when it has been left.

        Args:
            finish: waits for the updates that the steps have issued.

        Raises:
            RuntimeError: another one is open.
        """
        if self._steps is not None:
            raise RuntimeError("steps are being recorded already: leave the other record_steps() first.")
        recorded = self._steps = []
        executed: list[ExecutedStep] = []
        try:
            with self._device.watching_copies(self._watched):
                yield executed
        finally:
            self._steps = None
        finish()
        executed.extend(map(self._read, recorded))

    @contextmanager
    def step(self, plan: Plan) -> Iterator[None]:
        """Around one optimizer step, which executes `plan`."""
        if self._steps is None:
            yield
            return
        self._step = _Step(plan, _now_ms())
        try:
            yield
            self._steps.append(self._step)
        finally:
            self._step = self._open = None

    def task(self, task: Task) -> AbstractContextManager[None]:
        """Around the handler of `task`."""
        return nullcontext() if self._step is None else self._recorded(self._step, task)

    @contextmanager
    def _recorded(self, step: _Step, task: Task) -> Iterator[None]:
        entry = self._open = _Entry(task, _now_ms())
        step.entries.append(entry)
        yield
        if Stream.COMPUTE in entry.moments:
            self.computes()
        entry.end_ms = _now_ms()
        entry.device_bytes = self._device.allocated_bytes()
        self._open = None

    def waited(self) -> None:
        """Note that the open task had to wait until now for an earlier update."""
        if self._open is not None:
            self._open.begin_ms = _now_ms()

    def computes(self) -> None:
        """From here on the task that is open issues work on the compute stream, to its end."""
        if self._open is not None:
            self._open.moments[Stream.COMPUTE].append(self._device.timestamp(Stream.COMPUTE))

    def _watched(self, take: TakeTimestamp, stream: Stream, issuing: StreamContext) -> StreamContext:
        """Around copies of the open task that are issued on `stream`, by any thread."""
        return issuing if self._open is None else _taking(partial(take, stream), issuing, self._open.moments[stream])

    def host_work(self) -> AbstractContextManager[None]:
        """To be put around work that is queued now, when it is done."""
        return nullcontext() if self._open is None else _timed(self._open.host_ms)

    # ---- afterwards

    def _read(self, step: _Step) -> ExecutedStep:
        begin = step.begin_ms
        spans = [*self._host_spans(step), *self._device_spans(step)]
        return ExecutedStep(
            plan=step.plan,
            issued_ms=tuple((entry.begin_ms - begin, entry.end_ms - begin) for entry in step.entries),
            device_bytes=tuple(entry.device_bytes for entry in step.entries),
            spans=tuple(sorted(spans, key=lambda span: (span.begin_ms, span.end_ms))),
        )

    def _host_spans(self, step: _Step) -> Iterator[Span]:
        for entry in step.entries:
            # Where nothing overlaps, the host's part in a task is the task itself.
            if self._device.copies_overlap:
                yield Span(HOST, entry.begin_ms - step.begin_ms, entry.end_ms - step.begin_ms, (entry.task,))
            if entry.host_ms:
                yield Span(UPDATE, entry.host_ms[0] - step.begin_ms, entry.host_ms[-1] - step.begin_ms, (entry.task,))

    def _device_spans(self, step: _Step) -> Iterator[Span]:
        """One span for all that a task did on a stream."""
        parts = [(entry.task, stream, times) for entry in step.entries for stream, times in entry.moments.items()]
        ends = self._device.read_timestamps([moment for _, _, times in parts for moment in (times[0], times[-1])])
        for (task, stream, _), begin, end in zip(parts, ends[::2], ends[1::2], strict=True):
            track = of_device(stream.value, step.plan.packs[task.pack].device)
            yield Span(track, begin - step.begin_ms, end - step.begin_ms, (task,))


@contextmanager
def _taking(take: Callable[[], Timestamp], issuing: StreamContext, moments: list[Timestamp]) -> Iterator[None]:
    with issuing:
        moments.append(take())
        yield
        moments.append(take())


@contextmanager
def _timed(host_ms: list[float]) -> Iterator[None]:
    host_ms.append(_now_ms())
    try:
        yield
    finally:
        host_ms.append(_now_ms())


def _now_ms() -> float:
    return time.perf_counter() * 1e3
