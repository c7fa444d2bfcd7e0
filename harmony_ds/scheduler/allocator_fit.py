"""Searches for the fastest plan that the device's caching allocator can serve without giving memory back in between.

What a plan has in use at once fits the budget; what the allocator has to reserve for it may not: some of its memory is in
pieces that serve no request. A part of the budget is left to these. How much is first guessed, and then known for the plan
that was found, whose allocations are replayed (`replay`):

    the allocator has much more than it needs    less is left, as long as it can serve what is found
    it would be short of room                    more is left, until it can serve what is found; if that is slower, amounts
                                                 between both, and then parts of the guess: plans that take as much may be
                                                 in pieces of very different sizes
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from harmony_ds.device.allocator_room import SEGMENT_BYTES, upload_bytes
from harmony_ds.errors import DoesNotFitError
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.plan import Plan, Policy
from harmony_ds.scheduler.replay import reserved_bytes, retries
from harmony_ds.scheduler.search import Choice

_SEARCHES = 3
"""At most so many searches with more left, or with less, the first one among them."""
_GRAIN = 64
"""Part of the budget: the least by which what is left changes from one search to the next."""
_MOST_AT_ONCE = 8
"""And so many times that at most."""
_SAFETY = 256
"""Part of the budget that no replay uses: a step does not quite allocate what was measured."""
_LUCK = 512
"""Where blocks fit by the way that they happen to lie, they have to fit with this part of the budget less, too."""
_MUCH = 16
"""Where more than this part of the budget is left, less is tried: a plan with more in use may be in fewer pieces."""
_PARTS_OF_GUESS = (2, 4)
"""Where what the allocator can serve takes longer than what is found with the guess left, these parts of it are tried."""
_BISECTIONS = 3
"""Before that, so often the middle between what was left for both is tried."""
_AS_FAST = 1.01
"""Of the plans that one search finds, those that take so many times the time of the fastest may be taken for it."""

SearchWith = Callable[[PlanRequest], tuple[Choice, ...]]
"""Return the best plans for a request."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """Plans, the first of which is to run, and the bytes of the budget that were left to the allocator's fragments."""

    choices: tuple[Choice, ...]
    fragment_bytes: int


Fit = Callable[[int], Fitting]
"""Search with so many bytes of the budget left, and put a plan first that the allocator can serve in whichever way blocks
lie, if one is as fast."""


def leaving(request: PlanRequest, nbytes: int) -> PlanRequest:
    """Return the request with so many bytes of its budget left free."""
    assert request.budget_bytes is not None
    return replace(
        request, budget_bytes=max(0, request.budget_bytes - nbytes), beside_bytes=request.beside_bytes + nbytes
    )


def beside_uploads(request: PlanRequest, costs: CostTable) -> PlanRequest:
    """Return the request with so many bytes of its budget left free as inputs take in a pool of their own."""
    if costs.allocations is None or request.budget_bytes is None:
        return request
    return leaving(request, upload_bytes(request.micro_batches * costs.allocations.upload_bytes))


def is_replayed(request: PlanRequest, costs: CostTable) -> bool:
    """Return whether what such plans allocate is known: one device's, found by a thorough search, all tasks listed."""
    is_listed = request.policy.pipeline == 1 and not request.is_sampled
    return request.thorough and is_listed and costs.allocations is not None


def search_fitting(
    search: SearchWith, request: PlanRequest, costs: CostTable, fragment_bytes: int, smallest_ratio: float = 1.0
) -> Fitting:
    """Return the fastest plans that `search` finds of which the first needs no retry of the allocator; if there is none,
    those whose blocks fit by the way that they happen to lie, or else those that were found with the most room left.

    Args:
        request: for all of the budget.
        fragment_bytes: what is left of it for fragments in the first search.
        smallest_ratio: tokens of the smallest micro-batches / tokens of the one that was measured.

    Raises:
        DoesNotFitError: the first search finds nothing.
    """

    def fit(left_bytes: int) -> Fitting:
        found = Fitting(search(leaving(request, left_bytes)), left_bytes)
        return _served_first(found, request, costs, smallest_ratio)

    first = fit(fragment_bytes)
    if is_served(first.choices[0], request):
        return _fastest_with_less_left(first, fit, request)
    found = _fastest_between(first, _served_with_more_left(first, fit, request), fit, request)
    for part in _PARTS_OF_GUESS:
        if is_served(found.choices[0], request) and _is_as_fast(found, first):
            break
        other = fit(fragment_bytes // part)
        if is_served(other.choices[0], request) and _is_better(other, found, request):
            found = other
    if is_served(found.choices[0], request) or smallest_ratio != 1.0:
        return found
    return _lucky_first(first, request, costs) or _lucky_first(found, request, costs) or found


def _fastest_between(unserved: Fitting, served: Fitting, fit: Fit, request: PlanRequest) -> Fitting:
    """Return the fastest plans that the allocator can serve with less left than for `served` and more than for `unserved`,
    or `served` itself, if it is as fast, or if the allocator cannot serve that either.
    """
    fastest, least_bytes = served, unserved.fragment_bytes
    for _ in range(_BISECTIONS):
        if not is_served(fastest.choices[0], request) or _is_as_fast(fastest, unserved):
            break
        middle = fit((least_bytes + fastest.fragment_bytes) // 2)
        if not is_served(middle.choices[0], request):
            least_bytes = middle.fragment_bytes
        elif _is_better(middle, fastest, request):
            fastest = middle
        else:
            break
    return fastest


def _is_as_fast(fitting: Fitting, other: Fitting) -> bool:
    """Return whether a step of the first plan takes about as long as one of the other first plan, or less."""
    return fitting.choices[0].prediction.step_ms <= _AS_FAST * other.choices[0].prediction.step_ms


def _is_better(served: Fitting, other: Fitting, request: PlanRequest) -> bool:
    """Return whether a plan that the allocator can serve is to run instead of another one."""
    if not is_served(other.choices[0], request):
        return True
    return served.choices[0].prediction.step_ms < other.choices[0].prediction.step_ms


def _fastest_with_less_left(first: Fitting, fit: Fit, request: PlanRequest) -> Fitting:
    """Return the fastest of `first` and what is found with less left, as long as the allocator can serve that."""
    best = latest = first
    for _ in range(_SEARCHES - 1):
        assert request.budget_bytes is not None
        spare_bytes = _spare_bytes(latest, request)
        if latest.fragment_bytes > request.budget_bytes // _MUCH:
            spare_bytes = max(spare_bytes, latest.fragment_bytes // 4)
        if spare_bytes < request.budget_bytes // _GRAIN or not latest.fragment_bytes:
            break
        latest = fit(max(0, latest.fragment_bytes - spare_bytes))
        if not is_served(latest.choices[0], request):
            break
        if latest.choices[0].prediction.step_ms < best.choices[0].prediction.step_ms:
            best = latest
    return best


def _served_with_more_left(first: Fitting, fit: Fit, request: PlanRequest) -> Fitting:
    """Return what is found with more left, until the allocator can serve it, or nothing fits beside that."""
    latest = first
    for _ in range(_SEARCHES - 1):
        assert request.budget_bytes is not None
        grain = request.budget_bytes // _GRAIN
        missing_bytes = -_spare_bytes(latest, request)
        try:
            latest = fit(latest.fragment_bytes + min(max(grain, missing_bytes), _MOST_AT_ONCE * grain))
        except DoesNotFitError:
            break
        if is_served(latest.choices[0], request):
            break
    return latest


def _spare_bytes(fitting: Fitting, request: PlanRequest) -> int:
    """Return how much less the allocator has to reserve than it may; below 0: how much more."""
    choice = fitting.choices[0]
    assert choice.reserved_bytes is not None
    return _limit_bytes(request, choice.plan.policy) - choice.reserved_bytes


def replayed(choice: Choice, request: PlanRequest, costs: CostTable, smallest_ratio: float) -> Choice:
    """Return the choice with what the allocator has to reserve for its plan; `request`: for all of the budget.

    Where it would reserve more than there is, it may do with what there is: it puts blocks elsewhere then.
    """
    needed_bytes = reserved_bytes(choice.plan, costs, smallest_ratio)
    limit_bytes = _limit_bytes(request, choice.plan.policy)
    if needed_bytes > limit_bytes and smallest_ratio == 1.0 and _fits_by_luck(choice.plan, request, costs):
        needed_bytes = limit_bytes
    return replace(choice, reserved_bytes=needed_bytes)


def serves(plan: Plan, request: PlanRequest, costs: CostTable) -> bool:
    """Return whether the allocator can serve `plan` with all of the request's budget, and no retry."""
    return reserved_bytes(plan, costs) <= _limit_bytes(request, plan.policy) or _fits_by_luck(plan, request, costs)


def is_served(choice: Choice, request: PlanRequest) -> bool:
    """Return whether the allocator can serve a choice that was replayed with all of the request's budget, and no retry."""
    limit_bytes = _limit_bytes(request, choice.plan.policy)
    return choice.reserved_bytes is not None and choice.reserved_bytes <= limit_bytes


def _fits_by_luck(plan: Plan, request: PlanRequest, costs: CostTable) -> bool:
    """Return whether an allocator needs no retry for `plan` with the memory that there is, and with a little less."""
    assert request.budget_bytes is not None
    pool_bytes = _pool_bytes(request, plan.policy)
    return not any(retries(plan, costs, pool) for pool in (pool_bytes, pool_bytes - request.budget_bytes // _LUCK))


def _limit_bytes(request: PlanRequest, policy: Policy) -> int:
    """Return the most that the allocator may have to reserve for a plan of this policy."""
    assert request.budget_bytes is not None
    return _pool_bytes(request, policy) - request.budget_bytes // _SAFETY


def _pool_bytes(request: PlanRequest, policy: Policy) -> int:
    """Return what the pool of larger blocks has where the device has filled it (`Device.fill_pool`).

    Buffers that gradients are exchanged in come from another pool.
    """
    assert request.budget_bytes is not None
    exchange_bytes = request.exchange_bytes if policy.reduces_on_device else 0
    return max(0, request.budget_bytes - exchange_bytes - SEGMENT_BYTES)


def _served_first(fitting: Fitting, request: PlanRequest, costs: CostTable, smallest_ratio: float) -> Fitting:
    """Return the fitting with a plan first that the allocator can serve in whichever way blocks lie, if one is about as
    fast as its first one.

    What has to be reserved is then known of all plans that were replayed for that.
    """
    known: list[Choice] = []
    for choice in fitting.choices:
        if choice.prediction.step_ms > _AS_FAST * fitting.choices[0].prediction.step_ms:
            break
        known.append(replace(choice, reserved_bytes=reserved_bytes(choice.plan, costs, smallest_ratio)))
        if is_served(known[-1], request):
            known.insert(0, known.pop())
            break
    return replace(fitting, choices=(*known, *fitting.choices[len(known) :]))


def _lucky_first(fitting: Fitting, request: PlanRequest, costs: CostTable) -> Fitting | None:
    """Return the fitting with one of its replayed plans first whose blocks fit by the way that they lie; None: none does.

    A step does not quite allocate what was measured: blocks may not fit where they did in the replay.
    """
    choices = fitting.choices
    for place, choice in enumerate(choices):
        if choice.reserved_bytes is not None and _fits_by_luck(choice.plan, request, costs):
            lucky = replace(choice, reserved_bytes=_limit_bytes(request, choice.plan.policy))
            return replace(fitting, choices=(lucky, *choices[:place], *choices[place + 1 :]))
    return None
