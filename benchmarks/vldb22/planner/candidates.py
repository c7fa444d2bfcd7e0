"""Packings of one pass that are worth a look: every feasible number of packs, cut in every way that has a name."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.vldb22.planner.cuts import balanced, fits_all, greedy, greedy_reverse, within
from benchmarks.vldb22.planner.loads import Loads
from benchmarks.vldb22.planner.profile import PackCosts
from harmony_ds.scheduler.partition import BestCuts, Bounds, Combine, uniform_bounds

DEEP = 128
"""Layers of a model in which not every number is tried."""


def spread(most: int, share: int = 8) -> list[int]:
    """Numbers from 1 to `most`: of a deep model's the larger ones lie apart, each by that `share` of the one before."""
    if most <= DEEP:
        return list(range(1, most + 1))
    numbers = [1]
    while numbers[-1] < most:
        numbers.append(min(most, numbers[-1] + max(1, numbers[-1] // share)))
    return numbers


class Packings:
    """Of one pass at one micro-batch size.

    Args:
        costs: of packs.
        loads: what packs keep devices from other packs for: what the best cuts minimise.
        backward: which pass.
        micro_batch: samples in one.
        cap_bytes: the memory that a pack may take.
        most: packs.
    """

    def __init__(
        self, costs: PackCosts, loads: Loads, backward: bool, micro_batch: int, cap_bytes: int, most: int
    ) -> None:
        self.micro_batch = micro_batch
        self.fits = within(costs.memory(backward, micro_batch), cap_bytes)
        fit = costs.all_memory(backward, micro_batch) <= cap_bytes
        pack_ms = np.where(fit, loads.pack_ms(backward, micro_batch), np.inf)
        self._times_ms = costs.times_ms(backward, micro_batch)
        memory = costs.memory(backward, micro_batch)
        self._memory = [memory(layer, layer + 1) for layer in range(costs.count)]
        self._sum = BestCuts(pack_ms, Combine.SUM, most)
        self._bottleneck = BestCuts(pack_ms, Combine.MAX, most)

    def least_ms(self, parts: int, layers: int) -> float:
        """No cut of the first `layers` into `parts` keeps the devices busy for less, all together."""
        return self._sum.cost(parts, layers)

    def any_number(self, layers: int) -> Iterator[Bounds]:
        """Cuts of the first `layers` that determine their number of packs themselves."""
        for bounds in (greedy(layers, self.fits), greedy_reverse(layers, self.fits)):
            if bounds is not None:
                yield bounds
        for size in spread(layers):
            if not any(self.fits(first, first + size) for first in range(layers - size + 1)):
                return
            for last in spread(layers, 4):
                if not self.fits(layers - last, layers):
                    break
                bounds = (*uniform_bounds(layers - last, size), layers)
                if fits_all(bounds, self.fits):
                    yield bounds

    def published(self, layers: int) -> Iterator[Bounds]:
        """The original's cuts: the first `layers` in as few packs as it finds, by each of its methods."""
        yield from (cut for cut in (greedy(layers, self.fits), greedy_reverse(layers, self.fits)) if cut is not None)
        for values in (self._times_ms, self._memory):
            cuts = (balanced(values[:layers], parts) for parts in range(1, layers + 1))
            fitting = next((cut for cut in cuts if fits_all(cut, self.fits)), None)
            if fitting is not None:
                yield fitting

    def of_number(self, parts: int, layers: int) -> Iterator[Bounds]:
        """Cuts of the first `layers` into `parts`, the most promising first."""
        for best in (self._bottleneck, self._sum):
            bounds = best.bounds(parts, layers)
            if bounds is None:
                return
            yield bounds
        for values in (self._times_ms, self._memory):
            cut = balanced(values[:layers], parts)
            if fits_all(cut, self.fits):
                yield cut
