"""Small changes of where the passes are cut: a cut moves by one call, goes, or comes.

What is done with the packs goes with them: it is kept by the positions of calls, not by numbers of packs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from harmony_ds.scheduler.partition import Bounds
from harmony_ds.scheduler.plan import Packing, Policy
from harmony_ds.scheduler.resident import closed


@dataclass(frozen=True, slots=True)
class Point:
    """What a search decides, by positions of calls.

    Attributes:
        backward, forward: bounds of the packs of both passes; the forward ones end where the fused pack begins.
        away: the stash of calls before this one waits on the host.
        kept, resident: where packs begin.
    """

    backward: Bounds
    forward: Bounds
    away: int
    kept: frozenset[int]
    resident: frozenset[int]
    prefetch: bool

    @staticmethod
    def of(packing: Packing, policy: Policy) -> Point:
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
        )

    def policy_for(self, packing: Packing, base: Policy) -> Policy:
        """The policy for its packs, without what cannot be: a kept pack that only one pass has, half of a tied pair."""
        packs = packing.packs
        begins = {packs[index].positions[0]: index for index in packing.backward}
        resident = closed(packing, [begins[p] for p in sorted(self.resident) if p in begins])
        both = {*packing.forward} & {index for index in packing.backward if packs[index].needs_backward}
        kept = sorted(both.intersection(begins[p] for p in self.kept if p in begins).difference(resident))
        return replace(
            base,
            stash_on_host=sum(bound <= self.away for bound in self.forward[1:]),
            kept=tuple(kept),
            resident=resident,
            prefetch=self.prefetch,
        )


def neighbours(point: Point) -> Iterator[Point]:
    """Every point with other cuts that is one change away."""
    yield from _other_cuts(point)
    yield from _other_forward_cuts(point)


def _other_cuts(point: Point) -> Iterator[Point]:
    """A cut of both passes that is moved, that is gone, that is new."""
    bounds = point.backward
    for before, cut, behind in zip(bounds, bounds[1:], bounds[2:], strict=False):
        for moved in (cut - 1, cut + 1):
            if before < moved < behind:
                yield _recut(point, cut, moved)
        yield _recut(point, cut, None)
    for first, last in pairwise(bounds):
        for cut in sorted({first + 1, (first + last) // 2, last - 1}):
            if first < cut < last:
                yield _recut(point, None, cut)


def _other_forward_cuts(point: Point) -> Iterator[Point]:
    """A cut of the forward pass alone: gone, or new where the backward pass has one; moved by one call."""
    for cut in point.backward[1:-2]:
        inner = {*point.forward} ^ {cut}
        yield replace(point, forward=tuple(sorted(inner)))
    bounds = point.forward
    for before, cut, behind in zip(bounds, bounds[1:], bounds[2:], strict=False):
        for moved in (cut - 1, cut + 1):
            if before < moved < behind:
                yield replace(point, forward=tuple(sorted({*bounds} - {cut} | {moved})))


def _recut(point: Point, old: int | None, new: int | None) -> Point:
    """The point with another cut in the place of an old one, in both passes where both have it."""

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
