"""A search in the original's manner, and profiles drawn at random around a published one.

For every size of micro-batch, each pass is cut by each of the original's methods into the fewest packs that fit: greedily
from either end, balanced by time or by memory. The forward pass may also take the packs of the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random

from benchmarks.vldb22.cost_model.jobs import HARMONY_VLDB22, step_ms
from benchmarks.vldb22.cost_model.profile import LayerProfile, PackCosts, PassCosts
from benchmarks.vldb22.cost_model.schedule import Mode, Schedule, Setup
from harmony_ds.scheduler.partition import Bounds


def drawn_around(profile: LayerProfile, seed: int, share: float = 0.3) -> LayerProfile:
    """Return a profile whose layers take and hold up to `share` more or less, each for itself."""
    draw = Random(seed)
    count = len(profile.layers)
    times = [draw.uniform(1 - share, 1 + share) for _ in range(count)]
    sizes = [draw.uniform(1 - share, 1 + share) for _ in range(count)]

    def scaled(passes: PassCosts) -> PassCosts:
        times_ms = tuple(tuple(ms * by for ms, by in zip(row, times, strict=True)) for row in passes.times_ms)
        peaks = tuple(tuple(int(n * by) for n, by in zip(row, sizes, strict=True)) for row in passes.peaks_bytes)
        return PassCosts(passes.sizes, times_ms, peaks)

    layers = tuple(
        replace(layer, weight_bytes=4 * int(layer.weight_bytes * by / 4), update_ms=layer.update_ms * by)
        for layer, by in zip(profile.layers, sizes, strict=True)
    )
    return LayerProfile(layers, scaled(profile.forward), scaled(profile.backward))


def fastest(costs: PackCosts, setup: Setup, cap_bytes: int, sizes: tuple[int, ...]) -> tuple[float, Schedule]:
    """Return the fastest schedule of the search, and its ms."""
    times = {}
    for size in sizes:
        if size > setup.share // (setup.devices if setup.mode is Mode.PIPELINE else 1) or setup.share % size:
            continue
        for schedule in _schedules(costs, cap_bytes, size):
            times[schedule] = step_ms(setup, schedule, costs, HARMONY_VLDB22, overlap=True)
    best = min(times, key=times.__getitem__)
    return times[best], best


def _schedules(costs: PackCosts, cap_bytes: int, size: int) -> Iterator[Schedule]:
    for backward in _cuts(costs, True, size, costs.count, cap_bytes):
        yield Schedule(size, backward[:-1], size, backward)
        for forward in _cuts(costs, False, size, backward[-2], cap_bytes):
            yield Schedule(size, forward, size, backward)


def _cuts(costs: PackCosts, backward: bool, size: int, count: int, cap_bytes: int) -> Iterator[Bounds]:
    """Yield the cuts of the first `count` layers that fit."""
    if count == 0:
        return

    def fits(first: int, last: int) -> bool:
        return costs.memory_bytes(backward, size, first, last) <= cap_bytes

    if not all(fits(layer, layer + 1) for layer in range(count)):
        return
    yield _greedy(count, fits)
    yield tuple(count - bound for bound in reversed(_greedy(count, lambda a, b: fits(count - b, count - a))))

    def time(first: int, last: int) -> float:
        return (costs.backward_ms if backward else costs.forward_ms)(size, first, last)

    def memory(first: int, last: int) -> float:
        return costs.memory_bytes(backward, size, first, last)

    for value in (time, memory):
        for packs in range(1, count + 1):
            bounds = _balanced(count, packs, value)
            if all(fits(*pack) for pack in pairwise(bounds)):
                yield bounds
                break


def _greedy(count: int, fits) -> Bounds:  # type: ignore[no-untyped-def]
    bounds = [0]
    for layer in range(1, count):
        if not fits(bounds[-1], layer + 1):
            bounds.append(layer)
    return (*bounds, count)


def _balanced(count: int, packs: int, value) -> Bounds:  # type: ignore[no-untyped-def]
    """Every pack ends where it has the share of what is left."""
    bounds = [0]
    for left in range(packs, 1, -1):
        share = value(bounds[-1], count) / left
        last = bounds[-1] + 1
        while last < count - left + 1 and value(bounds[-1], last) < share:
            last += 1
        bounds.append(last)
    return (*bounds, count)
