"""Ways to cut a row of items into contiguous parts. Knows neither layers nor memory.

What enters: a number of items, what a part costs, and which parts are allowed. What leaves: bounds, a tuple
(0, ..., count) in which part i is the items bounds[i] to bounds[i + 1] - 1; None where no cut is allowed. Every part
has at least one item.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import accumulate, pairwise

import numpy as np

Bounds = tuple[int, ...]
PartCost = Callable[[int, int], float]
"""What the items from the first number to before the second cost as one part."""
Fits = Callable[[int, int], bool]
"""Whether the items from the first number to before the second may be one part."""


class Combine(Enum):
    """What a cut costs: the costs of its parts added up, or the largest of them."""

    SUM = "sum"
    MAX = "max"


def sum_of(values: Sequence[float]) -> PartCost:
    """A part costs the sum of its values."""
    before = (0, *accumulate(values))
    return lambda first, last: before[last] - before[first]


def sum_and_input(values: Sequence[float], inputs: Sequence[float]) -> PartCost:
    """A part costs the sum of its values, each without the item's own input, and the input of its first item.

    The memory of a pack in Harmony (VLDB'22; `_addx` in its code): a layer's input is its predecessor's output, so
    within a pack it is counted already.
    """
    without_input = sum_of([value - own for value, own in zip(values, inputs, strict=True)])
    return lambda first, last: without_input(first, last) + inputs[first]


def within(cost: PartCost, cap: float) -> Fits:
    """Parts that cost at most `cap`."""
    return lambda first, last: cost(first, last) <= cap


def fits_all(bounds: Bounds, fits: Fits) -> bool:
    """Whether every part between `bounds` is allowed."""
    return all(fits(first, last) for first, last in pairwise(bounds))


def constant(count: int, size: int) -> Bounds:
    """Parts of `size` items counted from the last one; the first may be smaller."""
    return tuple(sorted({0, *range(count, 0, -size)}))


def greedy(count: int, fits: Fits) -> Bounds | None:
    """Each part takes items while it fits; the last may be small."""
    bounds = [0]
    for last in range(1, count + 1):
        if not fits(bounds[-1], last):
            bounds.append(last - 1)
            if bounds[-2] == bounds[-1] or not fits(last - 1, last):
                return None
    return (*bounds, count)


def greedy_reverse(count: int, fits: Fits) -> Bounds | None:
    """Each part, beginning with the last, takes items before it while it fits; the first may be small."""
    mirrored = greedy(count, lambda first, last: fits(count - last, count - first))
    return None if mirrored is None else tuple(count - bound for bound in reversed(mirrored))


def balanced(values: Sequence[float], parts: int) -> Bounds:
    """Parts of near-equal sums: part i ends where the running sum is nearest to i / parts of the whole.

    For equal memory the values are bytes, for equal time seconds; none is negative.

    Raises:
        ValueError: fewer items than parts.
    """
    count = len(values)
    if not 0 < parts <= count:
        raise ValueError(f"{count} items cannot be cut into {parts} parts")
    before = (0, *accumulate(values))
    bounds = [0]
    for part in range(1, parts):
        goal = before[-1] * part / parts
        right = bisect_left(before, goal)
        nearest = right - 1 if right and goal - before[right - 1] <= before[right] - goal else right
        # The parts before and behind have an item each.
        bounds.append(min(max(nearest, bounds[-1] + 1), count - (parts - part)))
    return (*bounds, count)


def minimise_bottleneck(values: Sequence[float], parts: int, fits: Fits | None = None) -> Bounds | None:
    """The cut into `parts` whose largest sum is smallest."""
    return BestCuts(len(values), sum_of(values), Combine.MAX, parts, fits).bounds(parts)


def minimise_sum(count: int, parts: int, cost: PartCost, fits: Fits | None = None) -> Bounds | None:
    """The cut into `parts` whose costs add up to least."""
    return BestCuts(count, cost, Combine.SUM, parts, fits).bounds(parts)


class BestCuts:
    """The cheapest cuts into 1, 2, ... parts: one dynamic program answers for every number of parts.

    With best(k, j) the cost of the first j items in k parts:

        best(k, j) = min over i < j of combine(best(k - 1, i), cost(i, j))

    Among equally cheap cuts it takes the one whose last part is longest, then the last but one, and so on.

    Args:
        count: items.
        cost: of a part; infinite where it is not allowed. It is asked once for each pair.
        combine: the parts' costs to the cut's.
        most_parts: the largest number of parts to be asked for (None: as many as there are items).
        fits: which parts are allowed (None: all).
    """

    def __init__(
        self, count: int, cost: PartCost, combine: Combine, most_parts: int | None = None, fits: Fits | None = None
    ) -> None:
        costs = np.full((count + 1, count + 1), np.inf)
        for first in range(count):
            for last in range(first + 1, count + 1):
                if fits is None or fits(first, last):
                    costs[first, last] = cost(first, last)
        join = np.add if combine is Combine.SUM else np.maximum
        best = np.full(count + 1, np.inf)
        best[0] = 0.0 if combine is Combine.SUM else -np.inf
        self._count = count
        self._costs: list[list[float]] = []  # for each number of parts and of items
        self._begins: list[list[int]] = []  # and where the last part begins then
        for _ in range(count if most_parts is None else min(most_parts, count)):
            joined = join(best[:, None], costs)
            begins = joined.argmin(axis=0)
            best = np.take_along_axis(joined, begins[None, :], axis=0)[0]
            self._costs.append(best.tolist())
            self._begins.append(begins.tolist())

    def cost(self, parts: int, items: int | None = None) -> float:
        """Of the cheapest cut of the first `items` (None: of all) into `parts`; infinite if there is none."""
        if not 0 < parts <= len(self._costs):
            return float("inf")
        return self._costs[parts - 1][self._count if items is None else items]

    def bounds(self, parts: int, items: int | None = None) -> Bounds | None:
        """That cut, None if there is none."""
        if self.cost(parts, items) == float("inf"):
            return None
        bounds = [self._count if items is None else items]
        for begins in reversed(self._begins[:parts]):
            bounds.append(begins[bounds[-1]])
        return tuple(reversed(bounds))
