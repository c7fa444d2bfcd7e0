"""Traces: Trace Event format, the same tracks, names and arguments for what was predicted and what was executed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from harmony_ds.scheduler.compose import Group, compose_step
from harmony_ds.scheduler.costs import CallCost, CostTable, StashBytes
from harmony_ds.scheduler.memory import walk_memory
from harmony_ds.scheduler.plan import Plan, Policy, Task, TaskKind
from harmony_ds.scheduler.profile import Machine
from harmony_ds.scheduler.simulate import simulate
from harmony_ds.scheduler.spans import STREAMS, UPDATE, Span
from harmony_ds.scheduler.trace import ExecutedStep, trace_of
from tests.scheduler.examples import CPU, GPU, costs_of, packs_of, reused, with_unlayered

COSTS = costs_of(
    (0, 1, 2),
    CallCost(stash=StashBytes(new_bytes=40), needs_backward=True, forward_ms=1.0, backward_ms=2.0, fused_ms=3.0),
)
KINDS = {kind.name.lower() for kind in TaskKind}


STASHING = Policy(stash_on_host=2)


def plan_of(policy: Policy = STASHING, unlayered: bool = False) -> Plan:
    packing = reused(tuple(replace(pack, update_elements=50) for pack in packs_of(True, True, True)))
    packing = with_unlayered(packing) if unlayered else packing
    tasks = compose_step(packing, Group((0, 1, 2)), policy)
    return Plan(packing, policy, tasks, 3, 64, 12_345)


def executed_of(plan: Plan) -> ExecutedStep:
    """Execute each task as if it had taken one millisecond on the compute stream."""
    count = len(plan.tasks)
    times = tuple((float(i), i + 1.0) for i in range(count))
    spans = tuple(Span("compute", *times[i], (task,)) for i, task in enumerate(plan.tasks))
    return ExecutedStep(plan, times, tuple(range(count)), spans)


def drawn(plan: Plan, executed: ExecutedStep | None = None, machine: Machine = GPU, costs: CostTable = COSTS) -> Any:
    """The events, as a viewer would read them."""
    trace = trace_of(plan, simulate(plan, costs, machine), costs, executed, ("wte", "h.0", "head"))
    return json.loads(json.dumps(trace, allow_nan=False))["traceEvents"]


def of_phase(events: Any, phase: str, pid: int = 1) -> list[Any]:
    return [event for event in events if event["ph"] == phase and event["pid"] == pid]


@pytest.mark.parametrize("machine", [GPU, CPU])
@pytest.mark.parametrize("policy", [Policy(), Policy(stash_on_host=2), Policy(deferred_update=False, kept=(1,))])
def test_events_follow_the_trace_event_format(machine: Machine, policy: Policy) -> None:
    plan = plan_of(policy, unlayered=True)

    for event in drawn(plan, executed_of(plan), machine):
        assert event["ph"] in "MXC"
        assert isinstance(event["name"], str) and event["name"]
        assert event["pid"] in (1, 2) and isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["cat"] in KINDS
            assert set(event["args"]) == {"task", "pack", "layers", "micro_batch", "bytes"}
        if event["ph"] == "C":
            assert isinstance(event["args"]["bytes"], int)


def test_both_steps_have_the_same_tracks_in_the_same_order() -> None:
    plan = plan_of()
    events = drawn(plan, executed_of(plan))

    tracks = [
        {e["tid"]: e["args"]["name"] for e in of_phase(events, "M", pid) if e["name"] == "thread_name"}
        for pid in (1, 2)
    ]
    assert tracks[0] == tracks[1] == dict(enumerate(STREAMS, start=1))
    names = [e["args"]["name"] for pid in (1, 2) for e in of_phase(events, "M", pid) if e["name"] == "process_name"]
    assert names == ["simulated step", "executed step"]


def test_runs_of_several_micro_batches_are_drawn_one_by_one() -> None:
    plan = plan_of(Policy())
    runs = [task for task in plan.tasks if task.kind in (TaskKind.FORWARD, TaskKind.FUSED, TaskKind.BACKWARD)]
    compute = [e for e in of_phase(drawn(plan, machine=CPU), "X") if STREAMS[e["tid"] - 1] == "compute"]

    assert [e["name"] for e in compute] == [str(task) for task in runs]


def test_times_are_the_predicted_ones_in_microseconds() -> None:
    plan = plan_of(Policy())
    prediction = simulate(plan, COSTS, CPU)
    last = max(span.end_ms for span in prediction.spans if span.stream != UPDATE)
    ends = [e["ts"] + e["dur"] for e in of_phase(drawn(plan, machine=CPU), "X") if STREAMS[e["tid"] - 1] != UPDATE]

    assert max(ends) == pytest.approx(last * 1e3, abs=0.01)
    assert prediction.busy_ms["compute"] == pytest.approx(3 * (2 * 1.0 + 3.0 + 2 * 2.0))


def test_arguments_say_what_a_task_works_on() -> None:
    by_name = {event["name"]: event["args"] for event in of_phase(drawn(plan_of()), "X")}

    assert by_name["I1"] == {"task": "I1", "pack": 1, "layers": "h.0", "micro_batch": -1, "bytes": 100}
    assert by_name["S0.2"] == {"task": "S0.2", "pack": 0, "layers": "wte", "micro_batch": 2, "bytes": 40}
    assert by_name["B0.1"]["bytes"] == 0
    assert by_name["O1"] == {"task": "O1", "pack": 1, "layers": "h.0", "micro_batch": -1, "bytes": 10}


def test_memory_is_drawn_as_it_was_planned() -> None:
    costs = replace(
        COSTS, costs=tuple(replace(cost, backward=replace(cost.backward, peak_bytes=900)) for cost in COSTS.costs)
    )
    plan = plan_of(Policy())
    walked = walk_memory(plan.packs, plan.tasks, costs)
    counters = [e["args"]["bytes"] for e in of_phase(drawn(plan, costs=costs), "C")]

    runs = [i for i, task in enumerate(plan.tasks) if task.micro_batch >= 0]
    assert sorted(counters) == sorted(64 + walked.weight_bytes[i] + walked.activation_bytes[i] for i in runs)


def test_an_executed_step_ends_with_its_last_work_but_updates() -> None:
    task = Task(TaskKind.FORWARD, 0, 0)
    spans = (Span("compute", 1.0, 2.0, (task,)), Span("compute", 2.0, 6.0, (task,)), Span("update", 5.0, 20.0, (task,)))
    step = ExecutedStep(replace(plan_of(), tasks=(task,)), ((0.5, 2.0),), (1,), spans)

    assert step.step_ms == 6.0
    assert step.busy_ms == {"host": 0.0, "swap_in": 0.0, "compute": 5.0, "swap_out": 0.0, "update": 15.0}
