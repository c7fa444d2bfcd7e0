"""Packings of one pass that are worth a look: every feasible number of packs, cut in every way that has a name."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.vldb22.planner.cuts import allowed, balanced, fits_all, greedy, greedy_reverse, within
from benchmarks.vldb22.planner.loads import Loads
from benchmarks.vldb22.planner.profile import PackCosts
from harmony_ds.scheduler.partition import BestCuts, Bounds, Combine, uniform_bounds


class Packings:
    """Of one pass at one micro-batch size.

    Args:
        costs: of packs.
        loads: what packs keep devices from other packs for: what the best cuts minimise.
        backward: which pass.
        micro_batch: samples in one.
        cap_bytes: the memory that a pack may take.
    """

    def __init__(self, costs: PackCosts, loads: Loads, backward: bool, micro_batch: int, cap_bytes: int) -> None:
        self.micro_batch = micro_batch
        self.fits = within(costs.memory(backward, micro_batch), cap_bytes)
        pack_ms = allowed(loads.pack_ms(backward, micro_batch), self.fits)
        self._times_ms = costs.times_ms(backward, micro_batch)
        memory = costs.memory(backward, micro_batch)
        self._memory = [memory(layer, layer + 1) for layer in range(costs.count)]
        self._sum = BestCuts(costs.count, pack_ms, Combine.SUM)
        self._bottleneck = BestCuts(costs.count, pack_ms, Combine.MAX)

    def least_ms(self, parts: int, layers: int) -> float:
        """No cut of the first `layers` into `parts` keeps the devices busy for less, all together."""
        return self._sum.cost(parts, layers)

    def any_number(self, layers: int) -> Iterator[Bounds]:
        """Cuts of the first `layers` that determine their number of packs themselves."""
        for bounds in (greedy(layers, self.fits), greedy_reverse(layers, self.fits)):
            if bounds is not None:
                yield bounds
        for size in range(1, layers + 1):
            if not any(self.fits(first, first + size) for first in range(layers - size + 1)):
                return
            for last in range(1, layers + 1):
                if not self.fits(layers - last, layers):
                    break
                bounds = (*uniform_bounds(layers - last, size), layers)
                if fits_all(bounds, self.fits):
                    yield bounds

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
