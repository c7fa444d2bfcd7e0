"""Every cut has each item once, in order, in parts that are allowed; the best ones are the best of all cuts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harmony_ds.scheduler.packing import uniform_bounds
from harmony_ds.scheduler.partition import (
    BestCuts,
    Bounds,
    Combine,
    PartCost,
    balanced,
    constant,
    fits_all,
    greedy,
    greedy_reverse,
    minimise_bottleneck,
    minimise_sum,
    sum_and_input,
    sum_of,
    within,
)

VALUES = st.lists(st.integers(1, 20), min_size=1, max_size=8)
LONG = st.lists(st.integers(1, 50), min_size=1, max_size=40)


def all_cuts(count: int, parts: int) -> Iterator[Bounds]:
    for inner in combinations(range(1, count), parts - 1):
        yield (0, *inner, count)


def cost_of(bounds: Bounds, cost: PartCost, combine: Combine) -> float:
    join = sum if combine is Combine.SUM else max
    return join(cost(first, last) for first, last in pairwise(bounds))


def is_cut(bounds: Bounds | None, count: int) -> bool:
    return (
        bounds is not None
        and bounds[0] == 0
        and bounds[-1] == count
        and all(first < last for first, last in pairwise(bounds))
    )


@given(st.integers(1, 30), st.integers(1, 35))
def test_constant_parts_are_counted_from_the_end(count: int, size: int) -> None:
    assert constant(count, size) == uniform_bounds(count, size)
    assert is_cut(constant(count, size), count)


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
def test_balanced_parts_of_equal_items_differ_by_at_most_one(values: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(values)))
    bounds = balanced(values, parts)
    assert is_cut(bounds, len(values))
    assert len(bounds) == parts + 1

    alike = balanced([3] * len(values), parts)
    lengths = [last - first for first, last in pairwise(alike)]
    assert max(lengths) - min(lengths) <= 1


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


def test_balanced_needs_an_item_for_each_part() -> None:
    assert balanced([100, 1, 1], 3) == (0, 1, 2, 3)
    with pytest.raises(ValueError, match="3 items cannot be cut into 4 parts"):
        balanced([1, 1, 1], 4)


@given(VALUES, st.sampled_from(Combine), st.integers(0, 60), st.data())
def test_the_best_cuts_are_the_best_of_all(values: list[int], combine: Combine, cap: int, data: st.DataObject) -> None:
    """Costs without any order among them: a part is not dearer because it is longer."""
    count = len(values)
    pairs = [(first, last) for first in range(count) for last in range(first + 1, count + 1)]
    drawn = data.draw(st.lists(st.integers(0, 30), min_size=len(pairs), max_size=len(pairs)))
    costs = dict(zip(pairs, drawn, strict=True))
    fits = within(sum_of(values), cap)
    best = BestCuts(count, lambda first, last: costs[first, last], combine, fits=fits)

    for parts in range(1, count + 1):
        expected = min(
            (
                cost_of(cut, lambda first, last: costs[first, last], combine)
                for cut in all_cuts(count, parts)
                if fits_all(cut, fits)
            ),
            default=float("inf"),
        )
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
    cost, shorter = sum_of(values), sum_of(values[:items])
    best, alone = BestCuts(len(values), cost, combine), BestCuts(items, shorter, combine)

    for parts in range(1, len(values) + 1):
        assert best.cost(parts, items) == alone.cost(parts)
        assert best.bounds(parts, items) == alone.bounds(parts)


@given(VALUES, st.data())
def test_the_smallest_bottleneck(values: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(values)))
    found = minimise_bottleneck(values, parts)
    assert found is not None
    assert cost_of(found, sum_of(values), Combine.MAX) == min(
        cost_of(cut, sum_of(values), Combine.MAX) for cut in all_cuts(len(values), parts)
    )


def test_a_number_of_parts_that_cannot_be() -> None:
    assert minimise_bottleneck([1, 2], 3) is None
    assert minimise_sum(2, 0, sum_of([1, 2])) is None
    assert minimise_bottleneck([5, 5], 1, fits=within(sum_of([5, 5]), 9)) is None
    assert minimise_sum(3, 2, lambda first, last: (last - first) ** 2) == (0, 1, 3)


def test_200_items_into_every_number_of_parts_take_well_below_a_second() -> None:
    values = [1 + i % 7 for i in range(200)]
    begin = time.process_time()
    best = BestCuts(200, sum_of(values), Combine.MAX)
    bounds = [best.bounds(parts) for parts in range(1, 201)]
    elapsed_s = time.process_time() - begin

    assert all(is_cut(cut, 200) for cut in bounds)
    assert elapsed_s < 1.0  # 0.05 s on an idle core
