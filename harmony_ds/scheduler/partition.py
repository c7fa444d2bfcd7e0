"""Ways to cut a row of items into contiguous parts. Knows neither layers nor memory.

What enters: a number of items, and what a part costs. What leaves: bounds, a tuple (0, ..., count) in which part i is
the items bounds[i] to bounds[i + 1] - 1. Every part has at least one item.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Bounds = tuple[int, ...]


class Combine(Enum):
    """How a cut is judged: the costs of its parts added up, or the largest of them."""

    SUM = "sum"
    MAX = "max"


def sums_of(values: Sequence[float]) -> NDArray[np.float64]:
    """Return the costs of parts that cost the sum of their values: see `BestCuts`."""
    before = np.array([0, *accumulate(values)], dtype=np.float64)
    return before[None, :] - before[:, None]


def uniform_bounds(count: int, size: int) -> Bounds:
    """Parts of `size` items counted from the last one, so that only the first may be smaller.

    The last pack is swapped in once instead of twice: it is the one that should be full.
    """
    return tuple(sorted({0, *range(count, 0, -size)}))


class BestCuts:
    """The cheapest cuts into 1, 2, ... parts: one dynamic program answers for every number of parts.

    With best(k, j) the cost of the first j items in k parts:

        best(k, j) = min over i < j of combine(best(k - 1, i), cost(i, j))

    Among equally cheap cuts it takes the one whose last part is longest, then the last but one, and so on.

    Args:
        costs: of parts, shape (count + 1, count + 1): [first, last] of the items from `first` to before `last`; infinite
            where it is not allowed, read where first < last.
        combine: the parts' costs to the cut's.
        most: parts; None: as many as there are items.
    """

    def __init__(self, costs: NDArray[np.float64], combine: Combine, most: int | None = None) -> None:
        count = len(costs) - 1
        costs = np.where(np.triu(np.ones_like(costs, dtype=bool), k=1), costs, np.inf)
        join = np.add if combine is Combine.SUM else np.maximum
        best = np.full(count + 1, np.inf)
        best[0] = 0.0 if combine is Combine.SUM else -np.inf
        self._count = count
        self._costs: list[list[float]] = []  # for each number of parts and of items
        self._begins: list[list[int]] = []  # and where the last part begins then
        for _ in range(count if most is None else min(most, count)):
            joined = join(best[:, None], costs)
            begins = joined.argmin(axis=0)
            best = np.take_along_axis(joined, begins[None, :], axis=0)[0]
            self._costs.append(best.tolist())
            self._begins.append(begins.tolist())

    def cost(self, parts: int, items: int | None = None) -> float:
        """Return the cost of the cheapest cut of the first `items` (None: all) into `parts`; infinite if there is none."""
        if not 0 < parts <= len(self._costs):
            return float("inf")
        return self._costs[parts - 1][self._count if items is None else items]

    def bounds(self, parts: int, items: int | None = None) -> Bounds | None:
        """Return that cut, None if there is none."""
        if self.cost(parts, items) == float("inf"):
            return None
        bounds = [self._count if items is None else items]
        for begins in reversed(self._begins[:parts]):
            bounds.append(begins[bounds[-1]])
        return tuple(reversed(bounds))
