"""Every cut has each item once, in order, in parts that are allowed; the best ones are the best of all cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from harmony_ds.scheduler.partition import BestCuts, Bounds, Combine, sums_of, uniform_bounds
from tests.scheduler.examples import is_cut

VALUES = st.lists(st.integers(1, 20), min_size=1, max_size=8)


def all_cuts(count: int, parts: int) -> Iterator[Bounds]:
    for inner in combinations(range(1, count), parts - 1):
        yield (0, *inner, count)


def cost_of(bounds: Bounds, cost: Callable[[int, int], float], combine: Combine) -> float:
    join = sum if combine is Combine.SUM else max
    return join(cost(first, last) for first, last in pairwise(bounds))


@given(st.integers(1, 30), st.integers(1, 35))
def test_uniform_parts_are_counted_from_the_end(count: int, size: int) -> None:
    bounds = uniform_bounds(count, size)

    assert is_cut(bounds, count)
    assert all(last - first == size for first, last in pairwise(bounds[1:]))


@given(VALUES, st.sampled_from(Combine), st.integers(0, 60), st.data())
def test_the_best_cuts_are_the_best_of_all(values: list[int], combine: Combine, cap: int, data: st.DataObject) -> None:
    """Costs without any order among them: a part is not dearer because it is longer."""
    count = len(values)
    pairs = [(first, last) for first in range(count) for last in range(first + 1, count + 1)]
    drawn = data.draw(st.lists(st.integers(0, 30), min_size=len(pairs), max_size=len(pairs)))
    costs = {
        (first, last): one if sum(values[first:last]) <= cap else float("inf")
        for (first, last), one in zip(pairs, drawn, strict=True)
    }
    matrix = np.array([[costs.get((first, last), 0.0) for last in range(count + 1)] for first in range(count + 1)])
    best = BestCuts(matrix, combine)

    for parts in range(1, count + 1):
        expected = min(cost_of(cut, lambda first, last: costs[first, last], combine) for cut in all_cuts(count, parts))
        found = best.bounds(parts)
        assert best.cost(parts) == expected
        assert (found is None) == (expected == float("inf"))
        if found is not None:
            assert is_cut(found, count)
            assert len(found) == parts + 1
            assert cost_of(found, lambda first, last: costs[first, last], combine) == expected


@given(VALUES, st.sampled_from(Combine), st.data())
def test_one_program_answers_for_the_first_items_too(values: list[int], combine: Combine, data: st.DataObject) -> None:
    items = data.draw(st.integers(1, len(values)))
    best, alone = BestCuts(sums_of(values), combine), BestCuts(sums_of(values[:items]), combine)

    for parts in range(1, len(values) + 1):
        assert best.cost(parts, items) == alone.cost(parts)
        assert best.bounds(parts, items) == alone.bounds(parts)


def test_a_number_of_parts_that_cannot_be() -> None:
    assert BestCuts(sums_of([1, 2]), Combine.MAX).bounds(3) is None
    assert BestCuts(sums_of([1, 2]), Combine.SUM).bounds(0) is None
