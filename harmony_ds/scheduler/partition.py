"""Ways to cut a row of items into contiguous parts. Knows neither layers nor memory.

What enters: a number of items, and what a part costs. What leaves: bounds, a tuple (0, ..., count) in which part i is
the items bounds[i] to bounds[i + 1] - 1. Every part has at least one item.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

Bounds = tuple[int, ...]


def uniform_bounds(count: int, size: int) -> Bounds:
    """Parts of `size` items counted from the last one, so that only the first may be smaller.

    The last pack is swapped in once instead of twice: it is the one that should be full.
    """
    return tuple(sorted({0, *range(count, 0, -size)}))


class BestCuts:
    """The cuts into 1, 2, ... parts whose dearest part is cheapest: one dynamic program answers for every number of parts.

    A part costs the sum of its items' `values`. With best(k, j) the cost of the dearest of k parts of the first j items:

        best(k, j) = min over i < j of max(best(k - 1, i), cost(i, j))

    Among equally good cuts it takes the one whose last part is longest, then the last but one, and so on.
    """

    def __init__(self, values: Sequence[float]) -> None:
        before = np.array([0, *accumulate(values)], dtype=np.float64)
        costs = before[None, :] - before[:, None]
        costs[np.tril_indices_from(costs)] = np.inf
        best = np.full(len(before), np.inf)
        best[0] = -np.inf
        self._begins: list[list[int]] = []  # for each number of parts and of items, where the last part begins
        for _ in values:
            joined = np.maximum(best[:, None], costs)
            begins = joined.argmin(axis=0)
            best = np.take_along_axis(joined, begins[None, :], axis=0)[0]
            self._begins.append(begins.tolist())

    def bounds(self, parts: int, count: int | None = None) -> Bounds:
        """Return the best cut of the first `count` items (None: of all) into `parts`: one to `count`."""
        bounds = [len(self._begins) if count is None else count]
        for begins in reversed(self._begins[:parts]):
            bounds.append(begins[bounds[-1]])
        return tuple(reversed(bounds))
