"""Nothing is silently wrong: every program is equal to plain PyTorch or refused by name, as docs/exactness.md says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.exactness import table
from tests.exactness.judge import Judge, judging, load_cases

CASES = load_cases()
COMMITTED = table.read()


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with judging() as one:
        yield one


def test_the_table_has_every_case() -> None:
    assert list(COMMITTED) == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, judge: Judge) -> None:
    outcomes = judge.outcomes(CASES[name])
    details = [outcome for outcome in outcomes if outcome.says.startswith("WRONG")]
    assert not details, "\n".join(f"{outcome.says}\n{outcome.detail}" for outcome in details)
    assert table.cell(CASES[name], outcomes) == COMMITTED[name]
