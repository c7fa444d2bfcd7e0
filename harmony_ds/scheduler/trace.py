"""A step as a picture: the predicted and the executed one on the same tracks, to be laid side by side.

The result is Chrome's Trace Event format, which https://ui.perfetto.dev and chrome://tracing open. Each step is a
process, each stream a track of it; equal work has the same name and arguments in both.
Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.memory import walk_memory
from harmony_ds.scheduler.plan import Pack, Plan, Task, TaskKind
from harmony_ds.scheduler.simulate import Prediction
from harmony_ds.scheduler.spans import COMPUTE, UPDATE, Span, busy_of, streams_of
from harmony_ds.scheduler.swaps import moved_bytes, swaps_of

_US_PER_MS = 1e3
_TraceEvent = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ExecutedStep:
    """When everything in one executed optimizer step happened, in ms from its beginning.

    Attributes:
        plan: that was executed, with the tasks of the group that ran.
        issued_ms: for each task, from when to when the host was busy with it, waiting for earlier updates apart.
        device_bytes: for each task, what was in use when it had been issued.
        spans: work on the streams, in order of its beginning. Updates may end after the step.
    """

    plan: Plan
    issued_ms: tuple[tuple[float, float], ...]
    device_bytes: tuple[int, ...]
    spans: tuple[Span, ...]

    @property
    def tasks(self) -> tuple[Task, ...]:
        """In their order."""
        return self.plan.tasks

    @property
    def step_ms(self) -> float:
        """Until host and device were done; late updates apart."""
        ends = [end for _, end in self.issued_ms]
        return max([*ends, *(span.end_ms for span in self.spans if span.stream != UPDATE)], default=0.0)

    @property
    def busy_ms(self) -> Mapping[str, float]:
        """How long each stream worked."""
        return busy_of(self.spans)


def trace_of(
    plan: Plan,
    prediction: Prediction,
    costs: CostTable,
    executed: ExecutedStep | None = None,
    layer_names: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the predicted step of `plan`, and beside it the executed one, as an object that `json.dumps` takes.

    Args:
        costs: of one micro-batch, for the bytes of the stash and the memory alive.
        layer_names: by the indices of the plan's layers; without them layers are told by number.
    """
    events = [
        *_TracedStep(1, "simulated", plan, costs, layer_names).events(
            tuple(_one_by_one(prediction.spans)), _planned_bytes(plan, costs)
        )
    ]
    if executed is not None:
        used = dict(zip(executed.tasks, executed.device_bytes, strict=True))
        events += _TracedStep(2, "executed", executed.plan, costs, layer_names).events(executed.spans, used)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "simulated_step_ms": prediction.step_ms,
            **({} if executed is None else {"executed_step_ms": executed.step_ms}),
        },
    }


def _one_by_one(spans: Sequence[Span]) -> Iterator[Span]:
    """Return each micro-batch's share of its pack's job, which the simulator runs as one."""
    for span in spans:
        if len(span.tasks) < 2:
            yield span
            continue
        share = (span.end_ms - span.begin_ms) / len(span.tasks)
        for place, task in enumerate(span.tasks):
            begin = span.begin_ms + place * share
            yield Span(span.stream, begin, begin + share, (task,))


def _planned_bytes(plan: Plan, costs: CostTable) -> dict[Task, int]:
    walked = walk_memory(plan.packs, plan.tasks, costs)
    rows = zip(plan.tasks, walked.weight_bytes, walked.activation_bytes, strict=True)
    return {task: plan.resident_bytes + weights + rest for task, weights, rest in rows}


@dataclass(frozen=True, slots=True)
class _TracedStep:
    """One step's events."""

    pid: int
    name: str
    plan: Plan
    costs: CostTable
    layer_names: Sequence[str]

    def events(self, spans: Sequence[Span], bytes_of: Mapping[Task, int]) -> Iterator[_TraceEvent]:
        """`bytes_of`: device bytes alive, by task; drawn where compute begins."""
        yield self._meta("process_name", 0, {"name": f"{self.name} step"})
        yield self._meta("process_sort_index", 0, {"sort_index": self.pid})
        policy = self.plan.policy
        usual = streams_of(policy.pipeline, peers=not policy.alone)
        tracks = tuple(dict.fromkeys((*usual, *sorted(span.stream for span in spans))))
        for number, stream in enumerate(tracks, start=1):
            yield self._meta("thread_name", number, {"name": stream})
            yield self._meta("thread_sort_index", number, {"sort_index": number})
        for span in sorted(spans, key=lambda span: (span.begin_ms, span.end_ms)):
            if span.stream.startswith(COMPUTE) and span.tasks[0] in bytes_of:
                name = f"device memory{span.stream.removeprefix(COMPUTE)}"
                yield self._event("C", name, span.begin_ms, 0, args={"bytes": bytes_of[span.tasks[0]]})
            begin, end = _us(span.begin_ms), _us(span.end_ms)
            yield {
                **self._event("X", span.name, span.begin_ms, tracks.index(span.stream) + 1, args=self._args(span)),
                "cat": span.tasks[0].kind.name.lower(),
                "dur": round(end - begin, 3),
            }

    def _meta(self, name: str, tid: int, args: _TraceEvent) -> _TraceEvent:
        return {"ph": "M", "name": name, "pid": self.pid, "tid": tid, "args": args}

    def _event(self, phase: str, name: str, begin_ms: float, tid: int, args: _TraceEvent) -> _TraceEvent:
        return {"ph": phase, "name": name, "pid": self.pid, "tid": tid, "ts": _us(begin_ms), "args": args}

    def _args(self, span: Span) -> _TraceEvent:
        """Return the same keys for every event: pack and micro-batch are -1, bytes 0, where there are none."""
        task = span.tasks[0]
        whole = task.kind is TaskKind.NORM
        pack = self.plan.packs[task.pack]
        swaps = swaps_of(replace(self.plan, tasks=(task,), micro_batches=0), self.costs)
        between = task.kind in (TaskKind.MOVE, TaskKind.MOVE_BACK)
        moved = moved_bytes(self.plan.packing, self.costs.flow)[task.kind, task.pack] if between else 0
        return {
            "task": str(task),
            "pack": -1 if whole else task.pack,
            "layers": "" if whole else self._layers(pack),
            "micro_batch": task.micro_batch,
            # What it moves between host and device, or between devices, at most.
            "bytes": swaps.total + swaps.sent + moved,
        }

    def _layers(self, pack: Pack) -> str:
        if not pack.layers:
            return "parameters that no layer call covers"
        names = [self.layer_names[i] if self.layer_names else str(i) for i in pack.layers]
        return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


def _us(ms: float) -> float:
    """To the nanosecond, so that what follows on a track begins where the one before it ends."""
    return round(ms * _US_PER_MS, 3)
