"""Which packs can stay on the device from step to step."""

from __future__ import annotations

from functools import lru_cache

from harmony_ds.scheduler.plan import Packing


def resident_packs(packing: Packing, count: int | None, first: bool = False) -> tuple[int, ...]:
    """The last (or `first`) `count` packs of the backward pass (None: none), without those that cannot be resident.

    A parameter has one place: a pack is not resident if it shares one with a pack that is not.
    """
    wanted = list(packing.backward[:count] if first else packing.backward[-count:]) if count else []
    if not wanted:
        return ()
    holders = _holders(packing)
    while True:
        kept = [index for index in wanted if holders[index].issubset(wanted)]
        if kept == wanted:
            return tuple(wanted)
        wanted = kept


@lru_cache(maxsize=1)  # a search asks several times about one packing after the other
def _holders(packing: Packing) -> dict[int, set[int]]:
    """By pack: the packs that have one of its parameters."""
    packs_of: dict[str, set[int]] = {}
    for pack in packing.packs:
        for name in pack.parameters:
            packs_of.setdefault(name, set()).add(pack.index)
    return {pack.index: set().union(*(packs_of[name] for name in pack.parameters)) for pack in packing.packs}


def why_not_resident(packing: Packing, count: int | None) -> list[str]:
    """A line for each of the last `count` packs that `resident_packs` leaves out."""
    resident = resident_packs(packing, count)
    lines = []
    for index in packing.backward[-count:] if count else ():
        if index not in resident:
            name, other = sharing(packing, index, resident) or ("a parameter", "another one")
            lines.append(f"pack {index} is not resident: it shares {name} with pack {other}, which is not")
    return lines


def sharing(packing: Packing, index: int, resident: tuple[int, ...] | list[int]) -> tuple[str, int] | None:
    """A parameter of pack `index`, and a pack outside `resident` that has it too; None if there is none."""
    mine = packing.packs[index].parameters
    for other in packing.packs:
        if other.index != index and other.index not in resident:
            shared = next((name for name in mine if name in other.parameters), None)
            if shared is not None:
                return shared, other.index
    return None
