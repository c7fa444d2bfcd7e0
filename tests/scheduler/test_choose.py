"""The plan with the largest packs that fit; where nothing fits, an error with both numbers."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from harmony_ds import DoesNotFitError, Plan
from harmony_ds.profiler.costs import CallCost
from harmony_ds.scheduler import Packing, Policy, Request, choose_plan, make_plan, pack_uniformly
from tests.scheduler.examples import FP32, costs_of, graph_of

GRAPH = graph_of([256] * 8)  # 1 KiB of weights and of gradients each
COSTS = costs_of(
    GRAPH.calls,
    CallCost(
        alive_bytes=300,
        stash_bytes=256,
        shared_bytes=256,
        forward_bytes=500,
        graph_bytes=400,
        backward_bytes=900,
        needs_backward=True,
    ),
)


def request(budget_bytes: int | None, stash: str = "auto", pack_layers: int | None = None) -> Request:
    return Request(4, budget_bytes, resident_bytes=128, pack_layers=pack_layers, stash=stash, policy=Policy())


def choose(wanted: Request) -> Plan:
    return choose_plan(GRAPH, COSTS, FP32, wanted)


def plan_with(pack_layers: int, stash_on_host: bool) -> Plan:
    packs = pack_uniformly(GRAPH, COSTS, FP32, pack_layers)
    return make_plan(Packing.reused(packs), COSTS, request(None), stash_on_host)


def largest_pack(plan: Plan) -> int:
    return max(len(pack.positions) for pack in plan.packs)


SWEEP = range(4_000, 60_000, 500)


@pytest.mark.parametrize("stash", ["device", "host"])
def test_a_larger_budget_never_gives_smaller_packs(stash: str) -> None:
    sizes = []
    for budget in SWEEP:
        try:
            plan = choose(request(budget, stash))
        except DoesNotFitError:
            assert not sizes, "a larger budget holds whatever a smaller one holds"
            continue
        assert plan.peak_bytes <= budget
        assert plan.stash_on_host == (stash == "host")
        sizes.append(largest_pack(plan))
    assert sizes == sorted(sizes)
    assert {sizes[0], sizes[-1]} == {1, 8}


def test_left_to_itself_the_stash_goes_to_the_host_only_where_no_plan_keeps_it_on_the_device() -> None:
    places = []
    for budget in SWEEP:
        try:
            places.append(choose(request(budget)).stash_on_host)
        except DoesNotFitError:
            assert not places
    assert places == sorted(places, reverse=True)
    assert len(set(places)) == 2


def test_a_plan_whose_peak_is_the_budget_fits_and_one_byte_less_does_not() -> None:
    smallest = plan_with(1, stash_on_host=True)

    assert choose(request(smallest.peak_bytes, "host", 1)) == smallest
    with pytest.raises(DoesNotFitError, match=": 1 too many"):
        choose(request(smallest.peak_bytes - 1, "host", 1))


def test_without_a_budget_all_is_one_pack() -> None:
    plan = choose(request(None))

    assert len(plan.packs) == 1
    assert not plan.stash_on_host


@pytest.mark.parametrize("pack_layers", [1, 3, 8])
def test_a_pack_size_that_is_given_is_kept(pack_layers: int) -> None:
    assert largest_pack(choose(request(None, pack_layers=pack_layers))) == pack_layers


def test_a_pack_size_that_does_not_fit_is_an_error_even_if_a_smaller_one_would() -> None:
    budget = choose(request(None, "host", 2)).peak_bytes
    assert largest_pack(choose(request(budget, "host"))) == 2
    with pytest.raises(DoesNotFitError, match=r"lower harmony.pack_layers \(now 3\)"):
        choose(request(budget, "host", 3))


def test_what_is_resident_adds_to_the_peak() -> None:
    wanted = request(None, "device", 2)

    more = choose(replace(wanted, resident_bytes=1128))
    assert more.peak_bytes == choose(wanted).peak_bytes + 1000
    assert more.resident_bytes == 1128


def test_where_nothing_fits_the_error_has_both_numbers_and_the_ways_out() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        choose(request(1_000))
    message = str(caught.value)
    smallest = min(plan_with(size, host).peak_bytes for size in range(1, 9) for host in (False, True))

    assert message.startswith(
        f"the smallest plan needs {smallest:,} bytes of device memory but the budget is 1,000: {smallest - 1000:,} too many"
    )
    for key in ("harmony.device_memory_gib", "train_micro_batch_size_per_gpu", "harmony.pack_layers", "harmony.layers"):
        assert key in message
    assert re.search(r"1,024 bytes of weights .* 1,024 of gradients, 128 that are resident", message)
    assert "4 micro-batches" in message


def test_the_plan_says_what_it_was_made_for() -> None:
    plan = choose(replace(request(None, "host"), micro_batches=7))

    assert plan.micro_batches == 7
    assert plan.stash_on_host
