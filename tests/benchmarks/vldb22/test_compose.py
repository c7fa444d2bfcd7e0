"""Every layer once in each pass, every sample in each, and what one task gives another takes."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given

from benchmarks.vldb22.planner.compose import compose, split_samples
from benchmarks.vldb22.planner.graph import (
    Content,
    DeviceTask,
    DeviceTaskKind,
    Medium,
    Mode,
    Schedule,
    Setup,
    TaskGraph,
)
from tests.benchmarks.vldb22.examples import LAYERS, schedules, setups

PAIRED = (Medium.PEER, Medium.MESSAGE, Medium.SWAP, Medium.PIN)


def replicas(graph: TaskGraph) -> list[list[DeviceTask]]:
    if graph.setup.mode is Mode.PIPELINE:
        return [list(graph.tasks)]
    return [[task for task in graph.tasks if task.device == device] for device in range(graph.setup.devices)]


def of_kind(tasks: list[DeviceTask], kind: DeviceTaskKind) -> list[DeviceTask]:
    return [task for task in tasks if task.kind is kind]


@given(setups(), schedules())
def test_each_pass_has_every_layer_once(setup: Setup, schedule: Schedule) -> None:
    for tasks in replicas(compose(setup, schedule)):
        forward, backward = of_kind(tasks, DeviceTaskKind.FORWARD), of_kind(tasks, DeviceTaskKind.BACKWARD)
        (fused,) = (task for task in tasks if task.fused)
        assert fused == backward[0]
        assert [layer for task in (*forward, fused) for layer in range(task.first, task.last)] == list(range(LAYERS))
        assert [layer for task in backward[::-1] for layer in range(task.first, task.last)] == list(range(LAYERS))
        assert [(task.first, task.last) for task in forward] == list(pairwise(schedule.forward))


@given(setups(), schedules())
def test_every_sample_goes_through_each_pass(setup: Setup, schedule: Schedule) -> None:
    shares = [{task.samples for task in tasks if task.micro_batches} for tasks in replicas(compose(setup, schedule))]
    assert all(len(share) == 1 for share in shares)
    samples = [share.pop() for share in shares]
    assert sum(samples) == setup.batch
    assert max(samples) - min(samples) <= 1
    assert samples == sorted(samples, reverse=True)


@given(setups(), schedules())
def test_what_is_given_is_taken(setup: Setup, schedule: Schedule) -> None:
    tasks = compose(setup, schedule).tasks
    assert [task.index for task in tasks] == list(range(len(tasks)))
    given = Counter(
        (task.index, port.peer, port.content, port.medium, port.first, port.last)
        for task in tasks
        for port in task.gives
        if port.medium in PAIRED
    )
    taken = Counter(
        (port.peer, task.index, port.content, port.medium, port.first, port.last)
        for task in tasks
        for port in task.takes
        if port.medium in PAIRED
    )
    assert given == taken
    assert all(source < target for source, target, *_ in given)  # the order of the indices could run


@given(setups(), schedules())
def test_media_follow_the_devices(setup: Setup, schedule: Schedule) -> None:
    tasks = compose(setup, schedule).tasks
    for task in tasks:
        for port in task.takes:
            if port.peer is None or port.medium is Medium.MESSAGE or task.kind is DeviceTaskKind.UPDATE:
                continue
            assert (tasks[port.peer].device == task.device) == (port.medium in (Medium.SWAP, Medium.PIN))
            if port.medium is Medium.PEER:
                assert tasks[port.peer].micro_batches == task.micro_batches


@given(setups(), schedules())
def test_a_pipeline_deals_its_tasks_out_in_turn(setup: Setup, schedule: Schedule) -> None:
    graph = compose(Setup(Mode.PIPELINE, setup.devices, setup.batch), schedule)
    forwards = len(schedule.forward) - 1
    for task in graph.tasks:
        turn = task.index if task.index < forwards else forwards + (task.index - forwards) // 2
        assert task.device == turn % setup.devices
    assert graph.devices_at_work == min(setup.devices, forwards + len(schedule.backward) - 1)


@given(setups(), schedules())
def test_replicas_differ_in_their_share_only_and_the_first_updates(setup: Setup, schedule: Schedule) -> None:
    graph = compose(Setup(Mode.DATA_PARALLEL, setup.devices, setup.batch), schedule)
    packs = [
        [(task.kind, task.first, task.last) for task in tasks if task.kind is not DeviceTaskKind.UPDATE]
        for tasks in replicas(graph)
    ]
    assert all(one == packs[0] for one in packs)
    updates = of_kind(list(graph.tasks), DeviceTaskKind.UPDATE)
    assert {task.device for task in updates} == {0}
    assert len(updates) == len(schedule.backward) - 1


@given(setups(), schedules())
def test_one_all_reduce_per_backward_pack_and_replica(setup: Setup, schedule: Schedule) -> None:
    graph = compose(setup, schedule)
    reduces = [
        (task.device, port.first, port.last)
        for task in graph.tasks
        for port in task.gives
        if port.medium is Medium.REDUCE
    ]
    expected = setup.devices if setup.mode is Mode.DATA_PARALLEL and setup.devices > 1 else 0
    assert Counter(reduces) == Counter(
        (device, *pack) for device in range(expected) for pack in pairwise(schedule.backward)
    )


@given(setups(), schedules())
def test_stashes_are_the_inputs_of_all_backward_packs_but_the_fused(setup: Setup, schedule: Schedule) -> None:
    for tasks in replicas(compose(setup, schedule)):
        stashed = [port.first for task in tasks for port in task.given(Content.STASH)]
        assert stashed == list(schedule.backward[:-2])


def test_a_worked_example() -> None:
    """gpt2_medium on four devices: packs of seven layers, one of which stays where it is."""
    packs = (0, 7, 14, 21, 28)
    graph = compose(Setup(Mode.PIPELINE, 4, 256), Schedule(2, packs[:-1], 2, packs))

    assert [
        (task.kind.value, task.first, task.device) for task in graph.tasks if task.kind is not DeviceTaskKind.UPDATE
    ] == [
        ("FWD", 0, 0),
        ("FWD", 7, 1),
        ("FWD", 14, 2),
        ("BWD", 21, 3),
        ("BWD", 14, 0),
        ("BWD", 7, 1),
        ("BWD", 0, 2),
    ]
    pins = [
        (task.index, port.first, port.last) for task in graph.tasks for port in task.takes if port.medium is Medium.PIN
    ]
    assert pins == [(7, 7, 14)]


def test_the_last_output_goes_over_the_host_where_micro_batches_change() -> None:
    setup = Setup(Mode.PIPELINE, 2, 8)
    (taken,) = (
        task.taken(Content.INPUT) for task in compose(setup, Schedule(4, (0, 3), 2, (0, 3, 6))).tasks if task.fused
    )
    assert taken is not None
    assert taken.medium is Medium.MESSAGE


def test_micro_batches() -> None:
    assert split_samples(8, 4) == (4, 4)
    assert split_samples(9, 4) == (4, 4, 1)
    assert split_samples(3, 4) == (3,)


def test_what_cannot_be_composed() -> None:
    with pytest.raises(ValueError, match="3 samples cannot be shared by 4 devices"):
        compose(Setup(Mode.DATA_PARALLEL, 4, 3), Schedule(1, (0,), 1, (0, 6)))
    with pytest.raises(ValueError, match=r"forward packs \(0, 2\) do not end where"):
        Schedule(1, (0, 2), 1, (0, 3, 6))
