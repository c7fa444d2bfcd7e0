"""Acceptance: the original's estimates within 1 %, its byte volumes exactly; the search is not worse."""

from __future__ import annotations

import pytest

from benchmarks.vldb22 import reference
from benchmarks.vldb22.planner.compose import compose
from benchmarks.vldb22.planner.machine import HARMONY_VLDB22
from benchmarks.vldb22.planner.search import Question, search
from benchmarks.vldb22.planner.simulate import simulate
from benchmarks.vldb22.planner.volumes import count_volumes

CASES = [case for model in reference.LARGEST for case in reference.shipped(model)]
IDS = [f"{case.model}-{case.name}" for case in CASES]


def test_all_published_schedules_are_here() -> None:
    assert len(CASES) == 45


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_times_are_those_of_the_original(case: reference.Shipped) -> None:
    costs = reference.costs_of(case.model)
    profiled = case.schedule.forward_micro_batch <= reference.LAST_PROFILED
    for overlap, expected_s in zip((False, True), case.time_s, strict=True):
        time_s = simulate(case.setup, case.schedule, costs, HARMONY_VLDB22, overlap).time_ms / 1000
        assert time_s == pytest.approx(expected_s, rel=2e-6 if profiled else 0.01)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_bytes_are_those_of_the_original(case: reference.Shipped) -> None:
    volumes = count_volumes(compose(case.setup, case.schedule), reference.costs_of(case.model))
    assert case.differences(volumes) == []


@pytest.mark.parametrize(
    ("model", "name", "overlap"),
    [
        ("bert_large", "D32_vDP_N2_Top1", False),
        ("bert_large", "D32_vPP_N2_Top1", False),
        ("gpt2_medium", "D256_vDP_N1_Ufwd2_Ubwd2_P28", True),  # the whole model in one pack
        ("gpt2_medium", "D32_vPP_N2_Ufwd2_Ubwd2_P7", True),
        ("bert_96", "D64_vDP_N4_Top1", True),
    ],
)
def test_the_search_is_not_worse(model: str, name: str, overlap: bool) -> None:
    case = next(case for case in CASES if (case.model, case.name) == (model, name))
    costs = reference.costs_of(model)
    question = Question(case.setup, overlap, case.cap_bytes(costs), *reference.LARGEST[model])
    answer = search(question, costs, HARMONY_VLDB22)

    assert answer is not None
    assert answer.time_ms / 1000 <= case.time_s[overlap] * (1 + 1e-9) or answer.schedule == case.schedule
    assert answer.time_ms == simulate(case.setup, answer.schedule, costs, HARMONY_VLDB22, overlap).time_ms
