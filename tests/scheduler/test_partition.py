"""Every cut has each item once, in order; the best ones are the best of all cuts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from harmony_ds.scheduler.partition import BestCuts, Bounds, uniform_bounds
from tests.scheduler.examples import is_cut

VALUES = st.lists(st.integers(1, 20), min_size=1, max_size=8)


def all_cuts(count: int, parts: int) -> Iterator[Bounds]:
    for inner in combinations(range(1, count), parts - 1):
        yield (0, *inner, count)


def cost_of(bounds: Bounds, values: list[int]) -> int:
    return max(sum(values[first:last]) for first, last in pairwise(bounds))


@given(st.integers(1, 30), st.integers(1, 35))
def test_uniform_parts_are_counted_from_the_end(count: int, size: int) -> None:
    bounds = uniform_bounds(count, size)

    assert is_cut(bounds, count)
    assert all(last - first == size for first, last in pairwise(bounds[1:]))


@given(VALUES)
def test_the_best_cuts_are_the_best_of_all(values: list[int]) -> None:
    best = BestCuts(values)

    for parts in range(1, len(values) + 1):
        found = best.bounds(parts)
        assert is_cut(found, len(values))
        assert len(found) == parts + 1
        assert cost_of(found, values) == min(cost_of(cut, values) for cut in all_cuts(len(values), parts))


@given(VALUES)
def test_cuts_of_the_first_items_are_those_of_these_items_alone(values: list[int]) -> None:
    best = BestCuts(values)
    for count in range(1, len(values) + 1):
        for parts in range(1, count + 1):
            assert best.bounds(parts, count) == BestCuts(values[:count]).bounds(parts)
