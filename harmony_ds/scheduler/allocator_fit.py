"""Searches for the fastest plan that the device's caching allocator can serve without giving memory back in between.

What a plan has in use at once fits the budget; what the allocator has to reserve for it may not: some of its memory is in
pieces that serve no request. A part of the budget is left to these. How much is first guessed, and then known for the plan
that was found, whose allocations are replayed (`replay`): where the allocator would be short of room, the search goes on
with more of it left, and where it has much more than it needs, with less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from harmony_ds.device.allocator_room import SEGMENT_BYTES
from harmony_ds.errors import DoesNotFitError
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.plan import Plan
from harmony_ds.scheduler.replay import reserved_bytes, retries
from harmony_ds.scheduler.search import Choice

_SEARCHES = 3
"""At most so many searches."""
_GRAIN = 64
"""Part of the budget: the least by which what is left changes from one search to the next."""
_MOST_AT_ONCE = 8
"""And so many times that at most."""
_SAFETY = 256
"""Part of the budget that no replay uses: a step does not quite allocate what was measured."""
_LESS = 512
"""Where blocks fit by the way that they happen to lie, they have to fit with this part of the budget less, too."""
_MUCH = 16
"""Where more than this part of the budget is left, less is tried: a plan with more in use may be in fewer pieces."""
_AS_FAST = 1.01
"""Of the plans that one search finds, those that take so many times the time of the fastest may be taken for it."""

SearchWith = Callable[[PlanRequest], tuple[Choice, ...]]


@dataclass(frozen=True, slots=True)
class Fitting:
    """Plans, the first of which is to run, and the bytes of the budget that were left to the allocator's fragments."""

    choices: tuple[Choice, ...]
    fragment_bytes: int


def leaving(request: PlanRequest, nbytes: int) -> PlanRequest:
    """Return the request with so many bytes of its budget left free."""
    assert request.budget_bytes is not None
    return replace(
        request, budget_bytes=max(0, request.budget_bytes - nbytes), beside_bytes=request.beside_bytes + nbytes
    )


def is_replayed(request: PlanRequest, costs: CostTable) -> bool:
    """Return whether what such plans allocate is known: one device's, found by a thorough search."""
    return request.thorough and request.policy.pipeline == 1 and costs.allocations is not None


def search_fitting(
    search: SearchWith, request: PlanRequest, costs: CostTable, fragment_bytes: int, least_fraction: float = 1.0
) -> Fitting:
    """Return the fastest plans that `search` finds of which the first needs no retry of the allocator; if there is none,
    those that were found with the most room left.

    Args:
        request: for all of the budget.
        fragment_bytes: what is left of it for fragments in the first search.
        least_fraction: the tokens of the smallest micro-batches, as a fraction of those that were measured.

    Raises:
        DoesNotFitError: the first search finds nothing.
    """
    assert request.budget_bytes is not None
    grain = request.budget_bytes // _GRAIN
    limit_bytes = _limit_bytes(request)
    best: Fitting | None = None
    last: Fitting | None = None
    for _ in range(_SEARCHES):
        try:
            found = _fastest_replayed(search(leaving(request, fragment_bytes)), request, costs, least_fraction)
        except DoesNotFitError:
            if last is None:
                raise
            break
        place = next((place for place, choice in enumerate(found) if is_served(choice, request)), None)
        needed_bytes = found[place or 0].reserved_bytes
        assert needed_bytes is not None
        if place is None:
            if best is not None:
                break
            last = Fitting(found, fragment_bytes)
            fragment_bytes += min(max(grain, needed_bytes - limit_bytes), _MOST_AT_ONCE * grain)
            continue
        if best is None or found[place].prediction.step_ms < best.choices[0].prediction.step_ms:
            best = Fitting((found[place], *found[:place], *found[place + 1 :]), fragment_bytes)
        spare_bytes = limit_bytes - needed_bytes
        if fragment_bytes > request.budget_bytes // _MUCH:
            spare_bytes = max(spare_bytes, fragment_bytes // 4)
        if spare_bytes < grain or not fragment_bytes or last is not None:
            break
        fragment_bytes = max(0, fragment_bytes - spare_bytes)
    fitting = best or last
    assert fitting is not None
    return fitting


def replayed(choice: Choice, request: PlanRequest, costs: CostTable, least_fraction: float) -> Choice:
    """Return the choice with what the allocator has to reserve for its plan; `request`: for all of the budget."""
    return replace(choice, reserved_bytes=_needed_bytes(choice.plan, request, costs, least_fraction))


def is_served(choice: Choice, request: PlanRequest) -> bool:
    """Return whether the allocator can serve a choice that was replayed with all of the request's budget, and no retry."""
    return choice.reserved_bytes is not None and choice.reserved_bytes <= _limit_bytes(request)


def _needed_bytes(plan: Plan, request: PlanRequest, costs: CostTable, least_fraction: float) -> int:
    """Return what the allocator has to reserve for `plan`; the limit, if it needs no retry with no more than that.

    With less memory, blocks are put elsewhere, which is as well at times. Then it has to be so with a little less, too.
    """
    needed_bytes, limit_bytes = reserved_bytes(plan, costs, least_fraction), _limit_bytes(request)
    if needed_bytes <= limit_bytes or least_fraction < 1.0:
        return needed_bytes
    assert request.budget_bytes is not None
    pool_bytes = _pool_bytes(request)
    pools = pool_bytes, pool_bytes - request.budget_bytes // _LESS
    return needed_bytes if any(retries(plan, costs, pool) for pool in pools) else limit_bytes


def _limit_bytes(request: PlanRequest) -> int:
    """Return the most that the allocator may have to reserve for a plan."""
    assert request.budget_bytes is not None
    return _pool_bytes(request) - request.budget_bytes // _SAFETY


def _pool_bytes(request: PlanRequest) -> int:
    """Return what the pool of larger blocks has where the device has filled it (`Device.fill_pool`)."""
    assert request.budget_bytes is not None
    return max(0, request.budget_bytes - SEGMENT_BYTES)


def _fastest_replayed(
    choices: tuple[Choice, ...], request: PlanRequest, costs: CostTable, least_fraction: float
) -> tuple[Choice, ...]:
    """Return the choices with what has to be reserved for those that are as fast as the best, up to the first one that the
    allocator can serve.
    """
    known: list[Choice] = []
    for choice in choices:
        if choice.prediction.step_ms > _AS_FAST * choices[0].prediction.step_ms:
            break
        known.append(replayed(choice, request, costs, least_fraction))
        if is_served(known[-1], request):
            break
    return (*known, *choices[len(known) :])
