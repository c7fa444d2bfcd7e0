"""The original's ways to cut a row of layers into packs. What is no cut that fits is None.

Cuts are bounds as in `harmony_ds.scheduler.partition`, whose dynamic program finds the best ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from harmony_ds.scheduler.partition import Bounds

PartCost = Callable[[int, int], float]
"""What the items from the first number to before the second cost as one part."""
Fits = Callable[[int, int], bool]
"""Whether the items from the first number to before the second may be one part."""


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
