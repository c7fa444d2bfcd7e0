"""Combinations of settings: fewer than their product, but each value, or each pair of values, occurs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, cycle, islice, product
from typing import Any

Row = tuple[Any, ...]
Pair = tuple[int, Any, int, Any]


def spread(*axes: Sequence[Any]) -> list[Row]:
    """Every value of every axis at least once: as many rows as the longest axis has values, the others go round."""
    longest = max(map(len, axes))
    return list(zip(*(islice(cycle(axis), longest) for axis in axes), strict=True))


def pairs(*axes: Sequence[Any], allowed: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Every two values of different axes in one row at least, as far as any allowed row has both.

    Greedy: the next row is the first of those that meet most pairs that have not met.
    """
    places = product(*(range(len(axis)) for axis in axes))
    rows = {place: row for place, row in zip(places, product(*axes), strict=True) if allowed(row)}
    left = {pair for place in rows for pair in pairs_of(place)}
    chosen = []
    while left:
        best = max(rows, key=lambda place: sum(pair in left for pair in pairs_of(place)))
        chosen.append(rows[best])
        left -= set(pairs_of(best))
    return chosen


def pairs_of(row: Row) -> Iterable[Pair]:
    """By their axes."""
    return [(i, a, j, b) for (i, a), (j, b) in combinations(enumerate(row), 2)]
