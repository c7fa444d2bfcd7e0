"""What is left out of a product is no pair."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tests.cover import pairs, pairs_of, spread

AXES = st.lists(st.integers(1, 4).map(range), min_size=2, max_size=4)


@given(AXES)
def test_every_value_comes_up(axes: list[range]) -> None:
    rows = spread(*axes)
    assert len(rows) == max(map(len, axes))
    assert all({row[place] for row in rows} == set(axis) for place, axis in enumerate(axes))


@given(AXES)
def test_every_pair_comes_up(axes: list[range]) -> None:
    rows = pairs(*axes)
    met = {pair for row in rows for pair in pairs_of(row)}
    assert met == {pair for row in product(*axes) for pair in pairs_of(row)}
    assert len(rows) <= len(list(product(*axes)))


def test_rows_that_make_no_sense_are_left_out() -> None:
    rows = pairs((1, 2), (1, 2), (1, 2), allowed=lambda row: row[0] <= row[1])
    assert (2, 1) not in {row[:2] for row in rows}
    assert {(1, 1), (1, 2), (2, 2)} == {row[:2] for row in rows}
