"""What waits between packs, on the host: which bytes leave when, what the device holds, and when a plan moves them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harmony_ds.config import HarmonySettings
from harmony_ds.scheduler.choose import PlanRequest, make_plan, may_move_crossing
from harmony_ds.scheduler.compose import Group, compose_step
from harmony_ds.scheduler.costs import BackwardBytes, CallCost, CostTable, ForwardBytes, StashBytes, WaitingBytes
from harmony_ds.scheduler.crossing import CrossingBytes, CrossingValue, crossing_moves, waiting_bytes
from harmony_ds.scheduler.estimator import CandidateEstimator
from harmony_ds.scheduler.grid import format_plan
from harmony_ds.scheduler.host_room import waiting_of
from harmony_ds.scheduler.memory import walk_memory
from harmony_ds.scheduler.packing import Packer
from harmony_ds.scheduler.plan import ALL_PACKS, Packing, Plan, Policy
from harmony_ds.scheduler.profile import Profile
from harmony_ds.scheduler.search import search
from harmony_ds.scheduler.simulate import simulate
from harmony_ds.scheduler.swaps import swaps_of
from tests.scheduler.examples import CPU, FP32, GPU, graph_of, packs_of, reused, text
from tests.scheduler.validate import validate

CROSSING = 8_000
CALLS = 5
COST = CallCost(
    waiting=WaitingBytes(alive_bytes=CROSSING + 10, after_forward_bytes=CROSSING),
    stash=StashBytes(new_bytes=CROSSING),
    forward=ForwardBytes(peak_bytes=20_000, graph_bytes=15_000),
    backward=BackwardBytes(
        peak_bytes=CROSSING + 6_000,
        input_gradient_bytes=CROSSING + 3,
        crossing_gradient_bytes=CROSSING,
        crossing_fused_bytes=CROSSING,
    ),
    needs_backward=True,
    forward_ms=50.0,
    backward_ms=150.0,
    fused_ms=120.0,
)
VALUES = tuple(CrossingValue(call, call, CROSSING, (call,)) for call in range(1, CALLS))
GRAPH = graph_of([1_000] * CALLS)
COSTS = CostTable(GRAPH.calls, (COST,) * CALLS, tail_bytes=500, held_bytes=10, crossing=VALUES)
MOVED = Policy(prefetch=False, stash_on_host=ALL_PACKS, crossing_on_host=True, deferred_update=False)


def request(budget: int | None, micro_batches: int = 8, **settings: object) -> PlanRequest:
    one = HarmonySettings(**{"residency": "off", **settings})  # type: ignore[arg-type]
    return PlanRequest(one, micro_batches, budget, 0, Policy())


def plan_of(micro_batches: int, policy: Policy) -> Plan:
    packing = Packer(GRAPH, COSTS, FP32).packing(tuple(range(CALLS + 1)))
    plan = make_plan(packing, COSTS, request(None, micro_batches), policy)
    validate(packing, plan.tasks, Group.with_fresh(micro_batches), policy)
    return plan


# ---- values


def test_a_value_leaves_once_between_packs_or_with_a_stash_whichever_comes_first() -> None:
    packing = reused(packs_of(True, True, True, True))
    skip = CrossingValue(1, 3, 100, stashed=(1, 3))  # crosses from each pack to the next, and two calls take it
    late = CrossingValue(3, 3, 10, stashed=(2,))  # the stash of call 2 has it before it crosses
    crossings = CrossingBytes(packing, (skip, late))

    assert [crossings.out_bytes(position) for position in (1, 2, 3)] == [100, 0, 0]
    assert [crossings.in_bytes(position) for position in (1, 2, 3)] == [100, 100, 110]
    assert [crossings.copied_before_bytes(pack) for pack in packing.packs] == [0, 100, 0, 0]


def test_what_no_stash_has_takes_host_memory_of_its_own() -> None:
    packing = reused(packs_of(True, True, True))
    values = (CrossingValue(1, 1, 7, (1,)), CrossingValue(1, 2, 30), CrossingValue(2, 2, 5, (2,)))
    assert CrossingBytes(packing, values).unstashed_bytes(packing) == 35  # before the fused pack, which stashes nothing
    assert waiting_bytes(values, 2) == 35


def test_on_the_host_wait_the_stash_and_the_crossing_tensors_of_each_micro_batch() -> None:
    plan = plan_of(6, MOVED)
    waiting = waiting_of(plan, COSTS)
    assert waiting.stash_bytes == 6 * (CALLS - 1) * CROSSING
    assert waiting.crossing_bytes == 6 * CROSSING
    assert waiting_of(plan_of(6, replace(MOVED, crossing_on_host=False)), COSTS).crossing_bytes == 0


def test_calls_that_are_added_move_values_along() -> None:
    other = CostTable((0, 9, 1, 2, 3, 4), (COST,) * 6, tail_bytes=0)
    for table in (COSTS.worst(other), COSTS.including(other)):
        assert table.calls == (0, 9, 1, 2, 3, 4)
        assert table.crossing[0] == CrossingValue(2, 2, CROSSING, (2,))


def test_values_survive_json_and_are_interpolated() -> None:
    small = replace(COSTS, crossing=tuple(replace(value, nbytes=CROSSING // 2) for value in VALUES))
    profile = Profile(GPU, ((1, small), (3, COSTS)))
    assert Profile.from_json(profile.to_json()) == profile
    assert profile.at(2).crossing[0].nbytes == 3 * CROSSING // 4
    other = replace(small, crossing=small.crossing[1:])  # what is alive differs: there is nothing between
    assert Profile(GPU, ((1, other), (3, COSTS))).at(2).crossing == VALUES


# ---- tasks


def composed(policy: Policy, micro_batches: int = 4) -> str:
    return text(compose_step(reused(packs_of(True, True, True)), Group.with_fresh(micro_batches), policy))


def test_crossing_tensors_leave_after_their_run_and_come_back_a_run_early() -> None:
    assert composed(replace(MOVED, prefetch=True)) == (
        "I0 I1 F0.0 S0.0 X0.0 F0.1 S0.1 X0.1 F0.2 S0.2 X0.2 Y1.0 F0.3 S0.3 X0.3 E0 "
        "Y1.1 I2 F1.0 S1.0 X1.0 Y1.2 F1.1 S1.1 X1.1 Y1.3 F1.2 S1.2 X1.2 Y2.0 F1.3 S1.3 X1.3 E1 "
        "Y2.1 I1 L2.0 V2.0 Y2.2 L2.1 V2.1 Y2.3 L2.2 V2.2 T1.0 Z1.0 L2.3 V2.3 O2 U2 E2 "
        "T1.1 Z1.1 I0 B1.0 V1.0 T1.2 Z1.2 B1.1 V1.1 T1.3 Z1.3 B1.2 V1.2 T0.0 Z0.0 B1.3 V1.3 G2 O1 U1 E1 "
        "T0.1 Z0.1 B0.0 T0.2 Z0.2 B0.1 T0.3 Z0.3 B0.2 B0.3 G1 O0 U0 E0 G0"
    )


@pytest.mark.parametrize(
    "policy",
    [
        replace(MOVED, crossing_on_host=False),
        replace(MOVED, stash_on_host=1),  # moving more of the stash is cheaper
        replace(MOVED, grouping=False),  # nothing waits for another micro-batch
        replace(MOVED, crossing_on_host=False, stash_on_host=0),
    ],
)
def test_they_stay_unless_all_of_the_stash_goes_and_micro_batches_are_grouped(policy: Policy) -> None:
    assert set("XYVZ").isdisjoint(composed(policy))


def test_one_micro_batch_has_nothing_to_wait_for() -> None:
    assert set("XYVZ").isdisjoint(composed(MOVED, 1))


def test_a_micro_batch_whose_graph_is_kept_stays_on_its_way_forward() -> None:
    tasks = composed(replace(MOVED, kept=(1,), graphs=(0, 1)), 3).split()
    assert [task for task in tasks if task[0] == "X"] == ["X0.1", "X0.2", "X1.1", "X1.2"]
    assert [task for task in tasks if task[0] == "V"] == ["V2.0", "V2.1", "V2.2", "V1.0", "V1.1", "V1.2"]


def test_on_several_devices_of_one_process_they_go_to_the_next_device() -> None:
    packs = tuple(replace(pack, device=pack.index % 2) for pack in packs_of(True, True, True))
    policy = replace(MOVED, pipeline=2)
    assert not crossing_moves(reused(packs), policy)
    assert set("XYVZ").isdisjoint(text(compose_step(reused(packs), Group.with_fresh(3), policy)))


def test_a_search_for_a_pipeline_does_not_move_them() -> None:
    one_device = request(None, 16, pack_layers=1)
    assert may_move_crossing(one_device)
    assert not may_move_crossing(replace(one_device, policy=replace(one_device.policy, pipeline=2)))


# ---- device memory


def test_the_device_holds_by_hand() -> None:
    packs = packs_of(True, True, weight_bytes=1_000, gradient_bytes=500)
    costs = replace(COSTS, calls=(0, 1), costs=(COST,) * 2, crossing=VALUES[:1], tail_bytes=0, held_bytes=0)
    tasks = compose_step(reused(packs), Group.with_fresh(4), MOVED)
    profile = walk_memory(packs, tasks, costs)
    in_order = [*zip(text(tasks).split(), profile.activation_bytes, strict=True)]
    held = dict(reversed(in_order))  # of a task that comes twice, the first

    left = 10  # of a micro-batch whose crossing tensors have left
    assert held["F0.0"] == CROSSING + 10 + 20_000
    assert held["X0.0"] == left + CROSSING + CROSSING  # its crossing tensor, and its stash for pack 0, are leaving
    # Beside what the run takes, what left before it: crossing tensor and stash.
    assert held["F0.1"] == left + 2 * CROSSING + CROSSING + 10 + 20_000
    assert held["F0.3"] == 3 * left + 2 * CROSSING + CROSSING + 10 + 20_000
    assert held["E0"] == 4 * left + 2 * CROSSING
    # Two crossing tensors are back, and the copy of the last one is complete when the first run is over.
    assert held["Y1.1"] == 4 * left + 2 * CROSSING + 2 * CROSSING
    # The gradient of the first micro-batch's crossing tensor has left: 3 bytes are what the allocator rounds up.
    assert held["V1.3"] == 500 + 4 * 3 + CROSSING + CROSSING  # the last stash leaves the device with the next move


@given(st.integers(5, 40), st.booleans())
def test_the_peak_does_not_grow_with_the_micro_batches_but_by_what_does_not_cross(more: int, ahead: bool) -> None:
    policy = replace(MOVED, prefetch=ahead)
    few, many = plan_of(4, policy), plan_of(more, policy)
    per_micro_batch = 10 + 3  # a bit of what waits, and what the allocator rounds up
    assert many.peak_bytes <= few.peak_bytes + (more - 4) * per_micro_batch
    stays = plan_of(more, replace(policy, crossing_on_host=False))
    assert stays.peak_bytes >= plan_of(4, replace(policy, crossing_on_host=False)).peak_bytes + (more - 4) * CROSSING


@pytest.mark.parametrize("count", [4, 6, 30])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_few_micro_batches_show_the_peak_of_all(count: int, ahead: bool) -> None:
    policy = replace(MOVED, prefetch=ahead)
    plan = plan_of(count, policy)
    estimator = CandidateEstimator(COSTS, request(None, count))
    assert max(estimator.stage_peaks(estimator.sample(plan.packing, policy))) == plan.peak_bytes


# ---- bytes and times


def test_bytes_are_those_of_the_tasks() -> None:
    swaps = swaps_of(plan_of(3, MOVED), COSTS)
    stays = swaps_of(plan_of(3, replace(MOVED, crossing_on_host=False)), COSTS)
    packs, one = CALLS - 1, 3 * CROSSING

    assert (swaps.crossing_out, swaps.crossing_in) == (2 * packs * one, 2 * packs * one)  # values and gradients
    assert (stays.stash_out, swaps.stash_out) == (packs * one, one)  # pack 0's: the others have left between packs
    assert swaps.stash_in == stays.stash_in == packs * one
    assert stays.crossing_out == stays.crossing_in == 0
    assert swaps.total - stays.total == 4 * packs * one - (packs - 1) * one


def test_copies_are_hidden_by_long_runs_and_cost_time_beside_short_ones() -> None:
    staying = replace(MOVED, prefetch=True, crossing_on_host=False)
    moving = replace(staying, crossing_on_host=True)
    for factor, hides in ((1.0, True), (0.05, False)):
        calls = tuple(
            replace(
                COST,
                forward_ms=factor * COST.forward_ms,
                backward_ms=factor * COST.backward_ms,
                fused_ms=factor * COST.fused_ms,
            )
            for _ in range(CALLS)
        )
        costs = replace(COSTS, costs=calls)
        times = [simulate(plan_of(8, policy), costs, GPU).step_ms for policy in (staying, moving)]
        assert (times[1] <= 1.01 * times[0]) is hides, (factor, times)


def test_the_table_shows_them() -> None:
    lines = format_plan(plan_of(4, MOVED)).splitlines()
    assert lines[3] == "what micro-batches hold between two packs (crossing tensors) waits on the host"
    assert "  stash    crossing " in lines[5]
    assert lines[6].split()[-5:] == ["out", "0-3", "out", "0-3", "evicted"]
    assert lines[7].split()[-7:] == ["out", "0-3", "out", "0-3", "in", "0-3", "evicted"]


# ---- what the search decides


def peak_with(policy: Policy, micro_batches: int) -> int:
    return plan_of(micro_batches, policy).peak_bytes


@pytest.mark.parametrize("machine", [GPU, CPU], ids=["gpu", "cpu"])
def test_crossing_tensors_go_where_nothing_else_fits(machine: object) -> None:
    staying = peak_with(replace(MOVED, crossing_on_host=False), 16)
    assert peak_with(MOVED, 16) < staying
    chosen = search(GRAPH, COSTS, machine, FP32, request(staying - 1, 16, pack_layers=1))[0].plan  # type: ignore[arg-type]
    assert chosen.policy.crossing_on_host
    assert chosen.peak_bytes < staying
    validate(chosen.packing, chosen.tasks, Group.with_fresh(16), chosen.policy)


def test_they_stay_where_everything_fits() -> None:
    for budget in (None, 3 * peak_with(replace(MOVED, crossing_on_host=False), 16)):
        assert not search(GRAPH, COSTS, GPU, FP32, request(budget, 16, pack_layers=1))[0].plan.policy.crossing_on_host


def test_they_stay_where_the_ds_config_keeps_the_stash_on_the_device() -> None:
    staying = peak_with(replace(MOVED, crossing_on_host=False, stash_on_host=0), 4)
    chosen = search(GRAPH, COSTS, GPU, FP32, request(staying + 8_000, 4, stash="device", pack_layers=1))[0].plan
    assert not chosen.policy.crossing_on_host


def test_a_saved_plan_keeps_them_and_one_saved_without_them_stays_as_it_was() -> None:
    plan = plan_of(4, MOVED)
    assert Plan.from_json(plan.to_json()) == plan
    older = plan_of(4, replace(MOVED, crossing_on_host=False)).to_json().replace('"crossing_on_host": false, ', "")
    assert "crossing_on_host" not in older
    assert not Plan.from_json(older).policy.crossing_on_host


def test_a_single_pack_has_no_crossing_tensors() -> None:
    packing: Packing = reused(packs_of(True))
    assert CrossingBytes(packing, VALUES).unstashed_bytes(packing) == 0
    assert set("XYVZ").isdisjoint(text(compose_step(packing, Group.with_fresh(4), MOVED)))


# ---- slices that take their inputs from the host

FROM_HOST = replace(MOVED, slices_from_host=True)
SLICED = replace(
    COSTS,
    costs=(replace(COST, stash=StashBytes(new_bytes=CROSSING, slice_bytes=1_000)),) * CALLS,
    in_slices=True,
    loss_bytes=40_000,
    end_bytes=300,
)


def sliced_plan(micro_batches: int, policy: Policy, shared_losses: tuple[tuple[int, ...], ...] = ()) -> Plan:
    packing = Packer(GRAPH, SLICED, FP32).packing((0, 3, CALLS))
    group = Group(tuple(range(micro_batches)), shared_losses=shared_losses)
    tasks = compose_step(packing, group, policy)
    validate(packing, tasks, group, policy)
    return replace(make_plan(packing, SLICED, request(None, micro_batches), policy), tasks=tasks)


def test_what_slices_take_from_the_host_leaves_at_once_and_comes_back_in_their_runs() -> None:
    alone, two = sliced_plan(1, FROM_HOST), sliced_plan(2, FROM_HOST, ((0, 1),))
    assert text(alone.tasks) == "I0 F0.0 S0.0 E0 I1 L1.0 O1 G1 U1 E1 I0 B0.0 O0 G0 U0 E0"
    assert text(two.tasks) == (
        "I0 F0.0 S0.0 X0.0 F0.1 S0.1 X0.1 E0 I1 Y1.0 F1.0 S1.0 Y1.1 L1.1 V1.1 B1.0 V1.0 O1 G1 U1 E1 "
        "I0 Z0.1 B0.1 Z0.0 B0.0 O0 G0 U0 E0"
    )


def test_slices_from_the_host_hold_one_slice_of_the_stash() -> None:
    plan = sliced_plan(1, FROM_HOST)
    at = dict(zip(map(str, plan.tasks), plan.activation_bytes, strict=True))
    first, last = (pack.gradient_bytes for pack in plan.packs)
    assert at["B0.0"] == 10 + 1_000 + COST.backward.peak_bytes + first
    assert at["L1.0"] == SLICED.loss_bytes + last  # without its stash
    assert at["S0.0"] == 3 * CROSSING + CROSSING + 10
    assert at["O1"] == 10 + COST.backward.input_gradient_bytes + last
    staying = sliced_plan(1, replace(FROM_HOST, slices_from_host=False))
    at_most = dict(zip(map(str, staying.tasks), staying.activation_bytes, strict=True))
    assert at_most["B0.0"] == at["B0.0"] - 1_000 + 3 * CROSSING + last  # which is on its way out


def test_slices_run_forward_before_the_first_gradients_are_there() -> None:
    cost = replace(
        SLICED.costs[0],
        forward=replace(COST.forward, peak_bytes=100_000),  # more than the loss and the backward pass take
        backward=replace(COST.backward, summed_bytes=4_032),
    )
    costs = replace(SLICED, costs=(cost,) * CALLS)
    packing = Packer(GRAPH, costs, FP32).packing((0, 3, CALLS))
    plan = make_plan(packing, costs, request(None, 2), FROM_HOST)
    at = dict(zip(map(str, plan.tasks), plan.activation_bytes, strict=True))
    kept = (
        COST.backward.input_gradient_bytes - CROSSING
    )  # of micro-batch 0, what of its gradients does not go to the host
    assert at["L1.1"] == at["L1.0"] + kept + plan.packs[1].gradient_bytes


def test_slices_from_the_host_move_all_of_the_stash_both_ways() -> None:
    swaps = swaps_of(sliced_plan(2, FROM_HOST), SLICED)
    assert (swaps.stash_in, swaps.stash_out) == (2 * CALLS * CROSSING, 2 * CALLS * CROSSING - 2 * CROSSING)
    assert waiting_of(sliced_plan(2, FROM_HOST), SLICED).stash_bytes == 2 * CALLS * CROSSING


@pytest.mark.parametrize("machine", [CPU, GPU])
def test_copies_of_slices_are_not_hidden(machine: object) -> None:
    ms = [simulate(sliced_plan(4, policy), SLICED, machine).step_ms for policy in (MOVED, FROM_HOST)]  # type: ignore[arg-type]
    assert ms[0] < ms[1]
