"""Streams are in order, a copy between devices holds both, and who shares a link slows the others down."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harmony_ds.scheduler.events import Job, Timeline, run_alone, run_jobs

STREAMS = ("a", "b", "c")


@st.composite
def job_lists(draw: st.DrawFn) -> list[Job]:
    """Jobs that wait for earlier ones only."""
    count = draw(st.integers(1, 12))
    jobs = []
    for place in range(count):
        streams = draw(st.lists(st.sampled_from(STREAMS), min_size=0, max_size=2, unique=True))
        after = draw(st.lists(st.integers(0, place - 1), max_size=3, unique=True)) if place else []
        duration_ms = float(draw(st.integers(0, 9)))
        demands = (("link", float(draw(st.integers(0, 4)))),) if draw(st.booleans()) else ()
        jobs.append(Job(tuple(streams), duration_ms, tuple(after), demands))
    return jobs


def test_a_stream_of_priorities_runs_the_lowest_of_those_whose_time_has_come() -> None:
    jobs = [
        Job(("compute",), 2.0),
        Job(("update",), 5.0, after=(0,), priority=(2,)),
        Job(("compute",), 1.0),
        Job(("update",), 5.0, after=(2,), priority=(1,)),
        Job(("compute",), 1.0),
        Job(("update",), 5.0, after=(4,), priority=(0,)),
        Job(("compute",), 1.0, after=(5,)),
    ]
    for timeline in (run_jobs(jobs), run_alone(jobs)):
        assert [timeline.begin_ms[place] for place in (1, 5, 3, 6)] == [2, 7, 12, 12]


def check(jobs: list[Job], timeline: Timeline) -> None:
    last_on: dict[str, float] = defaultdict(float)
    for place, job in enumerate(jobs):
        begin, end = timeline.begin_ms[place], timeline.end_ms[place]
        assert end >= begin + job.duration_ms - 1e-6
        for stream in job.streams:
            assert begin >= last_on[stream] - 1e-6
            last_on[stream] = end
        assert all(begin >= timeline.end_ms[before] - 1e-6 for before in job.after)


def test_a_stream_is_in_order_and_streams_go_on_together() -> None:
    timeline = run_jobs([Job(("copy",), 3), Job(("compute",), 5, after=(0,)), Job(("copy",), 4), Job(("copy",), 1)])
    assert timeline.begin_ms == (0, 3, 3, 7)
    assert max(timeline.end_ms, default=0) == 8


def test_a_job_on_two_streams_begins_when_both_are_free() -> None:
    timeline = run_jobs([Job(("send",), 2), Job(("receive",), 5), Job(("send", "receive"), 1), Job(("send",), 1)])
    assert timeline.begin_ms == (0, 0, 5, 6)


def test_no_job_waits_for_one_behind_it() -> None:
    with pytest.raises(AssertionError, match="a job waits for a later one"):
        run_jobs([Job(("compute",), 1, after=(1,)), Job(("copy",), 4)])


@pytest.mark.parametrize(
    ("first_ms", "capacity", "ends"),
    [(4, 10.0, (8, 8)), (2, 10.0, (4, 6)), (4, 20.0, (4, 4))],
    ids=["both are half as fast", "who is left alone is fast again", "a wide link slows nobody"],
)
def test_two_share_a_link(first_ms: float, capacity: float, ends: tuple[float, float]) -> None:
    jobs = [Job((way,), ms, demands=(("link", 10.0),)) for way, ms in (("in", first_ms), ("out", 4))]
    assert run_jobs(jobs, {"link": capacity}).end_ms == pytest.approx(ends)


@given(job_lists())
def test_order_is_kept_and_no_stream_is_faster_than_its_jobs(jobs: list[Job]) -> None:
    timeline = run_jobs(jobs)
    check(jobs, timeline)
    for stream in STREAMS:
        assert max(timeline.end_ms, default=0) >= sum(job.duration_ms for job in jobs if stream in job.streams)
    for one, other in pairwise(place for place, job in enumerate(jobs) if "a" in job.streams):
        assert timeline.begin_ms[other] >= timeline.end_ms[one]


@given(job_lists(), st.floats(0.5, 8))
def test_a_link_carries_no_more_than_it_can(jobs: list[Job], capacity: float) -> None:
    timeline = run_jobs(jobs, {"link": capacity})
    check(jobs, timeline)
    drawn = sum(job.duration_ms * demand for job in jobs for _, demand in job.demands)
    assert max(timeline.end_ms, default=0) >= drawn / capacity - 1e-6


@given(job_lists(), st.floats(0.5, 8))
def test_alone_is_as_with_room_for_all_and_never_later(jobs: list[Job], capacity: float) -> None:
    alone, all_at_once, slowed = run_alone(jobs), run_jobs(jobs), run_jobs(jobs, {"link": capacity})
    assert (*alone.begin_ms, *alone.end_ms) == pytest.approx((*all_at_once.begin_ms, *all_at_once.end_ms))
    assert all(one <= other + 1e-6 for one, other in zip(alone.end_ms, slowed.end_ms, strict=True))


def test_where_a_job_is_slowed_down_a_more_urgent_one_may_go_first() -> None:
    jobs = [
        Job(("updates",), 2.0, demands=(("link", 1.0),), priority=(2,)),
        Job(("a",), 1.0),
        Job(("updates",), 10.0, after=(1,), priority=(1,)),
        Job(("b",), 2.5, demands=(("link", 1.0),)),
        Job(("c",), 2.5),
        Job(("updates",), 1.0, after=(4,), priority=(0,)),
    ]
    assert run_alone(jobs).end_ms == (2.0, 1.0, 12.0, 2.5, 2.5, 13.0)
    slowed = run_jobs(jobs, {"link": 1.0}).end_ms
    assert slowed[0] == 4.0
    assert slowed[5] == 5.0  # before the long one, which had arrived before it
    assert slowed[2] == 15.0
