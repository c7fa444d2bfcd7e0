"""Searches for the fastest plan that the device's caching allocator can serve without giving memory back in between.

What a plan has in use at once fits the budget; what the allocator has to reserve for it may not: some of its memory is in
fragments, pieces that serve no request. A part of the budget is left to these. How much is first guessed, and then known
for the plan that was found, whose allocations are replayed (`replay`). What a search finds is then one of three:

    served           the allocator has the memory to serve the plan, wherever its blocks come to lie
    served by luck   with all of the budget, and with a little less, a replay needs no retry: blocks happen to lie well
    not served       in each step the allocator would give memory back, and take it again

`search_fitting` searches several times, with other amounts left to fragments:

    with the guess a plan is served    less and less is left, as long as plans are served; the fastest is taken
    none is                            more and more is left, until one is served; if it is slower, amounts between both are
                                       left; if none as fast is served yet, parts of the guess: plans that take as much may
                                       be in other pieces
    none is served at all              one that is served by luck is taken, unless micro-batches differ in size
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
"""What is left grows by at most so many grains from one search to the next."""
_SAFETY = 256
"""Part of the budget that no replay uses: a step does not quite allocate what was measured."""
_LUCK = 512
"""Where luck serves a plan, it has to do so with this part of the budget less, too."""
_MUCH = 16
"""Where more than this part of the budget is left, less is tried: a plan with more in use may be in fewer pieces."""
_PARTS_OF_GUESS = (2, 4)
"""Where no plan is served that is as fast as the one with the guess left, these parts of the guess are left, too."""
_BISECTIONS = 3
"""Before that, so often at most, the middle is left between the guess and what was left for a plan that is served."""
_AS_FAST = 1.01
"""Of the plans that one search finds, those that take so many times the time of the fastest may be taken for it."""

SearchWith = Callable[[PlanRequest], tuple[Choice, ...]]
"""Return the best plans for a request."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """What one search has found: plans, the first of which is to run, and the bytes of the budget left to fragments."""

    choices: tuple[Choice, ...]
    fragment_bytes: int

    @property
    def first(self) -> Choice:
        return self.choices[0]

    @property
    def step_ms(self) -> float:
        """The time of a step of the first plan."""
        return self.first.prediction.step_ms


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
    """Return the fastest plans that `search` finds of which the first is served; if there is none, one by luck.

    If there is none by luck either, they are those that were found with the most left.

    Args:
        request: for all of the budget.
        fragment_bytes: what is left of it for fragments in the first search, a guess.
        smallest_ratio: tokens of the smallest micro-batches / tokens of the one that was measured.

    Raises:
        DoesNotFitError: the first search finds nothing.
    """
    return _FragmentSearch(search, request, costs, smallest_ratio).fastest(fragment_bytes)


class _FragmentSearch:
    """Searches for one request, each with another part of the budget left to fragments."""

    def __init__(self, search: SearchWith, request: PlanRequest, costs: CostTable, smallest_ratio: float) -> None:
        assert request.budget_bytes is not None
        self._search = search
        self._request = request
        self._costs = costs
        self._smallest_ratio = smallest_ratio
        self._budget_bytes = request.budget_bytes
        self._grain_bytes = request.budget_bytes // _GRAIN

    def fastest(self, guess_bytes: int) -> Fitting:
        """Return what `search_fitting` does; `guess_bytes`: what is left in the first search."""
        first = self._search_leaving(guess_bytes)
        if self._serves(first):
            return self._fastest_with_less_left(first)
        found = self._with_more_left(first)
        found = self._fastest_between(first, found)
        found = self._fastest_with_parts_of_guess(first, found)
        if self._serves(found) or self._smallest_ratio != 1.0:
            return found
        lucky = self._lucky_first(first)
        if lucky is None and found is not first:
            lucky = self._lucky_first(found)
        return lucky or found

    # ---- one search

    def _search_leaving(self, fragment_bytes: int) -> Fitting:
        """Search with so many bytes left, and put a plan first that is served, if one is about as fast as the fastest.

        What has to be reserved is then known of all plans that were replayed for that.
        """
        choices = self._search(leaving(self._request, fragment_bytes))
        known: list[Choice] = []
        for choice in choices:
            if choice.prediction.step_ms > _AS_FAST * choices[0].prediction.step_ms:
                break
            nbytes = reserved_bytes(choice.plan, self._costs, self._smallest_ratio)
            known.append(replace(choice, reserved_bytes=nbytes))
            if is_served(known[-1], self._request):
                known.insert(0, known.pop())
                break
        return Fitting((*known, *choices[len(known) :]), fragment_bytes)

    def _serves(self, fitting: Fitting) -> bool:
        """Return whether the first plan is served."""
        return is_served(fitting.first, self._request)

    def _spare_bytes(self, fitting: Fitting) -> int:
        """Return how much less the allocator has to reserve for the first plan than it may; below 0: how much more."""
        assert fitting.first.reserved_bytes is not None
        return _limit_bytes(self._request, fitting.first.plan.policy) - fitting.first.reserved_bytes

    def _lucky_first(self, fitting: Fitting) -> Fitting | None:
        """Return the fitting with one of its replayed plans first that is served by luck; None: none is."""
        choices = fitting.choices
        for place, choice in enumerate(choices):
            if choice.reserved_bytes is not None and _fits_by_luck(choice.plan, self._request, self._costs):
                lucky = replace(choice, reserved_bytes=_limit_bytes(self._request, choice.plan.policy))
                return replace(fitting, choices=(lucky, *choices[:place], *choices[place + 1 :]))
        return None

    # ---- several, after the first one

    def _fastest_with_less_left(self, first: Fitting) -> Fitting:
        """Return the fastest of `first` and what is found with less left, as long as that is served."""
        best = latest = first
        for _ in range(_SEARCHES - 1):
            less_bytes = self._spare_bytes(latest)
            if latest.fragment_bytes > self._budget_bytes // _MUCH:
                less_bytes = max(less_bytes, latest.fragment_bytes // 4)
            if less_bytes < self._grain_bytes or not latest.fragment_bytes:
                break
            latest = self._search_leaving(max(0, latest.fragment_bytes - less_bytes))
            if not self._serves(latest):
                break
            if latest.step_ms < best.step_ms:
                best = latest
        return best

    def _with_more_left(self, first: Fitting) -> Fitting:
        """Return what is found with more left, until it is served, or nothing fits beside that."""
        latest = first
        for _ in range(_SEARCHES - 1):
            missing_bytes = -self._spare_bytes(latest)
            more_bytes = min(max(self._grain_bytes, missing_bytes), _MOST_AT_ONCE * self._grain_bytes)
            try:
                latest = self._search_leaving(latest.fragment_bytes + more_bytes)
            except DoesNotFitError:
                break
            if self._serves(latest):
                break
        return latest

    def _fastest_between(self, unserved: Fitting, found: Fitting) -> Fitting:
        """Return the fastest that is served with less left than for `found`, and more than for `unserved`.

        It is `found` itself if that is as fast as `unserved`, or not served either.
        """
        fastest, least_bytes = found, unserved.fragment_bytes
        for _ in range(_BISECTIONS):
            if not self._serves(fastest) or _is_as_fast(fastest, unserved):
                break
            middle = self._search_leaving((least_bytes + fastest.fragment_bytes) // 2)
            if not self._serves(middle):
                least_bytes = middle.fragment_bytes
            elif middle.step_ms < fastest.step_ms:
                fastest = middle
            else:
                break
        return fastest

    def _fastest_with_parts_of_guess(self, first: Fitting, found: Fitting) -> Fitting:
        """Return the fastest of `found` and what is served with parts of the guess left, until it is as fast as `first`."""
        fastest = found
        for part in _PARTS_OF_GUESS:
            if self._serves(fastest) and _is_as_fast(fastest, first):
                break
            other = self._search_leaving(first.fragment_bytes // part)
            if self._serves(other) and (other.step_ms < fastest.step_ms or not self._serves(fastest)):
                fastest = other
        return fastest


def _is_as_fast(fitting: Fitting, other: Fitting) -> bool:
    """Return whether a step of the first plan takes about as long as one of the other first plan, or less."""
    return fitting.step_ms <= _AS_FAST * other.step_ms


# ---- one plan


def replayed(choice: Choice, request: PlanRequest, costs: CostTable, smallest_ratio: float) -> Choice:
    """Return the choice with what the allocator has to reserve for its plan; `request`: for all of the budget.

    Of a plan that is served by luck, that counts as all that there is.
    """
    return replace(choice, reserved_bytes=_needed_bytes(choice.plan, request, costs, smallest_ratio))


def serves(plan: Plan, request: PlanRequest, costs: CostTable) -> bool:
    """Return whether the allocator can serve `plan` with all of the request's budget, by luck too."""
    return _needed_bytes(plan, request, costs, smallest_ratio=1.0) <= _limit_bytes(request, plan.policy)


def is_served(choice: Choice, request: PlanRequest) -> bool:
    """Return whether the allocator can serve a choice with all of the request's budget, as far as it was replayed."""
    limit_bytes = _limit_bytes(request, choice.plan.policy)
    return choice.reserved_bytes is not None and choice.reserved_bytes <= limit_bytes


def _needed_bytes(plan: Plan, request: PlanRequest, costs: CostTable, smallest_ratio: float) -> int:
    """Return what the allocator has to reserve for a plan; where that is too much and luck serves it, what there is."""
    needed_bytes, limit_bytes = reserved_bytes(plan, costs, smallest_ratio), _limit_bytes(request, plan.policy)
    if needed_bytes > limit_bytes and smallest_ratio == 1.0 and _fits_by_luck(plan, request, costs):
        return limit_bytes
    return needed_bytes


def _fits_by_luck(plan: Plan, request: PlanRequest, costs: CostTable) -> bool:
    """Return whether a replay needs no retry with the memory that there is, nor with a little less.

    An allocator that runs short of memory puts blocks elsewhere than one that may reserve more. But a step does not quite
    allocate what was measured: blocks may not fit where they did in the replay.
    """
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
