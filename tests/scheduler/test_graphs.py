"""How many graphs fit: what is certain to fit does, and what would fit is found."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from harmony_ds.config import HarmonySettings
from harmony_ds.profiler.costs import CallCost, CostTable
from harmony_ds.scheduler.candidates import policies
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.graphs import Graphs
from harmony_ds.scheduler.packing import Packer
from harmony_ds.scheduler.peaks import Peaks
from harmony_ds.scheduler.plan import Packing, Policy
from tests.scheduler.examples import FP32, graph_of


def random_cost(draw: random.Random) -> CallCost:
    def some(most: int = 3_000) -> int:
        return draw.choice((0, draw.randrange(most)))

    graph = 2_000 + some(8_000)
    return CallCost(
        alive_bytes=1_000 + some(),
        alive_and_stashed_bytes=some(),
        alive_after_forward_bytes=some(),
        stash_bytes=1_000 + some(),
        stash_again_bytes=some(),
        stash_again_at_cut_bytes=some(),
        stash_base_bytes=some(),
        shared_bytes=some(),
        forward_bytes=some(),
        graph_bytes=graph,
        kept_bytes=graph - some(1_000),
        settle_bytes=some(6_000),
        backward_bytes=some(12_000),
        leaf_bytes=some(),
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
    every = policies(packing, True, request)
    for place in draw.sample(range(len(every)), min(len(every), 8)):
        yield costs, request, packing, every[place]


@pytest.mark.parametrize("seed", range(60))
def test_what_is_certain_to_fit_fits(seed: int) -> None:
    for costs, request, packing, policy in random_cases(seed):
        peaks = Peaks(costs, request)
        without = peaks.stages(packing, policy)
        for budget in (max(without), int(1.1 * max(without)), 2 * max(without)):
            for way in Graphs(costs, request, peaks).ways(packing, policy, without, budget):
                assert peaks.of(packing, way) <= budget


@pytest.mark.parametrize("seed", range(20))
def test_with_room_for_all_every_pack_that_stays_keeps_them(seed: int) -> None:
    for costs, request, packing, policy in random_cases(seed):
        peaks = Peaks(costs, request)
        graphs = Graphs(costs, request, peaks).fitting(packing, policy, peaks.stages(packing, policy), 10**9).graphs
        stays = {*policy.kept, *policy.resident} & {*packing.forward} & {*packing.backward[:-1]}
        assert {index for index, count in enumerate(graphs) if count} == stays
        assert {graphs[index] for index in stays} <= {request.micro_batches}


def test_a_pack_named_first_has_its_graphs_before_others() -> None:
    graph = graph_of([1_000] * 3)
    cost = CallCost(stash_bytes=10, kept_bytes=1_000, needs_backward=True, forward_ms=1, backward_ms=3, propagate_ms=2)
    costs = CostTable(graph.calls, (replace(cost, kept_bytes=900), cost, cost), tail_bytes=0)
    request = PlanRequest(HarmonySettings(), 4, 10**9, resident_bytes=0, policy=Policy())
    packing = Packer(graph, costs, FP32).packing((0, 1, 2, 3))
    policy = Policy(kept=(0, 1), prefetch=False)
    peaks = Peaks(costs, request)
    graphs, without = Graphs(costs, request, peaks), peaks.stages(packing, policy)

    assert graphs.fitting(packing, policy, without, max(without) + 1_800).graphs == (2, 0, 0)
    assert graphs.fitting(packing, policy, without, max(without) + 1_800, before=1).graphs == (0, 1, 0)
    assert graphs.fitting(packing, policy, without, max(without)).graphs == ()
