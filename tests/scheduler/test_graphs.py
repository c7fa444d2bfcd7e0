"""How many graphs fit: what is certain to fit does, and what would fit is found."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from harmony_ds.config import HarmonySettings
from harmony_ds.scheduler.choose import PlanRequest, make_plan
from harmony_ds.scheduler.costs import BackwardBytes, CallCost, CostTable, ForwardBytes, StashBytes, WaitingBytes
from harmony_ds.scheduler.estimator import CandidateEstimator
from harmony_ds.scheduler.graphs import Graphs
from harmony_ds.scheduler.packing import Packer
from harmony_ds.scheduler.plan import Packing, Policy
from harmony_ds.scheduler.simulate import simulate
from harmony_ds.scheduler.swaps import swaps_of
from tests.scheduler.examples import FP32, GPU, graph_of


def random_cost(draw: random.Random) -> CallCost:
    def some(most: int = 3_000) -> int:
        return draw.choice((0, draw.randrange(most)))

    graph = 2_000 + some(8_000)
    return CallCost(
        waiting=WaitingBytes(alive_bytes=1_000 + some(), stashed_too_bytes=some(), after_forward_bytes=some()),
        stash=StashBytes(new_bytes=1_000 + some(), again_bytes=some(), again_at_cut_bytes=some(), base_bytes=some()),
        forward=ForwardBytes(peak_bytes=some(), graph_bytes=graph, kept_graph_bytes=graph - some(1_000)),
        backward=BackwardBytes(
            input_gradient_bytes=some(), code_peak_bytes=some(6_000), peak_bytes=some(12_000), unsummed_bytes=some()
        ),
        needs_backward=True,
        forward_ms=1.0,
        backward_ms=3.0,
        fused_ms=3.0,
        propagate_ms=2.0,
    )


def random_cases(seed: int) -> Iterator[tuple[CostTable, PlanRequest, Packing, Policy]]:
    draw = random.Random(seed)
    count = draw.randint(3, 7)
    graph = graph_of([1_000] * count)
    costs = CostTable(graph.calls, tuple(random_cost(draw) for _ in range(count)), tail_bytes=100, held_bytes=200)
    request = PlanRequest(HarmonySettings(), draw.choice((1, 2, 4, 9)), 10**9, resident_bytes=0, policy=Policy())
    cuts = (0, *sorted(draw.sample(range(1, count), draw.randint(1, count - 1))), count)
    forward = tuple(cut for cut in cuts[:-1] if cut in (0, cuts[-2]) or draw.random() < 0.7)
    packing = Packer(graph, costs, FP32).packing(cuts, forward)
    both = [index for index in packing.forward if index in packing.backward]
    for _ in range(8):
        states = {index: draw.randrange(3) for index in both}
        policy = Policy(
            kept=tuple(index for index in both if states[index] == 1),
            resident=tuple(index for index in both if states[index] == 2),
            stash_on_host=draw.randint(0, len(packing.forward)),
            prefetch=draw.random() < 0.5,
        )
        yield costs, request, packing, policy


def peaks_of(estimator: CandidateEstimator, packing: Packing, policy: Policy) -> list[int]:
    return estimator.stage_peaks(estimator.sample(packing, policy))


@pytest.mark.parametrize("seed", range(60))
def test_what_is_certain_to_fit_fits_and_short_groups_tell_all(seed: int) -> None:
    for costs, request, packing, policy in random_cases(seed):
        estimator = CandidateEstimator(costs, request)
        without, bytes_of = peaks_of(estimator, packing, policy), estimator.pack_bytes(packing, policy)
        for budget in (max(without), int(1.1 * max(without)), 2 * max(without)):
            graphs = Graphs(costs, replace(request, budget_bytes=budget))
            for before in (None, *policy.kept):
                more = graphs.fitting(packing, policy, without, bytes_of, before)
                plan = make_plan(packing, costs, request, more)
                assert max(peaks_of(estimator, packing, more)) == plan.peak_bytes <= budget
                sampled = estimator.sample(packing, more)
                assert estimator.step_ms(sampled, GPU, 16) == pytest.approx(
                    simulate(plan, costs, GPU).step_ms, rel=2e-2
                )
                assert estimator.swapped_bytes(sampled) == swaps_of(plan, costs).total


@pytest.mark.parametrize("seed", range(20))
def test_with_room_for_all_every_pack_that_stays_keeps_them(seed: int) -> None:
    for costs, request, packing, policy in random_cases(seed):
        estimator = CandidateEstimator(costs, request)
        peaks, bytes_of = peaks_of(estimator, packing, policy), estimator.pack_bytes(packing, policy)
        graphs = Graphs(costs, request).fitting(packing, policy, peaks, bytes_of).graphs
        stays = {*policy.kept, *policy.resident} & {*packing.forward} & {*packing.backward[:-1]}
        assert {index for index, count in enumerate(graphs) if count} == stays
        assert {graphs[index] for index in stays} <= {request.micro_batches}


def test_a_pack_named_first_has_its_graphs_before_others() -> None:
    graph = graph_of([1_000] * 3)
    cost = CallCost(
        stash=StashBytes(new_bytes=10),
        forward=ForwardBytes(kept_graph_bytes=1_000),
        needs_backward=True,
        forward_ms=1,
        backward_ms=3,
        propagate_ms=2,
    )
    costs = CostTable(
        graph.calls, (replace(cost, forward=replace(cost.forward, kept_graph_bytes=900)), cost, cost), tail_bytes=0
    )
    request = PlanRequest(HarmonySettings(), 4, 10**9, resident_bytes=0, policy=Policy())
    packing = Packer(graph, costs, FP32).packing((0, 1, 2, 3))
    policy = Policy(kept=(0, 1), prefetch=False)
    estimator = CandidateEstimator(costs, request)
    without, bytes_of = peaks_of(estimator, packing, policy), estimator.pack_bytes(packing, policy)

    def graphs(more_bytes: int, before: int | None = None) -> tuple[int, ...]:
        wanted = replace(request, budget_bytes=max(without) + more_bytes)
        return Graphs(costs, wanted).fitting(packing, policy, without, bytes_of, before).graphs

    assert graphs(1_800) == (2, 0, 0)
    assert graphs(1_800, before=1) == (0, 1, 0)
    assert graphs(0) == ()
