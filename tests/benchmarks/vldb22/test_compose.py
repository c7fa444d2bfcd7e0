"""Every layer once in each pass, every sample in each, and what one task gives another takes."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given

from benchmarks.vldb22.cost_model.compose import compose, split_samples
from benchmarks.vldb22.cost_model.graph import (
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


def test_a_worked_example() -> None:
    """gpt2_medium on four devices: packs of seven layers, one of which stays where it is."""
    packs = (0, 7, 14, 21, 28)
    graph = compose(Setup(Mode.PIPELINE, 4, 256), Schedule(2, packs[:-1], 2, packs))

    assert [
        (task.kind.value, task.first, task.device) for task in graph.tasks if task.kind is not DeviceTaskKind.UPDATE
    ] == [("FWD", 0, 0), ("FWD", 7, 1), ("FWD", 14, 2), ("BWD", 21, 3), ("BWD", 14, 0), ("BWD", 7, 1), ("BWD", 0, 2)]
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
