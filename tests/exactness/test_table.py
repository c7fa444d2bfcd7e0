"""Nothing is silently wrong: every program is equal to plain PyTorch or refused by name, as outcomes.md says.

`make test` runs each program in one of its settings, the next program in the next one; `make test-all` in all.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.exactness import table
from tests.exactness.judge import Judge, judging, load_cases

CASES = load_cases()
COMMITTED = table.read()
TRIED = [
    pytest.param(name, number, marks=() if number == place % len(case.settings) else pytest.mark.deep)
    for place, (name, case) in enumerate(CASES.items())
    for number in range(len(case.settings))
]


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with judging() as one:
        yield one


def test_the_table_has_every_case() -> None:
    assert list(COMMITTED) == list(CASES)


@pytest.mark.parametrize(("name", "number"), TRIED)
def test_case(name: str, number: int, judge: Judge) -> None:
    (outcome,) = judge.outcomes(CASES[name], [number])
    assert not outcome.says.startswith("WRONG"), f"{outcome.says}\n{outcome.detail}"
    assert outcome.says == table.said_of(COMMITTED[name], CASES[name].settings[number]), outcome.detail
