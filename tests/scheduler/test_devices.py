"""Plans of several devices: gradients are reduced once, then each device swaps out and updates its own piece."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harmony_ds.config import HarmonySettings
from harmony_ds.scheduler.choose import PlanRequest, among_devices, make_plan
from harmony_ds.scheduler.compose import Group, compose_step
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.packing import Packer
from harmony_ds.scheduler.plan import Plan, Policy
from harmony_ds.scheduler.search import search
from harmony_ds.scheduler.simulate import simulate
from harmony_ds.scheduler.spans import PEER, SWAP_OUT, UPDATE
from harmony_ds.scheduler.swaps import lower_bound_bytes, swaps_of
from tests.scheduler.examples import COST, CPU, FP32, GPU, costs_of, graph_of, packs_of, parse, reused, text
from tests.scheduler.validate import PlanError, validate

PEERS = {"peer_bytes_per_ms": 500.0, "peer_ms": 0.25}
NUMEL = 1000
DEFERRED = Policy(prefetch=False, devices=2)
ON_HOST = replace(DEFERRED, reduce_on_host=True)
SHARED = replace(DEFERRED, swaps_in_shares=True)


def planned(policy: Policy, layers: int = 2, micro_batches: int = 2) -> tuple[Plan, CostTable]:
    graph = graph_of([NUMEL] * layers)
    costs = costs_of(graph.calls, COST)
    packing = Packer(graph, costs, FP32, policy).packing(tuple(range(layers + 1)))
    plan = make_plan(packing, costs, PlanRequest(HarmonySettings(), micro_batches, None, 0, policy), policy)
    validate(packing, plan.tasks, Group.with_fresh(micro_batches), policy)
    return plan, costs


def test_every_device_has_whole_grains_of_each_parameter() -> None:
    pack = planned(DEFERRED)[0].packs[0]
    # 1000 elements are 8 grains of 128, of which the last one is not full: 512 and 488 elements.
    assert pack.gradient_pieces == (4 * 512, 4 * 496)  # on the link aligned to 64 bytes
    assert pack.sent_bytes == (4 * 488, 4 * 512)
    assert pack.gradient_bytes == 4 * 1008  # on the device all of it
    assert pack.update_elements == 512
    assert [pack.swap_out_bytes(rank) for rank in (0, 1, None)] == [2048, 1984, 2048]
    assert Plan.from_json(planned(DEFERRED)[0].to_json()) == planned(DEFERRED)[0]

    alone = planned(Policy())[0].packs[0]
    assert (alone.gradient_pieces, alone.sent_bytes, alone.update_elements) == ((), (), NUMEL)
    assert alone.swap_out_bytes(0) == alone.swap_out_bytes() == alone.gradient_bytes


@pytest.mark.parametrize(
    ("policy", "tasks"),
    [
        (replace(DEFERRED, devices=1), "I0 F0.0 E0 I1 L1.0 O1 U1 E1 I0 B0.0 G1 O0 U0 E0 G0"),
        (DEFERRED, "I0 F0.0 E0 I1 L1.0 R1 O1 U1 E1 I0 B0.0 G1 R0 O0 U0 E0 G0"),
        (ON_HOST, "I0 F0.0 E0 I1 L1.0 O1 R1 U1 E1 I0 B0.0 G1 O0 R0 U0 E0 G0"),
        (SHARED, "I0 A0 F0.0 E0 I1 A1 L1.0 R1 O1 U1 E1 I0 A0 B0.0 G1 R0 O0 U0 E0 G0"),
        (replace(SHARED, prefetch=True), "I0 A0 I1 A1 F0.0 E0 I0 A0 L1.0 R1 O1 U1 E1 B0.0 G1 R0 O0 U0 E0 G0"),
    ],
    ids=["one device", "reduced before swap-outs", "reduced after them", "gathered after swap-ins", "and ahead"],
)
def test_a_step_of_several_devices_is_composed(policy: Policy, tasks: str) -> None:
    step = compose_step(reused(packs_of(True, True)), Group.with_fresh(1), replace(policy, deferred_update=False))
    assert text(step) == tasks


def test_bytes_do_not_depend_on_the_number_of_micro_batches() -> None:
    few, costs = planned(DEFERRED, micro_batches=1)
    many, _ = planned(DEFERRED, micro_batches=16)

    for rank in (0, 1, None):
        assert swaps_of(few, costs, rank).sent == swaps_of(many, costs, rank).sent > 0
        assert swaps_of(few, costs, rank).gradients_out == swaps_of(many, costs, rank).gradients_out
        assert swaps_of(few, costs, rank).total == lower_bound_bytes(few, rank)
    assert sum(swaps_of(few, costs, rank).sent for rank in (0, 1)) == 2 * 4 * NUMEL


def test_a_device_that_computes_alone_waits_for_the_others_gradients() -> None:
    plan, costs = planned(replace(DEFERRED, deferred_update=False), layers=1)
    alone, _ = planned(Policy(prefetch=False, deferred_update=False), layers=1)
    two = simulate(plan, costs, replace(CPU, **PEERS))
    one = simulate(alone, costs, CPU)

    reduce_ms = 0.25 + 2048 / 500
    assert two.busy_ms[PEER] == pytest.approx(reduce_ms)
    assert PEER not in one.busy_ms
    saved = (4 * 1008 - 2048) / 1000 + (NUMEL - 512) * (1 / 200 + 1 / 2000)
    assert two.step_ms == pytest.approx(one.step_ms + reduce_ms - saved)


def test_reducing_runs_beside_compute_where_copies_do() -> None:
    plan, costs = planned(replace(DEFERRED, deferred_update=False), layers=3)
    machine = replace(GPU, **PEERS)
    spans = {span.name: span for span in simulate(plan, costs, machine).spans}

    assert spans["R2"].stream == PEER and spans["O2"].stream == SWAP_OUT and spans["U2"].stream == UPDATE
    assert spans["R2"].end_ms <= spans["O2"].begin_ms
    backward = spans["B1.0+1"]
    assert max(spans["R2"].begin_ms, backward.begin_ms) < min(spans["R2"].end_ms, backward.end_ms)


def test_peers_without_a_link_of_their_own_slow_swaps_down() -> None:
    plan, costs = planned(replace(DEFERRED, deferred_update=False), layers=6)
    machine = replace(GPU, **{**PEERS, "peer_bytes_per_ms": 900.0}, link_bytes_per_ms=1_000.0)
    assert (
        simulate(plan, costs, replace(machine, peers_share_link=True)).step_ms > simulate(plan, costs, machine).step_ms
    )


def test_gradients_that_are_reduced_on_the_host_leave_whole() -> None:
    plan, costs = planned(ON_HOST)
    pack = plan.packs[0]
    assert pack.sent_bytes == ()
    assert pack.swap_out_bytes(0) == pack.swap_out_bytes() == pack.gradient_bytes == 4 * 1008
    assert [pack.piece_bytes(rank) for rank in (0, 1, None)] == [4 * 512, 4 * 496, 4 * 512]
    assert pack.update_elements == 512
    assert swaps_of(plan, costs).sent == 0 and swaps_of(plan, costs).total == lower_bound_bytes(plan)


def test_the_host_reads_all_gradients_and_writes_their_sum() -> None:
    plan, costs = planned(replace(ON_HOST, deferred_update=False), layers=3)
    spans = {span.name: span for span in simulate(plan, costs, GPU).spans}
    assert spans["R2"].stream == spans["U2"].stream == UPDATE and spans["O2"].stream == SWAP_OUT
    assert spans["O2"].end_ms <= spans["R2"].begin_ms < spans["R2"].end_ms <= spans["U2"].begin_ms
    assert spans["R2"].end_ms - spans["R2"].begin_ms >= GPU.host_sum_ms(512, 2) == 3 * 512 / GPU.norm_elements_per_ms


@pytest.mark.parametrize(
    ("wanted", "rates", "on_host"),
    [
        ("auto", {"peer_bytes_per_ms": 5000.0}, [False]),
        ("auto", {"peer_bytes_per_ms": 5000.0, "peers_share_link": True}, [False, True]),
        ("auto", {"peer_bytes_per_ms": 500.0}, [False, True]),
        ("auto", {"copies_overlap": False}, [True]),
        ("device", {"peer_bytes_per_ms": 500.0}, [False]),
        ("device", {"copies_overlap": False}, [False]),
        ("host", {"peer_bytes_per_ms": 5000.0}, [True]),
    ],
)
def test_reducing_on_the_host_is_tried_unless_devices_reach_each_other_faster(
    wanted: str, rates: dict[str, Any], on_host: list[bool]
) -> None:
    request = PlanRequest(HarmonySettings(reduce=wanted), 3, 10_000, 0, DEFERRED, beside_bytes=7, exchange_bytes=300)
    machine = replace(GPU, **rates)  # whose link moves 1000 bytes in a millisecond
    found = among_devices(request, machine)
    assert [one.policy.reduce_on_host for one in found] == on_host
    for one in found:  # the host needs no buffers on the device
        room = (10_000, 7) if one.policy.reduce_on_host else (9_700, 307)
        assert (one.budget_bytes, one.beside_bytes) == room
    alone = replace(request, policy=replace(DEFERRED, devices=1))
    assert among_devices(alone, machine) == (alone,)


def test_the_faster_way_to_reduce_is_taken() -> None:
    graph = graph_of([NUMEL] * 4)
    costs = costs_of(graph.calls, COST)
    request = PlanRequest(HarmonySettings(), 3, None, 0, Policy(deferred_update=False, devices=2))
    slow_peers = replace(GPU, peer_bytes_per_ms=50.0)
    slow_host = replace(GPU, peer_bytes_per_ms=900.0, norm_elements_per_ms=20.0)
    for machine, on_host, place in ((slow_peers, True, "host"), (slow_host, False, "devices")):
        choices = search(graph, costs, machine, FP32, request, top=10)
        assert choices[0].plan.policy.reduce_on_host is on_host
        assert choices[0].reason.endswith(f"; whole weights, gradients reduced on the {place}")
        both = [
            search(graph, costs, machine, FP32, replace(request, settings=HarmonySettings(reduce=place)))[0]
            for place in ("device", "host")
        ]
        assert choices[0].prediction.step_ms == min(one.prediction.step_ms for one in both)


def test_a_share_is_whole_grains_and_what_is_left_comes_to_all() -> None:
    whole, costs = planned(replace(DEFERRED, devices=3))
    shared, _ = planned(replace(DEFERRED, devices=3, swaps_in_shares=True))
    pack = shared.packs[0]
    # 1008 elements are three times 256, and 240.
    assert pack.gathered_bytes == 4 * 2 * 256
    assert pack.swap_in_bytes(of_share=True) == 4 * (256 + 240)
    assert pack.swap_in_bytes(of_share=False) == pack.weight_bytes == 4 * 1008
    assert (
        swaps_of(whole, costs).weights_in - swaps_of(shared, costs).weights_in
        == swaps_of(shared, costs).sent - swaps_of(whole, costs).sent
    )
    assert swaps_of(shared, costs).total == lower_bound_bytes(shared)


def test_compute_waits_for_the_shares_of_the_others() -> None:
    plan, costs = planned(replace(DEFERRED, deferred_update=False, swaps_in_shares=True), layers=3)
    spans = {span.name: span for span in simulate(plan, costs, replace(GPU, **PEERS)).spans}
    assert spans["A2"].stream == PEER
    assert spans["I2"].end_ms <= spans["A2"].begin_ms < spans["A2"].end_ms <= spans["L2.0+1"].begin_ms


@pytest.mark.parametrize(
    ("wanted", "rates", "shared"),
    [
        ("auto", {"peer_bytes_per_ms": 5000.0}, True),
        ("auto", {"peer_bytes_per_ms": 5000.0, "peers_share_link": True}, False),
        ("auto", {"peer_bytes_per_ms": 500.0}, False),
        ("share", {"peer_bytes_per_ms": 500.0}, True),
        ("whole", {"peer_bytes_per_ms": 5000.0}, False),
    ],
)
def test_weights_are_shared_where_devices_reach_each_other_faster_than_the_host(
    wanted: str, rates: dict[str, float], shared: bool
) -> None:
    request = PlanRequest(HarmonySettings(weights=wanted), 3, None, 0, DEFERRED)
    machine = replace(GPU, **rates)  # whose link moves 1000 bytes in a millisecond
    assert all(one.policy.swaps_in_shares is shared for one in among_devices(request, machine))
    without_link = among_devices(request, replace(machine, copies_overlap=False))
    assert [one.policy.swaps_in_shares for one in without_link] == [wanted == "share"]
    one = replace(request, policy=replace(DEFERRED, devices=1))
    assert not among_devices(one, machine)[0].policy.swaps_in_shares


def test_several_devices_keep_packs_from_forward_to_backward_and_none_from_step_to_step() -> None:
    graph = graph_of([NUMEL] * 6)
    costs = costs_of(graph.calls, replace(COST, stash=replace(COST.stash, new_bytes=2_000)))
    policy = Policy(deferred_update=False, devices=2)
    plans = []
    for residency in ("kept", "off"):
        request = PlanRequest(HarmonySettings(residency=residency), 3, 40_000, 0, policy)
        plans.append(search(graph, costs, replace(GPU, **PEERS), FP32, request)[0].plan)
    kept, none = plans
    assert kept.policy.kept and not none.policy.kept
    assert not kept.policy.resident and not none.policy.resident


ON_DEVICE, REDUCED_ON_HOST = "I0 L0.0 R0 O0 G0 E0 N U0", "I0 L0.0 O0 R0 G0 E0 N U0"
AT_ONCE, GATHERED = "I0 L0.0 O0 R0 U0 G0 E0", "I0 A0 L0.0 R0 O0 G0 E0 N U0"


@pytest.mark.parametrize(
    ("policy", "valid", "tasks", "message"),
    [
        (DEFERRED, ON_DEVICE, "I0 L0.0 O0 G0 E0 N U0", "one device's"),
        (DEFERRED, ON_DEVICE, "I0 R0 L0.0 O0 G0 E0 N U0", "before all of its gradients"),
        (DEFERRED, ON_DEVICE, "I0 L0.0 R0 R0 O0 G0 E0 N U0", "reduced twice"),
        (Policy(), "I0 L0.0 O0 G0 E0 N U0", ON_DEVICE, "no other device"),
        (ON_HOST, REDUCED_ON_HOST, "I0 L0.0 R0 O0 G0 E0 N U0", "before its gradients are there"),
        (ON_HOST, REDUCED_ON_HOST, "I0 L0.0 O0 R0 R0 G0 E0 N U0", "on the host twice"),
        (ON_HOST, REDUCED_ON_HOST, "I0 L0.0 O0 G0 E0 N R0 U0", "have not been reduced"),
        (replace(ON_HOST, deferred_update=False), AT_ONCE, "I0 L0.0 O0 U0 R0 G0 E0", "updated early"),
        (SHARED, GATHERED, "I0 L0.0 R0 O0 G0 E0 N U0", "not on the device"),
        (SHARED, GATHERED, "A0 I0 L0.0 R0 O0 G0 E0 N U0", "without a share"),
        (SHARED, GATHERED, "I0 A0 A0 L0.0 R0 O0 G0 E0 N U0", "gathered twice"),
        (SHARED, GATHERED, "I0 A0 L0.0 R0 O0 G0 E0 N U0 I0", "left on the device"),
    ],
)
def test_a_broken_list_is_caught(policy: Policy, valid: str, tasks: str, message: str) -> None:
    packing = reused(packs_of(True))
    validate(packing, parse(valid), Group.with_fresh(1), policy)
    with pytest.raises(PlanError, match=message):
        validate(packing, parse(tasks), Group.with_fresh(1), policy)
