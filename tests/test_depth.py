"""Rules of tests that `make test` leaves out: they name existing tests, and every test is in some run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.depth import RULES

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("place", RULES)
def test_a_rule_is_of_a_test_that_there_is(place: str) -> None:
    path, _, test = place.partition("::")
    assert (ROOT / path).exists()
    assert not test or f"def {test}(" in (ROOT / path).read_text(encoding="utf-8")
