"""Bytes that wait in host memory, told from packs and policies before anything is composed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harmony_ds.config import HarmonySettings
from harmony_ds.errors import DoesNotFitError
from harmony_ds.scheduler.choose import PlanRequest, make_plan
from harmony_ds.scheduler.host_room import gradient_bytes, waiting_of
from harmony_ds.scheduler.packing import Packer
from harmony_ds.scheduler.plan import Policy
from harmony_ds.scheduler.search import search
from harmony_ds.scheduler.simulate import simulate
from tests.scheduler.examples import COST, FP32, GPU, costs_of, graph_of

NUMELS = [1000, 3000, 1000, 2000]
GRAPH = graph_of(NUMELS)
COSTS = costs_of(GRAPH.calls, COST)
PACKING = Packer(GRAPH, COSTS, FP32).packing(tuple(range(len(NUMELS) + 1)))
OWN = [pack.gradient_bytes for pack in PACKING.packs]


def gradients(*policies: Policy) -> list[int]:
    return [gradient_bytes(PACKING, policy) for policy in policies]


def test_all_gradients_wait_for_their_norm_but_those_of_resident_packs_and_a_few_without_a_norm() -> None:
    few = Policy(deferred_update=False, gradient_slabs=2)
    assert gradients(Policy(), Policy(resident=(1,))) == [sum(OWN), sum(OWN) - OWN[1]]
    assert gradients(few, replace(few, resident=(1,)), replace(few, resident=(0, 1, 2))) == [
        2 * max(OWN),
        2 * OWN[3],
        OWN[3],  # there are no more
    ]


def test_where_the_host_reduces_every_device_leaves_whole_packs_beside_its_pieces() -> None:
    policy = Policy(devices=2, reduce_on_host=True, gradient_slabs=3)
    packing = Packer(GRAPH, COSTS, FP32, policy).packing(tuple(range(len(NUMELS) + 1)))
    assert gradient_bytes(packing, policy) == sum(pack.piece_bytes() for pack in packing.packs) + 3 * max(OWN)


@pytest.mark.parametrize("away", [0, 1, 3])
def test_the_stash_on_the_host_is_what_the_plan_moves_there(away: int) -> None:
    policy = Policy(stash_on_host=away)
    plan = make_plan(PACKING, COSTS, PlanRequest(HarmonySettings(), 5, None, 0, policy), policy)
    moved = simulate(plan, COSTS, GPU).swaps.stash_out
    assert waiting_of(plan, COSTS).stash_bytes == moved == 5 * 256 * away


def test_a_plan_is_found_for_which_the_host_has_room() -> None:
    costs = costs_of(GRAPH.calls, replace(COST, stash=replace(COST.stash, new_bytes=3_000)))
    policy = Policy()
    request = PlanRequest(HarmonySettings(residency="off"), 6, 64_000, 0, policy)
    fastest = search(GRAPH, costs, GPU, FP32, request)[0]
    assert fastest.prediction.swaps.stash_out > 0
    room = sum(OWN) + fastest.prediction.swaps.stash_out - 1
    fits = search(GRAPH, costs, GPU, FP32, replace(request, host_bytes=room))[0]
    assert sum(OWN) + fits.prediction.swaps.stash_out <= room
    assert fits.prediction.step_ms > fastest.prediction.step_ms
    # What fits the room that there is needs no other, and what nothing fits is no bound.
    for enough in (room + 1, sum(OWN) - 1, 0):
        assert search(GRAPH, costs, GPU, FP32, replace(request, host_bytes=enough), top=3) == search(
            GRAPH, costs, GPU, FP32, request, top=3
        )


def test_stash_stays_on_the_device_where_the_host_has_no_room_for_it() -> None:
    costs = costs_of(GRAPH.calls, replace(COST, stash=replace(COST.stash, new_bytes=500)))
    count = 0
    for budget_bytes in range(30_000, 60_000, 2_000):
        request = PlanRequest(HarmonySettings(residency="off"), 6, budget_bytes, 0, Policy(), host_bytes=sum(OWN))
        try:
            on_device = search(GRAPH, costs, GPU, FP32, replace(request, settings=HarmonySettings(stash="device")))[0]
        except DoesNotFitError:
            continue
        count += len(on_device.plan.packs) > 1  # of one pack there is no stash
        found = search(GRAPH, costs, GPU, FP32, request)[0]
        assert waiting_of(found.plan, costs).total_bytes <= sum(OWN)
    assert count


def test_where_the_device_is_too_small_the_hosts_room_is_not_what_is_said() -> None:
    request = PlanRequest(HarmonySettings(), 6, 100, 0, Policy(), host_bytes=0)
    with pytest.raises(DoesNotFitError, match="of device memory"):
        search(GRAPH, COSTS, GPU, FP32, request)


def test_a_device_without_a_budget_has_its_host_checked_too() -> None:
    request = PlanRequest(HarmonySettings(), 6, None, 0, Policy(), host_bytes=0)
    assert search(GRAPH, COSTS, GPU, FP32, request) == search(
        GRAPH, COSTS, GPU, FP32, replace(request, host_bytes=None)
    )
