"""Whether joined layer calls are advised, over costs that were made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harmony_ds.config import HarmonySettings
from harmony_ds.decomposer.graph import LayerGraph, ParameterSpec
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.costs import BackwardBytes, CallCost, CostTable, ForwardBytes, StashBytes
from harmony_ds.scheduler.joining import Advice, JoinedCosts, advise
from harmony_ds.scheduler.plan import Policy
from harmony_ds.scheduler.profile import Machine
from harmony_ds.scheduler.search import search
from tests.scheduler.examples import CPU, FP32, GPU, costs_of, graph_of

LAYERS, ELEMENTS, GROUP, ROWS = 4, 1000, 8, 2
COST = CallCost(
    stash=StashBytes(new_bytes=400),
    forward=ForwardBytes(peak_bytes=800, graph_bytes=800),
    backward=BackwardBytes(peak_bytes=4_000 + 1_600),
    needs_backward=True,
    forward_ms=1.0,
    backward_ms=3.0,
    fused_ms=3.0,
    propagate_ms=2.0,
)
FAST_LINK = {"swap_in_bytes_per_ms": 1e9, "swap_out_bytes_per_ms": 1e9, "link_bytes_per_ms": 1e9, "swap_ms": 0.0}


def advice(
    machine: Machine, costs: CostTable | None = None, graph: LayerGraph | None = None, budget_bytes: int | None = None
) -> Advice | None:
    graph = graph or graph_of([ELEMENTS] * LAYERS)
    costs = costs or costs_of(graph.calls, COST)
    machine = replace(machine, **FAST_LINK, update_elements_per_ms=1e9, norm_elements_per_ms=1e9)
    request = PlanRequest(HarmonySettings(residency="off"), GROUP, budget_bytes, 0, Policy())
    (now,) = search(graph, costs, machine, FP32, request)
    return advise(now, ROWS, request, JoinedCosts(graph, costs, machine, FP32))


def memory_bound(share: float) -> Machine:
    """A machine on which moving a layer's weights takes this share of its forward pass."""
    return replace(CPU, host_bytes_per_ms=4 * ELEMENTS / share)


def test_calls_bound_by_the_traffic_of_weights_are_advised_to_be_joined_and_those_bound_by_rows_are_not() -> None:
    assert advice(memory_bound(0.01)) is None
    found = advice(memory_bound(0.5))

    assert found is not None
    assert found.rows == GROUP * ROWS
    assert found.step_ms < 0.5 * found.now_ms
    assert f'"harmony": {{"micro_batch": {GROUP * ROWS}}}' in str(found)
    assert "predicted (not measured)" in str(found)


def test_joined_calls_that_do_not_fit_are_not_advised() -> None:
    wide = costs_of(tuple(range(LAYERS)), replace(COST, forward=replace(COST.forward, peak_bytes=50_000)))
    assert advice(memory_bound(0.5), wide, budget_bytes=None) is not None
    assert advice(memory_bound(0.5), wide, budget_bytes=80_000) is None


def test_fewer_micro_batches_are_joined_where_all_do_not_fit() -> None:
    wide = costs_of(tuple(range(LAYERS)), replace(COST, forward=replace(COST.forward, peak_bytes=10_000)))
    found = advice(memory_bound(0.5), wide, budget_bytes=60_000)
    assert found is not None
    assert found.rows == GROUP * ROWS // 4


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_calls_bound_by_issuing_are_advised_to_be_joined(share: float) -> None:
    """A large last layer, which keeps the device busy, shows what the others' work takes it."""
    graph = graph_of([ELEMENTS] * LAYERS + [100 * ELEMENTS])
    shapes = [(10, spec.numel // 10) for spec in graph.parameters]
    matrices = zip(graph.parameters, shapes, strict=True)
    graph = replace(graph, parameters=tuple(ParameterSpec(spec.name, shape, True) for spec, shape in matrices))
    costs = replace(costs_of(graph.calls, COST), issue_share=share)

    machine = replace(GPU, device_update_elements_per_ms=1e9, host_bytes_per_ms=1e9)

    assert (advice(machine, costs, graph) is not None) == (share == 1.0)


def test_bytes_grow_with_rows_but_for_the_gradient_that_waits() -> None:
    graph, costs = graph_of([ELEMENTS] * LAYERS), costs_of(tuple(range(LAYERS)), COST, tail_bytes=10, held_bytes=20)
    joined_table = JoinedCosts(graph, costs, memory_bound(0.5), FP32).joined_table
    joined = joined_table(3)

    assert joined_table(1) == costs
    assert joined.costs[0].backward.peak_bytes == 4 * ELEMENTS + 3 * 1_600
    assert joined.costs[0].stash.new_bytes == 3 * COST.stash.new_bytes
    assert (joined.tail_bytes, joined.held_bytes) == (30, 60)
