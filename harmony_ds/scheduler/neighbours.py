"""Small changes of a plan: a cut moves by one call, goes, or comes; a pack stays or no longer does; the stash of one more
pack waits on the host.

What is done with the packs goes with them: it is kept by the positions of calls, not by numbers of packs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from harmony_ds.scheduler.candidates import both_ways, prefetch_choices
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.partition import Bounds
from harmony_ds.scheduler.plan import Packing, Policy
from harmony_ds.scheduler.resident import closed, holders, may_stay

_FEW = 8
"""Of so many packs at most, two are changed at once."""
_MANY = 8
"""Of so many packs that stay at most, each in turn has its graphs kept before the others'."""


@dataclass(frozen=True, slots=True)
class Point:
    """The decisions of a search, by positions of calls.

    Attributes:
        backward, forward: bounds of the packs of both passes; the forward ones end where the fused pack begins.
        away: the stash of calls before this one waits on the host.
        kept, resident: where packs begin.
        graphs: where the pack begins whose graphs are kept before those of others (None: of the one they save most for).
    """

    backward: Bounds
    forward: Bounds
    away: int
    kept: frozenset[int]
    resident: frozenset[int]
    prefetch: bool
    graphs: int | None = None

    @staticmethod
    def of(packing: Packing, policy: Policy, graphs: int | None = None) -> Point:
        packs = packing.packs
        begins = {index: packs[index].positions[0] for index in packing.backward}
        forward = (0, *(packs[index].positions[-1] + 1 for index in packing.forward))
        return Point(
            backward=(*begins.values(), packing.fused.positions[-1] + 1),
            forward=forward,
            away=forward[min(policy.stash_on_host, len(packing.forward))],
            kept=frozenset(begins[index] for index in policy.kept),
            resident=frozenset(begins[index] for index in policy.resident),
            prefetch=policy.prefetch,
            graphs=graphs,
        )

    def policy_for(self, packing: Packing, base: Policy) -> Policy:
        """Return the policy for its packs, without kept packs that only one pass has, and without halves of tied pairs."""
        begins = {packing.packs[index].positions[0]: index for index in packing.backward}
        resident = closed(packing, [begins[p] for p in sorted(self.resident) if p in begins])
        kept = both_ways(packing).intersection(begins[p] for p in self.kept if p in begins).difference(resident)
        return replace(
            base,
            stash_on_host=sum(bound <= self.away for bound in self.forward[1:]),
            kept=tuple(sorted(kept)),
            resident=resident,
            prefetch=self.prefetch,
        )


def recut(point: Point, pipeline: int) -> Iterator[Point]:
    """Every point with other cuts that is one change away."""
    yield from _other_cuts(point)
    if pipeline == 1:
        yield from _other_forward_cuts(point)


def reused(point: Point, packing: Packing, request: PlanRequest) -> Iterator[Point]:
    """Every point with the same cuts that uses memory otherwise, in one way; in two, where packs are few."""
    single = dict.fromkeys(_reused(point, packing, request))
    yield from single
    if len(packing.backward) <= _FEW:
        for one in single:
            yield from (two for two in _reused(one, packing, request) if two != point)


def _reused(point: Point, packing: Packing, request: PlanRequest) -> Iterator[Point]:
    """Yield points with swaps issued early or not, more or less stash on the host, a pack more or less, other graphs."""
    for early in prefetch_choices(request):
        if early != point.prefetch:
            yield replace(point, prefetch=early)
    if request.settings.stash == "auto":
        most = len(point.forward) - 1
        place = sum(bound <= point.away for bound in point.forward[1:])
        for other in sorted({place - 1, place + 1, place // 2, (place + most + 1) // 2} - {place}):
            if 0 <= other <= most:
                yield replace(point, away=point.forward[other])
    if may_stay(request):
        yield from _restated(point, packing, request)
    stays = sorted(point.kept | point.resident)
    for begin in (None, *stays) if request.settings.keep_graphs and len(stays) <= _MANY else ():
        if begin != point.graphs:
            yield replace(point, graphs=begin)


def _restated(point: Point, packing: Packing, request: PlanRequest) -> Iterator[Point]:
    """Yield points with one pack (and those that share a parameter with it) kept, resident, or swapped."""
    begin_of = {index: packing.packs[index].positions[0] for index in packing.backward}
    able = both_ways(packing)
    auto = request.settings.residency == "auto"
    having = holders(packing) if auto else {}
    whole = {*closed(packing, packing.backward)} if auto else set()
    for index, begin in begin_of.items():
        if begin in point.kept | point.resident:
            yield replace(point, kept=point.kept - {begin}, resident=point.resident - {begin})
        if index in able and begin not in point.kept:
            yield replace(point, kept=point.kept | {begin}, resident=point.resident - {begin})
        if index in whole and begin not in point.resident:
            more = {begin_of[other] for other in having[index] | {index} if other in begin_of}
            yield replace(point, kept=point.kept - more, resident=point.resident | more)


def _other_cuts(point: Point) -> Iterator[Point]:
    """Yield points with a cut of both passes moved, removed, or added."""
    bounds = point.backward
    for before, cut, following in zip(bounds, bounds[1:], bounds[2:], strict=False):
        for moved in _moved(before, cut, following):
            yield _recut(point, cut, moved)
        yield _recut(point, cut, None)
    for first, last in pairwise(bounds):
        for cut in sorted({first + 1, (first + last) // 2, last - 1}):
            if first < cut < last:
                yield _recut(point, None, cut)


def _moved(before: int, cut: int, following: int) -> list[int]:
    """Return other places for a cut: a call away, and, of large packs, a quarter of the pack."""
    places = {cut - 1, cut + 1, cut - (cut - before) // 4, cut + (following - cut) // 4} - {cut}
    return [place for place in sorted(places) if before < place < following]


def _other_forward_cuts(point: Point) -> Iterator[Point]:
    """Yield points with a cut of the forward pass removed, added where the backward pass has one, or moved by a call."""
    for cut in point.backward[1:-2]:
        inner = {*point.forward} ^ {cut}
        yield replace(point, forward=tuple(sorted(inner)))
    bounds = point.forward
    for before, cut, following in zip(bounds, bounds[1:], bounds[2:], strict=False):
        for moved in _moved(before, cut, following):
            yield replace(point, forward=tuple(sorted({*bounds} - {cut} | {moved})))


def _recut(point: Point, old: int | None, new: int | None) -> Point:
    """Return the point with another cut in the place of an old one, in both passes where both have it."""

    def moved(begins: frozenset[int]) -> frozenset[int]:
        if new is None:
            return begins - {old}
        if old is None:  # both halves stay as the whole did
            return begins | {new} if max(b for b in point.backward if b < new) in begins else begins
        return begins - {old} | {new} if old in begins else begins

    inner = {bound for bound in point.backward if bound != old}
    backward = tuple(sorted(inner if new is None else inner | {new}))
    end = backward[-2]
    forward = {*point.forward} - {old}
    if new is not None and (old is None or old in point.forward):
        forward.add(new)
    forward = {bound for bound in forward if bound < end} | {end}
    away = new if point.away == old and new is not None else point.away
    return replace(
        point,
        backward=backward,
        forward=tuple(sorted(forward)),
        away=end if point.away == point.forward[-1] > 0 else away,
        kept=moved(point.kept),
        resident=moved(point.resident),
    )
