"""Acceptance: the original's estimates within 1 %, its byte volumes exactly; the engine plans no slower schedules."""

from __future__ import annotations

import json

import pytest

from benchmarks.vldb22 import reference, run
from benchmarks.vldb22.cost_model.jobs import HARMONY_VLDB22, step_ms

CASES = [case for model in reference.LARGEST for case in reference.shipped(model)]
IDS = [f"{case.model}-{case.name}" for case in CASES]


def test_all_published_schedules_are_here() -> None:
    assert len(CASES) == 53


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_times_are_those_of_the_original(case: reference.Shipped) -> None:
    costs = reference.costs_of(case.model)
    profiled = case.schedule.forward_micro_batch <= reference.LAST_PROFILED
    for overlap, expected_s in zip((False, True), case.time_s, strict=True):
        time_s = step_ms(case.setup, case.schedule, costs, HARMONY_VLDB22, overlap) / 1000
        assert time_s == pytest.approx(expected_s, rel=2e-6 if profiled else 0.01)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_bytes_are_those_of_the_original(case: reference.Shipped) -> None:
    assert case.differences() == []


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("bert_large", "D32_vDP_N2_Top1"),
        ("gpt2_medium", "D32_vDP_N1_Ufwd2_Ubwd2_P7"),
        ("gpt2_medium", "D32_vPP_N2_Ufwd2_Ubwd2_P7"),
        ("vgg416", "D16_vDP_N4_Top1"),
        ("vgg416", "D64_vDP_N4_Top1"),
    ],
)
def test_the_engine_plans_no_slower_schedule_in_the_same_memory(model: str, name: str) -> None:
    case = next(case for case in CASES if (case.model, case.name) == (model, name))
    found = run.row(case, {})

    assert found["found_s"] <= case.time_s[True]
    assert found["bytes_that_differ"] == []


def test_in_the_kept_results_no_published_schedule_is_faster() -> None:
    content = json.loads(run.RESULTS.read_text())

    assert sorted(row["name"] for row in content["rows"]) == sorted(case.name for case in CASES)
    assert all(row["found_s"] <= row["simulated_s"][True] * (1 + 1e-9) for row in content["rows"])


def test_the_page_is_made_from_the_kept_results() -> None:
    assert run.PAGE.read_text() == run.page(json.loads(run.RESULTS.read_text()))
