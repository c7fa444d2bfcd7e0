"""Which packs may stay on the device: kept from forward to backward, or resident from step to step."""

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
    return tied_closure(packing, packing.backward[-count:] if count else ())


def tied_closure(packing: Packing, wanted: Sequence[int]) -> tuple[int, ...]:
    """Return the packs of `wanted` that can be resident together: all packs that share a parameter with one of them are
    among them.
    """
    if not wanted:
        return ()
    tied, wanted = tied_packs(packing), list(wanted)
    while True:
        kept = [index for index in wanted if tied[index].issubset(wanted)]
        if kept == wanted:
            return tuple(wanted)
        wanted = kept


@lru_cache(maxsize=1)  # a search asks several times about one packing after the other
def tied_packs(packing: Packing) -> dict[int, set[int]]:
    """Return, by pack, the packs that have one of its parameters, itself among them."""
    packs_of: dict[str, set[int]] = {}
    for pack in packing.packs:
        for name in pack.parameters:
            packs_of.setdefault(name, set()).add(pack.index)
    return {pack.index: set().union(*(packs_of[name] for name in pack.parameters)) for pack in packing.packs}


def why_not_resident(packing: Packing, count: int | None) -> list[str]:
    """Return a line for each of the last `count` packs that `resident_packs` leaves out."""
    packs, tied, resident = packing.packs, tied_packs(packing), resident_packs(packing, count)
    lines = []
    for index in packing.backward[-count:] if count else ():
        if index not in resident:
            other = min(tied[index].difference(resident, [index]))
            name = next(name for name in packs[index].parameters if name in packs[other].parameters)
            lines.append(f"pack {index} is not resident: it shares {name} with pack {other}, which is not")
    return lines
