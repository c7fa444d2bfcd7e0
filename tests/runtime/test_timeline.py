"""Executed steps, written down: every task once and in order, spans that are real, and bits that do not change."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import HarmonyEngine, Plan, Task, TaskKind
from harmony_ds.device import CpuDevice
from harmony_ds.device.base import HOME, Stream
from harmony_ds.device.group import DeviceGroup
from harmony_ds.runtime.timeline import StepTimeline
from harmony_ds.scheduler.plan import Policy
from harmony_ds.scheduler.spans import STREAMS
from harmony_ds.scheduler.trace import ExecutedStep
from tests.engine.drive import adamw, config_of, engine_for, weights_of
from tests.inside import assembly_of
from tests.oracle import assert_same
from tests.scheduler.examples import packs_of, reused

pytestmark = pytest.mark.fixed_times

RUNS = (TaskKind.FORWARD, TaskKind.FUSED, TaskKind.BACKWARD, TaskKind.UPDATE_ON_DEVICE)
COPIES = {TaskKind.SWAP_IN: "swap_in", TaskKind.SWAP_OUT: "swap_out"}
STASHES = {TaskKind.STASH_IN: "swap_in", TaskKind.STASH_OUT: "swap_out"}
CONFIGS = {
    "immediate": config_of(3, 0.0, {"pack_layers": 1}),
    "deferred": config_of(3, 1.0, {"pack_layers": 2}),
    "stash on host": config_of(3, 1.0, {"pack_layers": 1, "stash": "host"}),
    "resident": config_of(3, 1.0, {"pack_layers": 1, "residency": 2, "device_memory_gib": 1.0}),
}


class Net(nn.Module):
    """Blocks, and a scale of its own that no layer covers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return (hidden * self.scale).square().mean()


def batches() -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield {"inputs": torch.randn(4, 16, generator=generator)}


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def loss_of(outputs: Tensor) -> Tensor:
    return outputs


def recorded(config: dict[str, Any], steps: int = 2) -> list[ExecutedStep]:
    data = batches()
    with engine_for(net(), adamw, config) as engine:
        engine.train_batch(data, loss_of)
        with engine.record_steps() as found:
            for _ in range(steps):
                engine.train_batch(data, loss_of)
        return found


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_task_of_the_plan_is_there_once_and_in_its_order(config: dict[str, Any]) -> None:
    steps = recorded(config)

    assert len(steps) == 2
    for step in steps:
        assert step.tasks == step.plan.tasks
        assert len(step.issued_ms) == len(step.device_bytes) == len(step.tasks)
        for (begin, end), (following, _) in pairwise(step.issued_ms):
            assert 0 <= begin <= end <= following
        times = Counter(step.tasks)  # a pack is swapped in once in each pass
        seen = Counter((span.stream, span.tasks[0]) for span in step.spans if span.tasks)
        for task, count in times.items():
            assert seen["compute", task] == (count if task.kind in RUNS else 0)
            if task.kind in COPIES:
                assert seen[COPIES[task.kind], task] == count
            if task.kind in STASHES:  # the first pack's inputs are the user's, and stay where they are
                assert seen[STASHES[task.kind], task] == (1 if task.pack else 0)
            updates = task.kind in (TaskKind.UPDATE, TaskKind.NORM)
            measured = task.kind is TaskKind.SWAP_OUT and step.plan.policy.deferred_update
            assert seen["update", task] == (updates or measured)
        assert {task for _, task in seen} <= times.keys()
        compute = [span.tasks[0] for span in step.spans if span.stream == "compute"]
        assert compute == [task for task in step.tasks if task.kind in RUNS]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_spans_of_a_stream_do_not_overlap_and_lie_within_the_step(config: dict[str, Any]) -> None:
    for step in recorded(config):
        together = [span for span in step.spans if span.stream != "update"]  # on the CPU
        assert together and all(one.end_ms <= following.begin_ms for one, following in pairwise(together))
        for stream in STREAMS:
            row = [span for span in step.spans if span.stream == stream]
            for one, following in pairwise(row):
                assert one.end_ms <= following.begin_ms
            for span in row:
                assert 0 <= span.begin_ms <= span.end_ms
                assert stream == "update" or span.end_ms <= step.step_ms
        assert all(ms <= step.step_ms for stream, ms in step.busy_ms.items() if stream != "update")


def test_recording_counts_device_memory_and_changes_no_bit() -> None:
    results = []
    for record in (False, True):
        model, data = net(), batches()
        with engine_for(model, adamw, CONFIGS["deferred"]) as engine:
            losses = [engine.train_batch(data, loss_of)]
            with engine.record_steps() if record else nullcontext([]) as steps:
                losses += [engine.train_batch(data, loss_of) for _ in range(3)]
            for step in steps:
                assert 0 < max(step.device_bytes) <= engine.memory_report().device_peak_bytes
        results.append((torch.stack(losses), weights_of(model)))

    assert torch.equal(results[0][0], results[1][0])
    assert_same(results[0][1], results[1][1], bitwise=True)


def nothing_is_watched(engine: HarmonyEngine) -> bool:
    parts = assembly_of(engine).runtime
    return parts.device._watch is None and parts.timeline._steps is None


def test_a_second_recording_at_once_is_refused_and_nothing_is_left_of_the_first() -> None:
    with engine_for(net(), adamw, CONFIGS["deferred"]) as engine:
        with engine.record_steps() as steps:
            assert not nothing_is_watched(engine)
            with pytest.raises(RuntimeError, match="already"), engine.record_steps():
                pass
        assert steps == []
        assert nothing_is_watched(engine)
        with pytest.raises(KeyError, match="mine"), engine.record_steps():
            raise KeyError("mine")
        assert nothing_is_watched(engine)


def test_a_span_begins_with_the_first_copy_of_its_task_and_ends_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    device, ticks, task = CpuDevice(), iter(range(6)), Task(TaskKind.SWAP_IN, 0)
    monkeypatch.setattr(device, "timestamp", lambda stream: float(next(ticks)))
    timeline, plan = StepTimeline(device), Plan(reused(packs_of(True)), Policy(), (task,), 1, 0, 0)
    with timeline.recording(lambda: None) as steps, timeline.step(plan), timeline.task(task):
        for _ in range(3):
            with device.on(Stream.SWAP_IN):
                pass
    (span,) = steps[0].spans
    assert (span.stream, span.tasks) == ("swap_in", (task,))
    assert span.end_ms - span.begin_ms == pytest.approx(5.0)


def test_copies_that_a_thread_issues_meanwhile_leave_the_current_device_its_timestamps() -> None:
    """As the thread that reads weights from a disk does, while a task of another device computes."""
    group = DeviceGroup([CpuDevice(), CpuDevice()])
    with StepTimeline(group).recording(lambda: None), group.members[1].on(Stream.DISK):
        taken = group.timestamp(Stream.COMPUTE)
    assert isinstance(taken, tuple) and taken[0] == HOME


def test_a_step_that_fails_is_not_recorded_and_a_group_that_ends_early_is_as_it_ran() -> None:
    data = batches()
    fail = [False]

    def failing(outputs: Tensor) -> Tensor:
        if fail[0]:
            raise ArithmeticError("on purpose")
        return outputs

    with engine_for(net(), adamw, CONFIGS["deferred"]) as engine:
        engine.train_batch(data, failing)
        with engine.record_steps() as steps:
            fail[0] = True
            with pytest.raises(ArithmeticError, match="on purpose"):
                engine.train_batch(data, failing)
            fail[0] = False
            engine.train_batch(iter([next(data)]), failing)
        assert len(steps) == 1
        assert {task.micro_batch for task in steps[0].tasks} == {-1, 0}
        assert len(steps[0].issued_ms) == len(steps[0].tasks)
        assert nothing_is_watched(engine)


@pytest.mark.parametrize("config", [CONFIGS["stash on host"], CONFIGS["resident"]], ids=["stash on host", "resident"])
def test_the_engine_draws_the_predicted_and_the_executed_step_alike(config: dict[str, Any]) -> None:
    data = batches()
    with engine_for(net(), adamw, config) as engine:
        with pytest.raises(RuntimeError, match="no plan before the first micro-batch"):
            engine.trace()
        engine.train_batch(data, loss_of)
        with engine.record_steps() as steps:
            engine.train_batch(data, loss_of)
        trace = json.loads(json.dumps(engine.trace(steps[0]), allow_nan=False))

    looks: list[dict[tuple[str, int], Any]] = [{}, {}]
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            looks[event["pid"] - 1][event["name"], event["tid"]] = (event["cat"], event["args"])
    compute = STREAMS.index("compute") + 1
    assert {key for key in looks[0] if key[1] == compute} == {key for key in looks[1] if key[1] == compute}
    assert looks[1].keys() >= {key for key in looks[0] if looks[0][key][1]["bytes"]}
    assert all(looks[1][key] == look for key, look in looks[0].items() if key in looks[1])
