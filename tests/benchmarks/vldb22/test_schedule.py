"""Every layer once in each pass, every sample in each, and where tasks run."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given

from benchmarks.vldb22.cost_model.schedule import Mode, Schedule, Setup, Way, pinned, split_samples, tasks_of, way
from tests.benchmarks.vldb22.examples import LAYERS, schedules, setups


@given(setups(), schedules())
def test_each_pass_has_every_layer_once(setup: Setup, schedule: Schedule) -> None:
    tasks = tasks_of(setup, schedule)
    forward, backward = ([task for task in tasks if task.backward is back] for back in (False, True))
    (fused,) = (task for task in tasks if task.fused)
    assert fused == backward[0]
    assert [layer for task in (*forward, fused) for layer in range(task.first, task.last)] == list(range(LAYERS))
    assert [layer for task in backward[::-1] for layer in range(task.first, task.last)] == list(range(LAYERS))
    assert [(task.first, task.last) for task in forward] == list(pairwise(schedule.forward))
    assert {sum(task.micro_batches) for task in tasks} == {setup.share}


def test_a_worked_example() -> None:
    """gpt2_medium on four devices: packs of seven layers, one of which stays where it is."""
    packs = (0, 7, 14, 21, 28)
    tasks = tasks_of(Setup(Mode.PIPELINE, 4, 256), Schedule(2, packs[:-1], 2, packs))

    assert [(task.backward, task.first, task.device) for task in tasks] == [
        *((False, 0, 0), (False, 7, 1), (False, 14, 2)),
        *((True, 21, 3), (True, 14, 0), (True, 7, 1), (True, 0, 2)),
    ]
    assert pinned(tasks) == [(7, 14)]


def test_the_last_output_goes_over_the_host_where_micro_batches_change() -> None:
    forward, fused, _ = tasks_of(Setup(Mode.PIPELINE, 2, 8), Schedule(4, (0, 3), 2, (0, 3, 6)))
    assert way(forward, fused) is Way.MESSAGE


def test_micro_batches() -> None:
    assert split_samples(8, 4) == (4, 4)
    assert split_samples(9, 4) == (4, 4, 1)
    assert split_samples(3, 4) == (3,)
