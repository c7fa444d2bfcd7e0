"""Pairs of a backward and a forward packing, the most promising first, for one number of devices at work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from benchmarks.vldb22.planner.candidates import Packings, spread
from benchmarks.vldb22.planner.cuts import fits_all
from benchmarks.vldb22.planner.graph import Schedule
from benchmarks.vldb22.planner.loads import Loads, PassLoad, PassLoads
from benchmarks.vldb22.planner.profile import PackCosts
from harmony_ds.scheduler.partition import Bounds


@dataclass(frozen=True, slots=True)
class Half:
    """A packing of one pass.

    Attributes:
        promise_ms: about what a step takes with the best other half.
    """

    micro_batch: int
    bounds: Bounds
    load: PassLoad
    promise_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Pair:
    """A schedule.

    Attributes:
        bound_ms: the least that it takes.
        rank: how many with the same backward packing and forward size have a lower bound.
    """

    schedule: Schedule
    bound_ms: float
    rank: int


@dataclass(frozen=True, slots=True)
class Space:
    """What may be chosen.

    Attributes:
        forward_sizes, backward_sizes: micro-batch sizes, ascending.
        cap_bytes: memory of a pack.
        fewest_packs, most_packs: of both passes together.
    """

    forward_sizes: tuple[int, ...]
    backward_sizes: tuple[int, ...]
    cap_bytes: int
    fewest_packs: int
    most_packs: int


@dataclass(frozen=True, slots=True)
class _Family:
    """Forward packings of the same layers at the same micro-batch size."""

    halves: list[Half]
    loads: PassLoads


class Pairs:
    """Everything in a space."""

    def __init__(self, space: Space, costs: PackCosts, loads: Loads) -> None:
        self._space = space
        self._costs = costs
        self._loads = loads
        self._packings = cache(self._make_packings)
        self._forward = cache(self._make_forward)
        self._least_ms = cache(self._find_least_ms)

    def backward(self, size: int) -> list[Half]:
        """The packings of the backward pass at one micro-batch size, the most promising first."""
        halves = []
        for bounds in self._cuts(True, size, self._costs.count, self._space.most_packs):
            load = self._loads.of(True, size, bounds)
            halves.append(Half(size, bounds, load, self._promise_ms(size, bounds, load)))
        return sorted(halves, key=lambda half: half.promise_ms)

    def published(self, below_ms: float) -> Iterator[Pair]:
        """The original's schedules, by its cuts of either pass, that may take less than `below_ms`."""
        for size in self._space.backward_sizes:
            for bounds in self._packings(True, size).published(self._costs.count):
                half = Half(size, bounds, self._loads.of(True, size, bounds))
                for other in (one for one in self._space.forward_sizes if one >= size and bounds[-2]):
                    family = self._family(other, self._packings(False, other).published(bounds[-2]))
                    for one in (family, self._reused(half, other)):
                        yield from self._joined(half, one, below_ms, 4)

    def with_backward(self, half: Half, below_ms: float, keep: int) -> list[Pair]:
        """Pairs with this backward packing: of each forward size the `keep` of lowest bound, if below `below_ms`."""
        if half.bounds[-2] == 0:
            pairs = [self._alone(half)] if len(half.bounds) - 1 >= self._space.fewest_packs else []
            return [pair for pair in pairs if pair.bound_ms < below_ms]
        pairs = []
        for size in self._space.forward_sizes:
            if size >= half.micro_batch:
                pairs += self._of_size(half, size, below_ms, keep)
        return pairs

    def _alone(self, half: Half) -> Pair:
        schedule = Schedule(half.micro_batch, (0,), half.micro_batch, half.bounds)
        return Pair(schedule, self._loads.bound_ms(half.load), 0)

    def _of_size(self, half: Half, size: int, below_ms: float, keep: int) -> list[Pair]:
        reused, family = self._reused(half, size), self._forward(size, half.bounds[-2])
        return [*self._joined(half, reused, below_ms, 1), *self._joined(half, family, below_ms, keep)]

    def _joined(self, half: Half, family: _Family | None, below_ms: float, keep: int) -> Iterator[Pair]:
        """`half` with those of `family` that have the lowest bounds."""
        if family is None:
            return
        tasks = len(half.bounds) - 1 + family.loads.tasks
        bounds_ms = self._loads.bounds_ms(family.loads, half.load)
        bounds_ms[(tasks < self._space.fewest_packs) | (tasks > self._space.most_packs)] = np.inf
        for rank, place in enumerate(bounds_ms.argsort(kind="stable")[:keep].tolist()):
            if bounds_ms[place] < below_ms:
                yield _pair(family.halves[place], half, float(bounds_ms[place]), rank)

    def _reused(self, half: Half, size: int) -> _Family | None:
        """The backward pass's own packs."""
        bounds = half.bounds[:-1]
        return self._family(size, [bounds]) if fits_all(bounds, self._packings(False, size).fits) else None

    def _make_forward(self, size: int, layers: int) -> _Family | None:
        return self._family(size, self._cuts(False, size, layers, self._space.most_packs))

    def _family(self, size: int, cuts: Iterable[Bounds]) -> _Family | None:
        halves = [Half(size, bounds, self._loads.of(False, size, bounds)) for bounds in cuts]
        return _Family(halves, PassLoads.of([half.load for half in halves])) if halves else None

    def _cuts(self, backward: bool, size: int, layers: int, most: int) -> Iterator[Bounds]:
        """Each cut once."""
        packings, seen, most = self._packings(backward, size), set(), min(layers, most)
        for bounds in (
            *(cut for parts in spread(most) for cut in packings.of_number(parts, layers)),
            *packings.any_number(layers),
        ):
            if bounds not in seen and len(bounds) - 1 <= most:
                seen.add(bounds)
                yield bounds

    def _make_packings(self, backward: bool, size: int) -> Packings:
        most = min(self._costs.count, self._space.most_packs)
        return Packings(self._costs, self._loads, backward, size, self._space.cap_bytes, most)

    def _promise_ms(self, size: int, bounds: Bounds, load: PassLoad) -> float:
        """An equal share for each device, with the least that a forward pass can add."""
        busy_ms = load.busy_ms[0]
        sizes = [one for one in self._space.forward_sizes if one >= size]
        added_ms = min((self._least_ms(one, bounds[-2]) for one in sizes), default=float("inf")) if bounds[-2] else 0.0
        return max(float(busy_ms.max()), (float(busy_ms.sum()) + added_ms) / len(busy_ms), load.first_ms)

    def _find_least_ms(self, size: int, layers: int) -> float:
        packings = self._packings(False, size)
        return min(packings.least_ms(parts, layers) for parts in range(1, min(layers, self._space.most_packs) + 1))


def _pair(forward: Half, backward: Half, bound_ms: float, rank: int) -> Pair:
    schedule = Schedule(forward.micro_batch, forward.bounds, backward.micro_batch, backward.bounds)
    return Pair(schedule, bound_ms, rank)
