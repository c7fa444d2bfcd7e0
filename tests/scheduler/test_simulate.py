"""The simulated step: never shorter than what any stream has to do, and moving the bytes of the tasks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.stash_order.run import weights_first
from harmony_ds.config import HarmonySettings
from harmony_ds.scheduler.choose import PlanRequest, make_plan
from harmony_ds.scheduler.costs import CostTable, StashBytes
from harmony_ds.scheduler.packing import Packer
from harmony_ds.scheduler.partition import Bounds, uniform_bounds
from harmony_ds.scheduler.plan import ALL_PACKS, Plan, Policy, TaskKind
from harmony_ds.scheduler.profile import Machine
from harmony_ds.scheduler.simulate import simulate, step_ms
from harmony_ds.scheduler.spans import COMPUTE, STREAMS, SWAP_IN, SWAP_OUT, UPDATE
from harmony_ds.scheduler.swaps import swaps_of
from tests.scheduler.examples import COST, CPU, FP32, GPU, costs_of, graph_of


def planned(
    layers: int,
    pack_layers: int,
    policy: Policy,
    micro_batches: int = 3,
    numel: int = 250,
    forward: Bounds | None = None,
) -> tuple[Plan, CostTable]:
    graph = graph_of([numel] * layers)
    costs = replace(costs_of(graph.calls, COST), head_ms=0.25, tail_ms=0.5)
    packing = Packer(graph, costs, FP32).packing(uniform_bounds(layers, pack_layers), forward)
    return make_plan(packing, costs, PlanRequest(HarmonySettings(), micro_batches, None, 0, policy), policy), costs


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, CostTable, Machine]:
    layers = draw(st.integers(1, 6))
    policy = Policy(
        prefetch=draw(st.booleans()),
        stash_on_host=draw(st.integers(0, 3)),
        crossing_on_host=draw(st.booleans()),
        deferred_update=draw(st.booleans()),
        grouping=draw(st.booleans()),
    )
    plan, costs = planned(layers, draw(st.integers(1, 3)), policy, draw(st.integers(1, 4)))
    machine = replace(draw(st.sampled_from([GPU, CPU])), beside_update=draw(st.sampled_from([0.5, 0.8, 1.0])))
    return plan, costs, machine


def random_case(choose: Random) -> tuple[Plan, CostTable, Machine]:
    """A plan of layers of all sizes, which any stream of the machine may hold up."""

    def between(low: float, high: float) -> float:
        return float(2 ** choose.uniform(low, high))

    layers = choose.randint(3, 8)
    graph = graph_of(int(between(4, 12)) for _ in range(layers))
    calls = [
        replace(COST, stash=StashBytes(int(between(6, 12))), forward_ms=between(-4, 3), backward_ms=between(-3, 3))
        for _ in range(layers)
    ]
    costs = replace(costs_of(graph.calls), costs=tuple(calls))
    machine = replace(
        GPU,
        swap_in_bytes_per_ms=between(8, 12),
        swap_out_bytes_per_ms=between(8, 12),
        link_bytes_per_ms=between(8, 12),
        host_bytes_per_ms=between(9, 13),
        update_elements_per_ms=between(5, 10),
        beside_update=choose.choice([0.6, 0.8, 1.0]),
    )
    cuts = sorted(choose.sample(range(1, layers), choose.randint(1, layers - 1)))
    packing = Packer(graph, costs, FP32).packing((0, *cuts, layers))
    policy = Policy(
        prefetch=choose.random() < 0.8,
        stash_on_host=choose.choice([0, len(packing.forward)]),
        deferred_update=choose.random() < 0.7,
    )
    request = PlanRequest(HarmonySettings(), choose.randint(1, 4), None, 0, policy)
    return make_plan(packing, costs, request, policy), costs, machine


def test_no_random_plan_takes_less_than_its_jobs_alone() -> None:
    choose = Random(3)
    for _ in range(200):
        case = random_case(choose)
        took = step_ms(*case)
        assert step_ms(*case, wanted_ms=took) == took


@given(cases(), st.floats(0.5, 0.999))
def test_only_times_longer_than_wanted_are_given_up(case: tuple[Plan, CostTable, Machine], share: float) -> None:
    took = step_ms(*case)
    assert step_ms(*case, wanted_ms=took) == took
    assert step_ms(*case, wanted_ms=share * took) in (took, float("inf"))
    assert step_ms(*case, wanted_ms=1e-3 * took) == float("inf")


@given(cases())
def test_work_of_a_stream_does_not_overlap_and_no_step_is_shorter(case: tuple[Plan, CostTable, Machine]) -> None:
    plan, costs, machine = case
    prediction = simulate(plan, costs, machine)
    for stream in STREAMS:
        own = [span for span in prediction.spans if span.stream == stream]
        assert all(a.end_ms <= b.begin_ms + 1e-9 for a, b in itertools.pairwise(own))

    assert set(prediction.busy_ms) == set(STREAMS)
    if machine.copies_overlap:
        assert prediction.step_ms >= max(prediction.busy_ms.values()) - 1e-6
    else:
        assert prediction.step_ms >= sum(prediction.busy_ms[s] for s in (COMPUTE, SWAP_IN, SWAP_OUT)) - 1e-6
        assert prediction.step_ms >= prediction.busy_ms[UPDATE] - 1e-6
    assert 0.0 <= prediction.idle_share <= 1.0


def test_one_pack_without_anything_to_hide_takes_what_its_parts_take() -> None:
    plan, costs = planned(2, 2, Policy(prefetch=False, deferred_update=False))
    prediction = simulate(plan, costs, CPU)

    swap_in, out = 0.01 + 2048 / 1000, 0.01 + 2048 / 1000
    compute = 3 * (0.25 + 2 * 2.5 + 0.5)
    update = 500 / 200 + 500 / 2000  # with the norm, which no copy takes along
    # The next step's swap-in waits for the update.
    assert prediction.step_ms == pytest.approx(swap_in + compute + out + update)
    assert prediction.busy_ms[COMPUTE] == pytest.approx(compute)


def test_prefetch_hides_swap_ins_under_compute() -> None:
    ahead, costs = planned(4, 1, Policy(prefetch=True))
    late, _ = planned(4, 1, Policy(prefetch=False))

    assert simulate(ahead, costs, GPU).step_ms < simulate(late, costs, GPU).step_ms
    assert simulate(ahead, costs, GPU).swaps == simulate(late, costs, GPU).swaps


def test_bytes_are_those_of_the_tasks() -> None:
    plan, costs = planned(3, 1, Policy(stash_on_host=ALL_PACKS))
    swaps = swaps_of(plan, costs)

    assert swaps.weights_in == (3 + 2) * 1024  # 250 elements are aligned to 1,024 bytes
    assert swaps.gradients_out == 3 * 1024
    assert swaps.stash_out == swaps.stash_in == 3 * 2 * 256
    assert swaps.total == 8 * 1024 + 2 * 3 * 2 * 256
    swaps = swaps_of(*planned(5, 2, Policy(stash_on_host=1), forward=(0, 2, 3)))
    assert swaps.stash_out == swaps.stash_in == 3 * 2 * 256  # of a backward pack's two calls, one belongs to that pack
    assert swaps_of(*planned(3, 1, Policy(kept=(1,)))).weights_in == 4 * 1024  # what is kept is not swapped in again


def test_what_limits_a_step_gets_better_when_that_is_faster() -> None:
    slow = replace(GPU, swap_in_bytes_per_ms=10.0, link_bytes_per_ms=1_010.0)
    plan, costs = planned(4, 1, Policy())
    prediction = simulate(plan, costs, slow)

    assert prediction.bottleneck == SWAP_IN
    assert simulate(plan, costs, replace(slow, swap_in_bytes_per_ms=20.0)).step_ms < prediction.step_ms


def test_updates_that_are_not_deferred_run_under_the_backward_pass() -> None:
    immediate, costs = planned(4, 1, Policy(deferred_update=False))
    deferred, _ = planned(4, 1, Policy(deferred_update=True))
    slow = replace(GPU, update_elements_per_ms=30.0)

    assert simulate(immediate, costs, slow).step_ms < simulate(deferred, costs, slow).step_ms


def test_compute_and_updates_slow_each_other_down_where_they_share_cores_and_compute_alone_is_not() -> None:
    both, only = planned(4, 1, Policy(deferred_update=False)), planned(1, 1, Policy(prefetch=False), numel=0)
    shared = replace(CPU, beside_update=0.3)

    assert simulate(*both, shared).step_ms > simulate(*both, CPU).step_ms
    assert simulate(*only, shared).step_ms == pytest.approx(simulate(*only, CPU).step_ms)


def test_weights_come_at_the_pace_of_a_slower_disk_which_updates_use_too_and_stash_at_that_of_the_link() -> None:
    plan, costs = planned(4, 1, Policy(deferred_update=False, stash_on_host=ALL_PACKS))
    memory, fast = (simulate(plan, costs, machine) for machine in (GPU, GPU.with_disk(1e12, 0.0, 2)))
    assert fast.step_ms <= (1 + 1e-9) * memory.step_ms

    disk = replace(GPU.with_disk(GPU.swap_in_bytes_per_ms / 40, 0.0, 2), update_elements_per_ms=30.0)
    alone = simulate(plan, costs, disk)
    assert alone.busy_ms["disk"] == pytest.approx(40 * memory.swaps.weights_in / GPU.swap_in_bytes_per_ms, rel=0.01)
    assert alone.busy_ms[SWAP_IN] < memory.busy_ms[SWAP_IN]  # the stash alone
    assert alone.step_ms > simulate(plan, costs, replace(disk, update_disk=0.0)).step_ms


IMMEDIATE = Policy(deferred_update=False)


@pytest.mark.parametrize("machine", [GPU, CPU], ids=["gpu", "cpu"])
def test_no_step_is_shorter_without_grouping(machine: Machine) -> None:
    slow = replace(machine, update_elements_per_ms=30.0)
    on, costs = planned(4, 1, IMMEDIATE)
    off, _ = planned(4, 1, replace(IMMEDIATE, grouping=False))

    assert simulate(off, costs, slow).step_ms > simulate(on, costs, slow).step_ms


def test_without_grouping_every_micro_batch_moves_weights_and_gradients() -> None:
    grouped, costs = planned(3, 1, IMMEDIATE)
    alone, _ = planned(3, 1, replace(IMMEDIATE, grouping=False))
    on, off = simulate(grouped, costs, GPU), simulate(alone, costs, GPU)

    assert (off.swaps.weights_in, off.swaps.gradients_out) == (3 * on.swaps.weights_in, 3 * on.swaps.gradients_out)
    assert off.busy_ms[COMPUTE] == pytest.approx(on.busy_ms[COMPUTE])
    # The sums of the second and the third micro-batch's gradients, three times as many bytes as for their norm; and that,
    # which the device takes of gradients that leave whole.
    norms = 3 * 250 / GPU.norm_elements_per_ms
    assert off.busy_ms[UPDATE] - on.busy_ms[UPDATE] == pytest.approx((2 * 3 + 1) * norms)


def test_no_run_waits_for_the_next_packs_weights_or_for_gradients_on_their_way_out() -> None:
    policy = Policy(prefetch=True, stash_on_host=ALL_PACKS, deferred_update=False)
    plan, costs = planned(6, 1, policy, micro_batches=4, numel=1000)  # weights take 4 ms, a run 3 ms, a stash 0.3 ms
    early = simulate(plan, costs, GPU)
    late = simulate(replace(plan, tasks=weights_first(plan.tasks)), costs, GPU)
    assert early.swaps == late.swaps
    assert early.step_ms < late.step_ms

    # Neither link is full, and compute never waits for the first stash of a pack.
    runs = [span for span in early.spans if span.stream == COMPUTE and span.tasks[0].kind is TaskKind.BACKWARD]
    assert len({span.tasks[0].pack for span in runs}) == 5
    assert all(b.begin_ms - a.end_ms < 0.02 for a, b in itertools.pairwise(runs))

    slow = replace(GPU, swap_out_bytes_per_ms=100.0, link_bytes_per_ms=2_000.0)  # gradients take 40 ms
    stash = next(s for s in simulate(plan, costs, slow).spans if str(s.tasks[0]) == "T3.1")
    gradients = next(s for s in simulate(plan, costs, slow).spans if str(s.tasks[0]) == "O4")
    assert stash.end_ms < gradients.end_ms
