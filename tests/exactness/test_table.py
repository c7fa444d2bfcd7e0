"""Nothing is silently wrong: every program is equal to plain PyTorch or refused by name, as docs/exactness.md says.

A program that the document says one thing of is run in the first and the last two of its settings: updates at once and
packs that are swapped, packs that are resident, and clipping and packs that stay with their graphs.
`tests.exactness.run` runs all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.exactness import table
from tests.exactness.judge import Judge, judging, load_cases

CASES = load_cases()
COMMITTED = table.read()
ENDS = (0, -2, -1)


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with judging() as one:
        yield one


def test_the_table_has_every_case() -> None:
    assert list(COMMITTED) == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, judge: Judge) -> None:
    case = CASES[name]
    outcomes = judge.outcomes(case, ENDS if case.settings[3:] and table.is_one(COMMITTED[name]) else None)
    details = [outcome for outcome in outcomes if outcome.says.startswith("WRONG")]
    assert not details, "\n".join(f"{outcome.says}\n{outcome.detail}" for outcome in details)
    assert table.cell(case, outcomes) == COMMITTED[name]
