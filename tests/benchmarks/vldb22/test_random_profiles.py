"""Profiles drawn around the published ones: a search in the original's manner finds nothing faster than the engine."""

from __future__ import annotations

import pytest

from benchmarks.vldb22.cost_model.profile import PackCosts
from benchmarks.vldb22.cost_model.schedule import Mode, Setup
from benchmarks.vldb22.planned import Question, capacity_bytes, cut, improved, timed
from benchmarks.vldb22.reference import LARGEST, profile_of
from tests.benchmarks.vldb22.original import drawn_around, fastest

GIB = 2**30
CASES = [
    (model, Setup(mode, 4, 16), seed)
    for model in ("vgg416", "bert_96", "gpt2_medium")
    for mode in (Mode.DATA_PARALLEL, Mode.PIPELINE)
    for seed in range(2)
]


@pytest.mark.parametrize(
    ("model", "setup", "seed"), CASES, ids=[f"{m}-{s.mode.value}{s.devices}-{s.batch}-{n}" for m, s, n in CASES]
)
def test_a_search_in_the_originals_manner_finds_nothing_faster(model: str, setup: Setup, seed: int) -> None:
    profile = drawn_around(profile_of(model), seed)
    costs = PackCosts(profile)
    ms, schedule = fastest(costs, setup, 10 * GIB, (1, 2, 4, 8, 16))

    question = Question(profile, setup, LARGEST[model], capacity_bytes(costs, schedule))
    found = timed(question, {*cut(question)})
    found.update(improved(question, found))
    assert min(found.values()) <= ms * (1 + 1e-9)
