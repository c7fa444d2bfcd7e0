"""Small changes of a candidate: a cut is moved by one call, removed or added; a pack stays on the device or no longer does;
the stash of one more pack waits on the host.

A `Point` says what is done with packs by the positions of calls, not by the numbers of packs, so that it still holds for
the other packs when a cut changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from harmony_ds.scheduler.candidates import packs_in_both_passes, prefetch_choices
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.partition import Bounds
from harmony_ds.scheduler.plan import Packing, Policy
from harmony_ds.scheduler.resident import may_stay, tied_closure, tied_packs

_FEW = 8
"""With at most this many packs, two changes are made at once, too."""
_MANY = 8
"""With at most this many packs that stay, each in turn is the one whose graphs are kept before the others'."""


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate of the search: everything that the search decides, by positions of calls.

    Attributes:
        backward, forward: bounds of the packs of both passes; the forward ones end where the fused pack begins.
        first_device_stash: the first call whose stash stays on the device; the stash of calls before it waits on the host.
        kept, resident: where packs begin.
        graphs: where the pack begins whose graphs are kept before those of others (None: of the one they save most for).
    """

    backward: Bounds
    forward: Bounds
    first_device_stash: int
    kept: frozenset[int]
    resident: frozenset[int]
    prefetch: bool
    graphs: int | None = None

    @staticmethod
    def from_policy(packing: Packing, policy: Policy, graphs: int | None = None) -> Point:
        packs = packing.packs
        begins = {index: packs[index].positions[0] for index in packing.backward}
        forward = (0, *(packs[index].positions[-1] + 1 for index in packing.forward))
        return Point(
            backward=(*begins.values(), packing.fused.positions[-1] + 1),
            forward=forward,
            first_device_stash=forward[min(policy.stash_on_host, len(packing.forward))],
            kept=frozenset(begins[index] for index in policy.kept),
            resident=frozenset(begins[index] for index in policy.resident),
            prefetch=policy.prefetch,
            graphs=graphs,
        )

    def to_policy(self, packing: Packing, base: Policy) -> Policy:
        """Return the policy of this point for its packs.

        Without kept packs that only one pass has, and without resident packs that share a parameter with one that is not.
        """
        begins = {packing.packs[index].positions[0]: index for index in packing.backward}
        resident = tied_closure(packing, [begins[p] for p in sorted(self.resident) if p in begins])
        kept = (
            packs_in_both_passes(packing).intersection(begins[p] for p in self.kept if p in begins).difference(resident)
        )
        return replace(
            base,
            stash_on_host=sum(bound <= self.first_device_stash for bound in self.forward[1:]),
            kept=tuple(sorted(kept)),
            resident=resident,
            prefetch=self.prefetch,
        )


def neighbours_by_cuts(point: Point, pipeline: int) -> Iterator[Point]:
    """Yield every point that has one cut moved, removed or added."""
    yield from _other_cuts(point)
    if pipeline == 1:
        yield from _other_forward_cuts(point)


def neighbours_by_memory(point: Point, packing: Packing, request: PlanRequest) -> Iterator[Point]:
    """Yield every point that has the same cuts and one other use of memory; where packs are few, also those with two."""
    nearest = dict.fromkeys(_one_use_changed(point, packing, request))
    yield from nearest
    if len(packing.backward) <= _FEW:
        for near in nearest:
            for further in _one_use_changed(near, packing, request):
                if further != point:
                    yield further


def _one_use_changed(point: Point, packing: Packing, request: PlanRequest) -> Iterator[Point]:
    """Yield points with swaps issued early or not, more or less stash on the host, a pack more or less, other graphs."""
    for early in prefetch_choices(request):
        if early != point.prefetch:
            yield replace(point, prefetch=early)
    if request.settings.stash == "auto" and not request.policy.crossing_on_host:
        most = len(point.forward) - 1
        place = sum(bound <= point.first_device_stash for bound in point.forward[1:])
        for other in sorted({place - 1, place + 1, place // 2, (place + most + 1) // 2} - {place}):
            if 0 <= other <= most:
                yield replace(point, first_device_stash=point.forward[other])
    if may_stay(request):
        yield from _one_pack_changed(point, packing, request)
    stays = sorted(point.kept | point.resident)
    for begin in (None, *stays) if request.settings.keep_graphs and len(stays) <= _MANY else ():
        if begin != point.graphs:
            yield replace(point, graphs=begin)


def _one_pack_changed(point: Point, packing: Packing, request: PlanRequest) -> Iterator[Point]:
    """Yield points with one pack (and those that share a parameter with it) kept, resident, or swapped."""
    begin_of = {index: packing.packs[index].positions[0] for index in packing.backward}
    able = packs_in_both_passes(packing)
    auto = request.settings.residency == "auto"
    tied = tied_packs(packing) if auto else {}
    whole = {*tied_closure(packing, packing.backward)} if auto else set()
    for index, begin in begin_of.items():
        if begin in point.kept | point.resident:
            yield replace(point, kept=point.kept - {begin}, resident=point.resident - {begin})
        if index in able and begin not in point.kept:
            yield replace(point, kept=point.kept | {begin}, resident=point.resident - {begin})
        if index in whole and begin not in point.resident:
            more = {begin_of[other] for other in tied[index] | {index} if other in begin_of}
            yield replace(point, kept=point.kept - more, resident=point.resident | more)


def _other_cuts(point: Point) -> Iterator[Point]:
    """Yield points with a cut of both passes moved, removed, or added."""
    bounds = point.backward
    for before, cut, following in zip(bounds, bounds[1:], bounds[2:], strict=False):
        for moved in _moved(before, cut, following):
            yield _replace_cut(point, cut, moved)
        yield _replace_cut(point, cut, None)
    for first, last in pairwise(bounds):
        for cut in sorted({first + 1, (first + last) // 2, last - 1}):
            if first < cut < last:
                yield _replace_cut(point, None, cut)


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


def _replace_cut(point: Point, old: int | None, new: int | None) -> Point:
    """Return the point with the cut `new` in place of the cut `old`, in both passes where both have it.

    Args:
        old: None: `new` is one more.
        new: None: `old` is removed.
    """
    inner = {bound for bound in point.backward if bound != old}
    backward = tuple(sorted(inner if new is None else inner | {new}))
    end = backward[-2]
    forward = {*point.forward} - {old}
    if new is not None and (old is None or old in point.forward):
        forward.add(new)
    forward = {bound for bound in forward if bound < end} | {end}
    first_device_stash = point.first_device_stash
    if first_device_stash == old and new is not None:
        first_device_stash = new
    if point.first_device_stash == point.forward[-1] > 0:  # all stash waits on the host, and still does
        first_device_stash = end
    return replace(
        point,
        backward=backward,
        forward=tuple(sorted(forward)),
        first_device_stash=first_device_stash,
        kept=_replace_begin(point.kept, old, new, point.backward),
        resident=_replace_begin(point.resident, old, new, point.backward),
    )


def _replace_begin(begins: frozenset[int], old: int | None, new: int | None, bounds: Bounds) -> frozenset[int]:
    """Return where packs of some kind begin when the cut `new` is in place of the cut `old` of packs between `bounds`."""
    if new is None:
        return begins - {old}
    if old is None:  # a pack becomes two: both halves are of that kind if the whole was
        whole = max(bound for bound in bounds if bound < new)
        return begins | {new} if whole in begins else begins
    return begins - {old} | {new} if old in begins else begins
