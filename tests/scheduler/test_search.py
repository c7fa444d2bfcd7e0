"""The fastest plan that fits; where nothing fits, an error with both numbers."""

from __future__ import annotations

import gc
import re
import weakref
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harmony_ds import DoesNotFitError, Plan
from harmony_ds.config import HarmonySettings
from harmony_ds.decomposer import LayerGraph
from harmony_ds.scheduler.candidates import CandidateKind, Cut, Cuts, propose_policies
from harmony_ds.scheduler.choose import PlanRequest, make_plan
from harmony_ds.scheduler.compose import Group
from harmony_ds.scheduler.costs import BackwardBytes, CallCost, CostTable, ForwardBytes, StashBytes, WaitingBytes
from harmony_ds.scheduler.neighbours import Point, neighbours_by_cuts
from harmony_ds.scheduler.packing import Packer
from harmony_ds.scheduler.plan import Packing, Policy
from harmony_ds.scheduler.profile import Machine
from harmony_ds.scheduler.saved import adopt
from harmony_ds.scheduler.search import Choice, search, time_rank
from harmony_ds.scheduler.simulate import simulate
from tests.cover import pairs
from tests.scheduler.examples import CPU, FP32, GPU, costs_of, graph_of, pack_uniformly, reused
from tests.scheduler.validate import validate


def _with_state(graph: LayerGraph) -> LayerGraph:
    """Adam's two moments, on the device for resident packs."""
    specs = (replace(spec, state_bytes=8 * spec.numel, update_bytes=4 * spec.numel) for spec in graph.parameters)
    return replace(graph, parameters=tuple(specs))


GRAPH = _with_state(graph_of([256] * 8))  # 1 KiB of weights and of gradients each
COSTS = costs_of(
    GRAPH.calls,
    CallCost(
        waiting=WaitingBytes(alive_bytes=300),
        stash=StashBytes(new_bytes=256),
        forward=ForwardBytes(peak_bytes=500, graph_bytes=400, kept_graph_bytes=300),
        backward=BackwardBytes(input_gradient_bytes=256, peak_bytes=900),
        needs_backward=True,
        forward_ms=1.0,
        backward_ms=3.0,
        fused_ms=3.0,
        propagate_ms=2.0,
    ),
)


def request(
    budget_bytes: int | None, stash: str = "auto", pack_layers: int | None = None, residency: str | int = "off"
) -> PlanRequest:
    settings = HarmonySettings(pack_layers=pack_layers, stash=stash, residency=residency)
    return PlanRequest(settings, 4, budget_bytes, resident_bytes=128, policy=Policy())


def choose(wanted: PlanRequest) -> Plan:
    return valid(search(GRAPH, COSTS, GPU, FP32, wanted)[0].plan)


def valid(plan: Plan) -> Plan:
    validate(plan.packing, plan.tasks, Group.with_fresh(plan.micro_batches), plan.policy)
    return plan


def plan_with(pack_layers: int, stash_on_host: bool) -> Plan:
    packing = reused(pack_uniformly(GRAPH, COSTS, FP32, pack_layers))
    policy = Policy(stash_on_host=len(packing.forward) if stash_on_host else 0)
    return make_plan(packing, COSTS, request(None), policy)


def test_a_saved_plan_needs_what_is_measured_now_whatever_it_needed_when_it_was_saved() -> None:
    saved = replace(plan_with(1, stash_on_host=False), peak_bytes=0)
    needed = adopt(saved, GRAPH, COSTS, GPU, FP32, request(None)).plan.peak_bytes
    with pytest.raises(DoesNotFitError, match=rf"needs {needed:,} bytes .*{needed - 1:,} bytes: 1 too many"):
        adopt(saved, GRAPH, COSTS, GPU, FP32, request(needed - 1))


def largest_pack(plan: Plan) -> int:
    return max(len(pack.positions) for pack in plan.packs)


SWEEP = range(4_000, 60_000, 4_500)


@pytest.mark.parametrize(
    ("machine", "stash", "residency"), pairs([GPU, CPU], ["auto", "device", "host"], ["off", "auto"])
)
def test_a_larger_budget_never_gives_a_slower_plan(machine: Machine, stash: str, residency: str) -> None:
    times: list[int] = []
    for budget in SWEEP:
        wanted = request(budget, stash, residency=residency)
        try:
            choice = search(GRAPH, COSTS, machine, FP32, wanted)[0]
        except DoesNotFitError:
            assert not times, "a larger budget holds whatever a smaller one holds"
            continue
        assert choice.plan.peak_bytes <= budget
        times.append(time_rank(choice.prediction.step_ms))
    assert times == sorted(times, reverse=True)
    assert len(set(times)) > 1


@pytest.mark.parametrize(("share", "fastest"), [(0.1, 3), (1.0, 1)], ids=["devices compute", "the host issues"])
def test_more_devices_are_used_where_one_thread_issues_their_work_fast_enough(share: float, fastest: int) -> None:
    settings = HarmonySettings(parallel="auto", devices=3, residency="off")
    wanted = PlanRequest(settings, 12, 60_000, resident_bytes=128, policy=Policy(pipeline=3))
    found = search(GRAPH, replace(COSTS, issue_share=share), GPU, FP32, wanted, top=5)
    assert found[0].plan.policy.pipeline == fastest
    assert {choice.plan.policy.pipeline for choice in found} == {1, 3}  # the other's time is told
    assert min(found, key=lambda choice: choice.prediction.step_ms) is found[0]


def test_a_stash_setting_is_obeyed() -> None:
    assert not choose(request(60_000, "device")).policy.stash_on_host
    plan = choose(request(20_000, "host"))
    assert len(plan.packing.forward) >= 1
    assert plan.policy.stash_on_host == len(plan.packing.forward)


def every_cut(wanted: PlanRequest, graph: LayerGraph, costs: CostTable) -> list[Packing]:
    cuts = Cuts(costs, Packer(graph, costs, FP32), wanted)
    made = [cuts.packing(one) for cut in cuts.first() for one in (cut, *cuts.near(cut))]
    return [*dict.fromkeys(one[0] for one in made if one is not None)]


@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=4), budget=st.integers(3_000, 30_000))
@settings(max_examples=25, deadline=None)
def test_nothing_in_the_list_of_candidates_is_faster_than_what_is_chosen(sizes: list[int], budget: int) -> None:
    graph = _with_state(graph_of(sizes))
    costs = replace(COSTS, calls=graph.calls, costs=COSTS.costs[: len(sizes)])
    wanted = request(budget, residency="auto")
    every = []
    for packing in every_cut(wanted, graph, costs):

        def peak(policy: Policy, packing: Packing = packing) -> float:
            return make_plan(packing, costs, wanted, policy).peak_bytes

        for policy in propose_policies(packing, wanted, peak):
            plan = valid(make_plan(packing, costs, wanted, policy))
            assert plan.peak_bytes <= budget
            every.append(time_rank(simulate(plan, costs, GPU).step_ms))
    if every:
        assert time_rank(search(graph, costs, GPU, FP32, wanted)[0].prediction.step_ms) <= min(every)
    else:
        with pytest.raises(DoesNotFitError):
            search(graph, costs, GPU, FP32, wanted)


def test_the_list_is_ordered_and_holds_no_plan_twice() -> None:
    found = search(GRAPH, COSTS, GPU, FP32, request(30_000), top=10)

    assert len(found) > 1
    assert [time_rank(c.prediction.step_ms) for c in found] == sorted(time_rank(c.prediction.step_ms) for c in found)
    assert len({c.plan.packing for c in found}) == len(found)
    assert found[0] == search(GRAPH, COSTS, GPU, FP32, request(30_000))[0]


@pytest.mark.parametrize("update_rate", [1e2, 1e9], ids=["updates are slow", "computing is what takes time"])
def test_the_fastest_are_the_same_whether_or_not_the_others_are_simulated_in_full(update_rate: float) -> None:
    machine = replace(GPU, update_elements_per_ms=update_rate)
    for budget in SWEEP[4::4]:
        wanted = request(budget, residency="auto")
        every = search(GRAPH, COSTS, machine, FP32, wanted, top=10)
        for top in (1, 3):
            assert search(GRAPH, COSTS, machine, FP32, wanted, top=top, among=10) == every[:top]


def test_the_reason_names_the_cut_and_the_use_of_memory() -> None:
    choice: Choice = search(GRAPH, COSTS, GPU, FP32, request(None, pack_layers=4, stash="device"))[0]

    assert choice.reason == "2 packs of 4 calls, as configured; stash on the device, prefetch"


@pytest.mark.parametrize(
    ("pack_layers", "stash", "reason"),
    [
        (8, "host", "1 pack of 8 calls, as configured"),  # the fused pack has no stash
        (4, "host", "2 packs of 4 calls, as configured; stash on the host"),
    ],
)
def test_the_reason_names_a_stash_only_where_there_is_one(pack_layers: int, stash: str, reason: str) -> None:
    wanted = request(None, pack_layers=pack_layers, stash=stash)
    wanted = replace(wanted, policy=replace(wanted.policy, prefetch=False))
    assert search(GRAPH, COSTS, GPU, FP32, wanted)[0].reason == reason


def test_a_plan_whose_peak_is_the_budget_fits_and_one_byte_less_does_not() -> None:
    smallest = plan_with(1, stash_on_host=True)

    assert choose(request(smallest.peak_bytes, "host", 1)) == smallest
    assert choose(replace(request(None, "host"), micro_batches=7)).micro_batches == 7
    with pytest.raises(DoesNotFitError, match=": 1 too many"):
        choose(request(smallest.peak_bytes - 1, "host", 1))


def test_graphs_are_kept_where_that_saves_time_and_to_the_byte() -> None:
    """A link so slow that all packs are kept: the rest of the memory is graphs'."""
    slow = replace(GPU, swap_in_bytes_per_ms=10.0)
    wanted = request(40_000, "device", 1, residency="kept")

    def chosen(budget_bytes: int, **more: bool) -> Choice:
        one = replace(wanted, budget_bytes=budget_bytes, settings=replace(wanted.settings, **more))
        return search(GRAPH, COSTS, slow, FP32, one)[0]

    found = chosen(21_000)
    graphs, peak = sum(found.plan.policy.graphs), found.plan.peak_bytes
    assert 0 < graphs < 4 * len(found.plan.packing.forward)
    assert f"{graphs} graphs of" in found.reason
    assert chosen(peak).plan == found.plan
    assert sum(chosen(peak - 1).plan.policy.graphs) < graphs
    assert sum(chosen(peak + 299).plan.policy.graphs) == graphs
    without = chosen(peak, keep_graphs=False)
    assert not without.plan.policy.graphs
    saved_ms = graphs * 1.0  # of 3 ms for recomputing and propagating, 1 is the recomputation
    assert found.prediction.step_ms == pytest.approx(without.prediction.step_ms - saved_ms)


def test_graphs_that_save_no_time_are_not_kept() -> None:
    """A link so slow that nothing else counts."""
    slow = replace(GPU, swap_in_bytes_per_ms=0.5, swap_out_bytes_per_ms=0.5, link_bytes_per_ms=0.8)
    wanted = request(14_000, "device", 1, residency="kept")
    assert not any(search(GRAPH, COSTS, slow, FP32, wanted)[0].plan.policy.graphs)


def test_without_a_budget_and_with_little_to_hide_all_is_one_pack_that_recomputes_nothing() -> None:
    slow = replace(
        COSTS,
        costs=tuple(replace(c, forward_ms=1e3, backward_ms=3e3, fused_ms=3e3, propagate_ms=2e3) for c in COSTS.costs),
    )
    plan = search(GRAPH, slow, GPU, FP32, request(None))[0].plan

    assert len(plan.packs) == 1
    assert not plan.policy.stash_on_host


def test_neighbours_are_tried_until_so_much_has_been_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Random(7)
    calls = [
        replace(COSTS.costs[0], forward_ms=draw.uniform(0.2, 2), backward_ms=draw.uniform(0.5, 6), propagate_ms=0.2)
        for _ in GRAPH.calls
    ]
    uneven, budget = replace(COSTS, costs=tuple(calls)), request(8_000)
    longest = search(GRAPH, uneven, GPU, FP32, budget)[0]
    assert "cut by trial" in longest.reason
    monkeypatch.setattr("harmony_ds.scheduler.search._WORK", 0)
    shortest = search(GRAPH, uneven, GPU, FP32, budget)[0]
    assert "cut by trial" not in shortest.reason
    assert shortest.prediction.step_ms > longest.prediction.step_ms


@pytest.mark.parametrize("pack_layers", [1, 3, 8])
def test_a_pack_size_that_is_given_is_kept(pack_layers: int) -> None:
    assert largest_pack(choose(request(None, pack_layers=pack_layers))) == pack_layers


def test_a_pack_size_that_does_not_fit_is_an_error_even_if_a_smaller_one_would() -> None:
    budget = choose(request(None, "host", 2)).peak_bytes
    choose(request(budget, "host"))
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
    smallest = int(re.findall(r"needs ([\d,]+) bytes", message)[0].replace(",", ""))

    assert f"the budget is 1,000 bytes: {smallest - 1000:,} too many" in message
    assert choose(request(smallest)).peak_bytes == smallest
    gib = float(re.findall(r"raise harmony.device_memory_gib to ([\d.e-]+) \(GiB\) or more", message)[0])
    assert smallest <= gib * 2**30 < 1.01 * smallest
    with pytest.raises(DoesNotFitError, match=": 1 too many"):
        choose(request(smallest - 1))
    for key in ("harmony.device_memory_gib", "train_micro_batch_size_per_gpu", "harmony.layers"):
        assert key in message
    for pack_layers in (None, 1):  # nothing is resident, and no pack can be smaller
        with pytest.raises(DoesNotFitError, match="Ways out") as caught:
            choose(request(1_000, pack_layers=pack_layers))
        assert "harmony.pack_layers" not in str(caught.value) and "harmony.residency" not in str(caught.value)
    assert re.search(r"1,024 bytes of weights .* 1,024 of gradients, 128 that are resident", message)
    assert "4 micro-batches" in message


@pytest.mark.parametrize(
    ("most", "said"),
    [
        ({"forward": ForwardBytes(peak_bytes=98_765)}, "the forward pass of layer"),
        ({"backward": BackwardBytes(peak_bytes=98_765)}, "the backward pass of layer"),
        ({"backward": BackwardBytes(code_peak_bytes=98_765)}, "the backward pass of the code after layer"),
    ],
)
def test_where_nothing_fits_the_error_names_what_takes_most_beside_weights(most: dict[str, Any], said: str) -> None:
    costs = list(COSTS.costs)
    costs[5] = replace(costs[5], **most)
    expected = (
        rf"With one micro-batch, {said} {re.escape(GRAPH.layers[GRAPH.calls[5]].name)} takes most: 98,765 bytes\."
    )
    with pytest.raises(DoesNotFitError, match=expected):
        search(GRAPH, replace(COSTS, costs=tuple(costs)), GPU, FP32, request(1_000))
    with pytest.raises(DoesNotFitError, match="the loss takes most: 77,777"):
        search(GRAPH, replace(COSTS, tail_bytes=77_777), GPU, FP32, request(1_000))


@pytest.mark.parametrize(("machine", "deferred"), pairs([GPU, CPU], [True, False]))
def test_plans_are_found_without_grouping(machine: Machine, deferred: bool) -> None:
    policy = Policy(deferred_update=deferred, grouping=False)
    wanted = replace(request(40_000, residency="auto"), policy=policy, micro_batches=7)
    assert search(GRAPH, COSTS, machine, FP32, wanted)[0].plan.peak_bytes <= 40_000


def test_an_error_that_is_caught_keeps_no_frame_alive() -> None:
    """Frames of the caller hold tensors on the device, which would stay until Python collects garbage."""
    held: list[weakref.ref[Random]] = []

    def ask() -> None:
        local = Random()
        held.append(weakref.ref(local))
        with suppress(DoesNotFitError):
            search(GRAPH, COSTS, CPU, FP32, request(1))

    gc.disable()
    try:
        ask()
        assert held[0]() is None
    finally:
        gc.enable()


def test_packs_of_layers_that_compute_much_and_weigh_little_are_cut_by_what_they_compute() -> None:
    graph = graph_of([256] * 12)
    calls = tuple(
        replace(COSTS.costs[0], forward=replace(COSTS.costs[0].forward, graph_bytes=9_000 if p < 4 else 100))
        for p in range(12)
    )
    costs = replace(COSTS, calls=graph.calls, costs=calls)
    cuts = Cuts(costs, Packer(graph, costs, FP32), request(60_000))

    assert cuts.bounds(Cut(CandidateKind.WORKING, 5)) == ((0, 1, 2, 3, 5, 12), (0, 1, 2, 3, 5))
    assert cuts.bounds(Cut(CandidateKind.WORKING, 5, forward=2)) == ((0, 1, 2, 3, 5, 12), (0, 2, 5))
    assert cuts.bounds(Cut(CandidateKind.WORKING, 5, forward=6)) is None
    pipeline = Packer(graph, costs, FP32, Policy(pipeline=2))
    assert Cuts(costs, pipeline, request(60_000)).bounds(Cut(CandidateKind.WORKING, 5, forward=2)) is None


def test_cuts_of_large_packs_move_by_a_quarter_of_the_pack_too() -> None:
    point = Point((0, 40, 60), (0, 40), 0, frozenset(), frozenset(), prefetch=True)
    cuts = {near.backward[1] for near in neighbours_by_cuts(point, 1) if len(near.backward) == 3}
    assert cuts == {30, 39, 41, 45}
