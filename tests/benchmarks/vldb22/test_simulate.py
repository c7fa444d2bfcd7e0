"""Small schedules by hand, and what holds for all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.vldb22.cost_model.jobs import lower, step_ms, taken_with
from benchmarks.vldb22.cost_model.schedule import Mode, Schedule, Setup
from tests.benchmarks.vldb22.examples import MACHINE, costs_of, schedules, setups

COSTS = costs_of()


def time_ms(setup: Setup, schedule: Schedule, overlap: bool) -> float:
    return step_ms(setup, schedule, COSTS, MACHINE, overlap)


def test_one_pack_on_one_device_by_hand() -> None:
    """2 samples one by one: 2100 bytes of weights in, 6 layers of 3 ms each, the gradients out, updates of 2 ms each.

    weights 21, then twice data 0.1 and 18, gradients 21, updates 12
    """
    schedule = Schedule(1, (0,), 1, (0, 6))
    setup = Setup(Mode.DATA_PARALLEL, 1, 2)

    assert time_ms(setup, schedule, False) == pytest.approx(21 + 2 * (0.1 + 18) + 21 + 12)
    assert time_ms(setup, schedule, True) == pytest.approx(0.1 + 21 + 2 * 18 + 21 + 12, abs=0.11)


@given(setups(), schedules(), st.booleans())
def test_jobs_wait_for_earlier_ones_only(setup: Setup, schedule: Schedule, overlap: bool) -> None:
    """So none can wait in a circle."""
    jobs = lower(setup, schedule, COSTS, MACHINE, overlap)

    assert all(0 <= before < place for place, job in enumerate(jobs) for before in job.after)
    assert all(job.duration_ms >= 0 for job in jobs)


def test_micro_batches_are_taken_when_their_last_sample_is_there() -> None:
    assert taken_with((4, 4), (4, 4)) == [[4], [4]]
    assert taken_with((6, 6), (4, 4, 4)) == [[4], [4, 4]]
    assert taken_with((2, 2, 2), (4, 2)) == [[], [4], [2]]
