"""Which packs can stay on the device: from forward to backward, and from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.plan import Packing


def may_stay(request: PlanRequest) -> bool:
    """Whether the search decides which packs are kept, and perhaps which are resident."""
    return request.settings.residency in ("auto", "kept") and request.budget_bytes is not None


def resident_packs(packing: Packing, count: int | None) -> tuple[int, ...]:
    """Return the last `count` packs of the backward pass (None: none), without those that cannot be resident.

    A parameter has one place: a pack is not resident if it shares one with a pack that is not.
    """
    return closed(packing, packing.backward[-count:] if count else ())


def closed(packing: Packing, wanted: Sequence[int]) -> tuple[int, ...]:
    """Return the packs of `wanted` that share no parameter with a pack that is not resident."""
    if not wanted:
        return ()
    having, wanted = holders(packing), list(wanted)
    while True:
        kept = [index for index in wanted if having[index].issubset(wanted)]
        if kept == wanted:
            return tuple(wanted)
        wanted = kept


@lru_cache(maxsize=1)  # a search asks several times about one packing after the other
def holders(packing: Packing) -> dict[int, set[int]]:
    """By pack: the packs that have one of its parameters."""
    packs_of: dict[str, set[int]] = {}
    for pack in packing.packs:
        for name in pack.parameters:
            packs_of.setdefault(name, set()).add(pack.index)
    return {pack.index: set().union(*(packs_of[name] for name in pack.parameters)) for pack in packing.packs}


def why_not_resident(packing: Packing, count: int | None) -> list[str]:
    """Return a line for each of the last `count` packs that `resident_packs` leaves out."""
    packs, having, resident = packing.packs, holders(packing), resident_packs(packing, count)
    lines = []
    for index in packing.backward[-count:] if count else ():
        if index not in resident:
            other = min(having[index].difference(resident, [index]))
            name = next(name for name in packs[index].parameters if name in packs[other].parameters)
            lines.append(f"pack {index} is not resident: it shares {name} with pack {other}, which is not")
    return lines
