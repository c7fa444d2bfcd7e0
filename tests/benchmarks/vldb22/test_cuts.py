"""The original's cuts have each item once, in order, in parts that fit."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.vldb22.planner.cuts import balanced, fits_all, greedy, greedy_reverse, sum_and_input, sum_of, within
from tests.scheduler.examples import is_cut

LONG = st.lists(st.integers(1, 50), min_size=1, max_size=40)


def test_sum_and_input_counts_the_first_input_only() -> None:
    cost = sum_and_input([10, 20, 30], [1, 2, 3])

    assert cost(0, 1) == 10
    assert cost(0, 3) == 9 + 18 + 27 + 1
    assert cost(1, 3) == 18 + 27 + 2


def test_greedy_fills_from_either_end() -> None:
    fits = within(sum_of([4, 3, 3, 4, 1]), 7)

    assert greedy(5, fits) == (0, 2, 4, 5)
    assert greedy_reverse(5, fits) == (0, 1, 3, 5)


def test_greedy_finds_nothing_where_an_item_does_not_fit() -> None:
    for values in ([8, 1], [1, 8], [1, 8, 1], [8]):
        assert greedy(len(values), within(sum_of(values), 7)) is None
        assert greedy_reverse(len(values), within(sum_of(values), 7)) is None


@given(LONG, st.integers(50, 200))
def test_greedy_cuts_fit_and_no_part_could_take_one_more(values: list[int], cap: int) -> None:
    count = len(values)
    fits = within(sum_of(values), cap)
    forward, reverse = greedy(count, fits), greedy_reverse(count, fits)

    assert is_cut(forward, count)
    assert is_cut(reverse, count)
    assert forward is not None
    assert reverse is not None
    assert fits_all(forward, fits)
    assert fits_all(reverse, fits)
    assert not any(fits(first, last + 1) for first, last in pairwise(forward) if last < count)
    assert not any(fits(first - 1, last) for first, last in pairwise(reverse) if first > 0)
    assert len(forward) == len(reverse)  # of all cuts that fit, both have fewest parts


@given(LONG, st.data())
def test_balanced_bounds_are_the_nearest_to_equal_shares(values: list[int], data: st.DataObject) -> None:
    """The plain way: of all bounds that leave each part an item, the nearest."""
    parts = data.draw(st.integers(1, len(values)))
    before = [sum(values[:bound]) for bound in range(len(values) + 1)]
    bounds = [0]
    for part in range(1, parts):
        room = range(bounds[-1] + 1, len(values) - (parts - part) + 1)
        bounds.append(min(room, key=lambda bound: abs(before[bound] - sum(values) * part / parts)))

    assert balanced(values, parts) == (*bounds, len(values))
    with pytest.raises(ValueError, match="3 items cannot be cut into 4 parts"):
        balanced([1, 1, 1], 4)
