"""What of the budget is left to the allocator's fragments: what the plan that is found needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from harmony_ds.config.harmony import HarmonySettings
from harmony_ds.device.allocator_room import SEGMENT_BYTES
from harmony_ds.errors import DoesNotFitError
from harmony_ds.scheduler import allocator_fit
from harmony_ds.scheduler.allocations import Allocations, Event
from harmony_ds.scheduler.allocator_fit import Fitting, beside_uploads, is_served, leaving, replayed, search_fitting
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.plan import Plan, Policy
from harmony_ds.scheduler.search import Choice
from harmony_ds.scheduler.simulate import simulate
from tests.scheduler.examples import GPU, costs_of, packs_of, parse, reused

MIB = 2**20
BUDGET = 2560 * MIB  # a 64th is 40 MiB, a 256th is 10
LIMIT = BUDGET - SEGMENT_BYTES - 10 * MIB
LUCKY = BUDGET + 77 * MIB
"""What a plan reserves that happens to need no retry with all of the budget, nor with a 512th less."""
POOL = BUDGET - SEGMENT_BYTES - 5 * MIB
COSTS = costs_of((0, 1))
REQUEST = PlanRequest(HarmonySettings(), 1, BUDGET, 0, Policy())


def plan_that_reserves(nbytes: int) -> Plan:
    return Plan(reused(packs_of(True, True)), Policy(), parse("I0 F0.0 E0"), 1, 0, peak_bytes=nbytes)


def choice(reserved: int, ms: float) -> Choice:
    plan = plan_that_reserves(reserved)
    prediction = simulate(plan, COSTS, GPU)
    return Choice(plan, type(prediction)(**{**_fields(prediction), "step_ms": ms}), "")


def known(choice: Choice) -> Choice:
    return replace(choice, reserved_bytes=choice.plan.peak_bytes)


def serves(choice: Choice, smallest_ratio: float) -> bool:
    return is_served(replayed(choice, REQUEST, COSTS, smallest_ratio), REQUEST)


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


@pytest.fixture(autouse=True)
def _reserves_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    def reserved_bytes(plan: Plan, costs: Any, smallest_ratio: float) -> int:
        return round(plan.peak_bytes / smallest_ratio)

    def retries(plan: Plan, costs: Any, pool_bytes: int) -> int:
        return int(plan.peak_bytes != LUCKY or pool_bytes < POOL)

    monkeypatch.setattr(allocator_fit, "reserved_bytes", reserved_bytes)
    monkeypatch.setattr(allocator_fit, "retries", retries)


class Searches:
    """A search that finds given choices by the MiB that it has to leave of the budget."""

    def __init__(self, found: Callable[[int], tuple[Choice, ...]]) -> None:
        self.left: list[int] = []
        self._found = found

    def __call__(self, request: PlanRequest) -> tuple[Choice, ...]:
        assert request.budget_bytes is not None and request.budget_bytes + request.beside_bytes == BUDGET
        self.left.append(request.beside_bytes // MIB)
        return self._found(self.left[-1])


def fit(searches: Searches, fragment_mib: int, smallest_ratio: float = 1.0) -> Fitting:
    return search_fitting(searches, REQUEST, COSTS, fragment_mib * MIB, smallest_ratio)


def test_a_plan_that_takes_what_there_is_runs() -> None:
    served = choice(LIMIT, 10.0)
    searches = Searches(lambda left: (served,))
    assert fit(searches, 100) == Fitting((known(served),), 100 * MIB)
    assert searches.left == [100]


def test_of_plans_that_are_as_fast_one_that_is_served_runs() -> None:
    first, second, third = choice(LIMIT + 1, 10.0), choice(LIMIT, 10.05), choice(LIMIT, 10.0)
    searches = Searches(lambda left: (first, second, third))
    assert fit(searches, 100).choices == (known(second), known(first), third)
    assert searches.left == [100]


def test_a_slower_plan_does_not_run_for_being_served() -> None:
    fast, slow = choice(LIMIT + 60 * MIB, 10.0), choice(LIMIT, 11.0)
    better = choice(LIMIT, 10.5)
    searches = Searches(lambda left: (fast, slow) if left < 160 else (better,))
    assert fit(searches, 100) == Fitting((known(better),), 160 * MIB)
    assert searches.left == [100, 160, 130, 145, 152, 50, 25]


def test_where_what_is_served_is_slower_less_is_left_too() -> None:
    """Plans that take as much may be in pieces of other sizes."""
    fast, slow, served = choice(LIMIT + 60 * MIB, 10.0), choice(LIMIT, 11.0), choice(LIMIT, 10.2)
    found = {100: fast, 160: slow, 130: fast, 145: slow, 50: served, 25: fast}
    searches = Searches(lambda left: (found[left],))
    assert fit(searches, 100) == Fitting((known(served),), 50 * MIB)
    assert searches.left == [100, 160, 130, 145, 50, 25]  # 145 is served, and no faster


def test_between_what_is_not_served_and_what_is_slower_a_plan_is_looked_for() -> None:
    fast, slow, served = choice(LIMIT + 60 * MIB, 10.0), choice(LIMIT, 11.0), choice(LIMIT, 10.05)
    found = {100: fast, 160: slow, 130: served}
    searches = Searches(lambda left: (found[left],))
    assert fit(searches, 100) == Fitting((known(served),), 130 * MIB)
    assert searches.left == [100, 160, 130]  # it is as fast as the first


def test_at_least_a_64th_more_is_left_at_a_time() -> None:
    searches = Searches(lambda left: (choice(LIMIT + 1 if left == 100 else LIMIT, 10.0),))
    fit(searches, 100)
    assert searches.left == [100, 140]


def test_what_a_plan_does_not_need_is_given_to_the_next() -> None:
    slow, fast = choice(LIMIT - 70 * MIB, 10.0), choice(LIMIT, 9.0)
    searches = Searches(lambda left: (slow,) if left == 100 else (fast,))
    assert fit(searches, 100) == Fitting((known(fast),), 30 * MIB)


def test_a_plan_that_was_given_too_much_does_not_run() -> None:
    slow, too_large = choice(LIMIT - 70 * MIB, 10.0), choice(LIMIT + 1, 9.0)
    searches = Searches(lambda left: (slow,) if left == 100 else (too_large,))
    assert fit(searches, 100) == Fitting((known(slow),), 100 * MIB)


def test_where_no_plan_is_served_the_last_one_that_fits_runs() -> None:
    def found(left: int) -> tuple[Choice, ...]:
        if left > 150:
            raise DoesNotFitError("too small")
        return (choice(LIMIT + 100 * MIB, 10.0 + left),)

    searches = Searches(found)
    fitting = fit(searches, 100)
    assert searches.left == [100, 200, 50, 25]
    assert (fitting.choices[0].prediction.step_ms, fitting.fragment_bytes) == (110.0, 100 * MIB)
    with pytest.raises(DoesNotFitError):
        fit(searches, 160)


def test_a_plan_runs_whose_blocks_fit_by_the_way_they_lie() -> None:
    lucky = choice(LUCKY, 10.0)
    assert fit(Searches(lambda left: (lucky,)), 100).choices == (replace(lucky, reserved_bytes=LIMIT),)
    assert not serves(lucky, 0.9)


def test_a_plan_whose_blocks_fit_by_luck_does_not_run_for_one_that_is_served_surely() -> None:
    sure, lucky = choice(LIMIT - 70 * MIB, 10.0), choice(LUCKY, 9.0)
    searches = Searches(lambda left: (sure,) if left == 100 else (lucky,))
    assert fit(searches, 100) == Fitting((known(sure),), 100 * MIB)
    assert searches.left == [100, 30]


def test_where_much_is_left_a_quarter_less_is_tried() -> None:
    searches = Searches(lambda left: (choice(LIMIT, left / 10),))
    assert fit(searches, 240).fragment_bytes == 135 * MIB
    assert searches.left == [240, 180, 135]


def test_micro_batches_of_several_sizes_need_more() -> None:
    small, large = choice(LIMIT // 2, 10.0), choice(LIMIT, 9.0)
    searches = Searches(lambda left: (large, small) if left == 100 else (small,))
    assert fit(searches, 100, smallest_ratio=0.5) == Fitting(
        (replace(small, reserved_bytes=LIMIT),), (100 + 8 * 40) * MIB
    )
    assert serves(small, 0.5) and not serves(large, 0.5)


def test_what_is_left_is_beside_the_plan() -> None:
    less = leaving(REQUEST, 600)
    assert (less.budget_bytes, less.beside_bytes) == (BUDGET - 600, 600)
    assert leaving(less, -600) == REQUEST


def test_processes_that_reduce_gradients_on_their_devices_leave_room_for_that() -> None:
    request = replace(REQUEST, exchange_bytes=30 * MIB)
    plan = plan_that_reserves(LIMIT)
    for policy, served in (
        (Policy(devices=2), False),
        (Policy(devices=2, reduce_on_host=True), True),
        (Policy(), True),
    ):
        of_policy = replace(choice(LIMIT, 10.0), plan=replace(plan, policy=policy))
        assert is_served(replayed(of_policy, request, COSTS, 1.0), request) is served


@pytest.mark.parametrize(("input_mib", "left_mib"), [(4, 0), (5, 25)])
def test_inputs_of_all_micro_batches_have_room_where_they_exceed_their_pools_segment(
    input_mib: int, left_mib: int
) -> None:
    request = replace(REQUEST, micro_batches=5)
    assert beside_uploads(request, COSTS) == request  # nothing was recorded
    allocations = Allocations(lead=(Event(1, input_mib * MIB), Event(1, 0), Event(2, 7)), uploads=(1,))
    assert beside_uploads(request, replace(COSTS, allocations=allocations)) == leaving(request, left_mib * MIB)
