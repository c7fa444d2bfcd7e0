"""Plans learn from steps that take something else than predicted; the weights are the same bits whatever is learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from harmony_ds import HarmonyEngine
from harmony_ds.scheduler.plan import Packing, Plan, Policy
from harmony_ds.scheduler.spans import Span
from harmony_ds.stepping import lessons
from harmony_ds.stepping.lessons import Lessons
from tests.engine.drive import adamw, config_of, engine_for, family, groups_of, means_of, plainly, train_groups
from tests.inside import planner_of
from tests.oracle import assert_same

PLAN, OTHER = (Plan(Packing((), (), ()), Policy(), (), count, 0, 0) for count in (1, 2))


class Timeline:
    """What is recorded, without steps."""

    def __init__(self) -> None:
        self.is_recording = False
        self.begun = self.finished = 0

    @contextmanager
    def recording(self, finish: Any) -> Iterator[list[Any]]:
        self.begun += 1
        self.is_recording = True
        try:
            yield []
        finally:
            self.is_recording = False
        self.finished += 1


class Course:
    """Steps of 10 ms each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.timeline, self.now = Timeline(), 0.0
        self.learned: list[tuple[float, Sequence[Sequence[Span]]]] = []
        timeline: Any = self.timeline
        self.lessons = Lessons(timeline, lambda *lesson: self.learned.append(lesson), lambda: None)
        monkeypatch.setattr(lessons.time, "perf_counter", lambda: self.now)

    def steps(self, count: int, predicted_ms: float, plan: Plan = PLAN) -> None:
        for _ in range(count):
            self.lessons.learn(plan)
            with self.lessons.step(plan, predicted_ms):
                self.now += 0.010


@pytest.fixture
def course(monkeypatch: pytest.MonkeyPatch) -> Course:
    return Course(monkeypatch)


def test_after_nine_steps_that_are_off_three_are_recorded(course: Course) -> None:
    course.steps(50, predicted_ms=10.9)
    course.lessons.forget()
    course.steps(9, predicted_ms=12.0)
    assert not course.timeline.begun
    course.steps(2, predicted_ms=12.0)
    assert course.timeline.is_recording and not course.learned
    course.steps(1, predicted_ms=12.0)
    assert not course.timeline.is_recording and not course.learned  # between steps
    course.lessons.learn(PLAN)
    assert course.learned == [(pytest.approx(10.0), [])]


def test_what_was_seen_of_a_plan_that_has_gone_is_forgotten(course: Course) -> None:
    course.steps(12, predicted_ms=5.0)
    course.lessons.learn(OTHER)
    course.lessons.learn(PLAN)
    assert course.timeline.finished == 1 and not course.learned


def test_there_is_an_end_to_learning(course: Course) -> None:
    course.steps(200, predicted_ms=5.0)
    assert len(course.learned) == 3


def test_another_plan_begins_anew_and_what_was_being_recorded_is_dropped(course: Course) -> None:
    course.steps(10, predicted_ms=5.0)
    course.steps(9, 5.0, OTHER)
    assert (course.timeline.begun, course.timeline.finished) == (1, 0)
    course.steps(4, 5.0, OTHER)
    assert course.timeline.finished == len(course.learned) == 1


def test_a_step_that_fails_and_a_recording_of_the_users_end_one(course: Course) -> None:
    course.steps(10, predicted_ms=5.0)
    with pytest.raises(KeyError), course.lessons.step(PLAN, 5.0):
        raise KeyError
    assert not course.timeline.is_recording
    course.steps(10, predicted_ms=5.0)
    course.lessons.forget()
    assert not course.timeline.is_recording and not course.timeline.finished
    course.timeline.is_recording = True
    course.steps(20, predicted_ms=5.0)
    assert course.timeline.begun == 2


# ---- in an engine

LLAMA = family("llama")
GROUPS = groups_of(LLAMA, 14, 2)


@contextmanager
def mistaken(clip: float | None, **harmony: Any) -> Iterator[tuple[Any, HarmonyEngine]]:
    """An engine that takes every call to be a hundred times as long as measured, and trains a step."""
    model = LLAMA.build(0.1)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    config = config_of(2, clip, {"device_memory_gib": 3 * weights / 2**30, **harmony})
    with engine_for(model, adamw, config) as engine:
        train_groups(engine, GROUPS[:1])
        planner = planner_of(engine)
        assert planner._costs is not None
        times = ("forward_ms", "backward_ms", "fused_ms", "propagate_ms")
        calls = tuple(
            replace(cost, **{name: 100 * getattr(cost, name) for name in times}) for cost in planner._costs.costs
        )
        planner._costs = replace(planner._costs, costs=calls)
        planner._outgrown = True
        yield model, engine


@pytest.mark.real_times
@pytest.mark.parametrize("clip", [None, 0.5])
def test_an_engine_that_was_mistaken_learns_says_so_and_computes_the_same_bits(clip: float | None) -> None:
    plain, losses = plainly(LLAMA, 0.1, GROUPS, adamw, clip)
    with mistaken(clip) as (model, engine):
        actual = train_groups(engine, GROUPS[1:])
        lesson, report = planner_of(engine).lesson, str(engine.plan_report())
    assert_same(model, plain, bitwise=True)
    assert actual == means_of(losses)[1:]
    assert lesson is not None
    assert lesson.kept_ms < lesson.predicted_ms / 5
    assert lesson.exchanged == (lesson.found_ms < 0.98 * lesson.kept_ms)
    assert f"learned       {lesson}" in report


@pytest.mark.real_times
def test_a_plan_that_is_not_to_learn_stays() -> None:
    with mistaken(None, learn=False) as (_, engine):
        train_groups(engine, GROUPS[1:2])
        plan = engine.plan
        train_groups(engine, GROUPS[2:])
        assert planner_of(engine).lesson is None and engine.plan is plan
        assert "learned" not in str(engine.plan_report())
