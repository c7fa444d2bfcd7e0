"""The order in which the passes of packs are order_tasks on several devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harmony_ds.config import HarmonySettings
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.costs import CallCost, ForwardBytes
from harmony_ds.scheduler.estimator import CandidateEstimator
from harmony_ds.scheduler.graphs import Graphs
from harmony_ds.scheduler.packing import Packer
from harmony_ds.scheduler.plan import Pack, Policy, Task, TaskKind
from harmony_ds.scheduler.waves import PackPass, order_tasks
from tests.scheduler.examples import FP32, costs_of, graph_of, packs_of, text


def visit(pack: Pack, kind: TaskKind) -> PackPass:
    runs = [(m, [Task(kind, pack.index, m)]) for m in range(3)]
    return PackPass(pack, runs, is_backward=kind is not TaskKind.FORWARD)


@pytest.mark.parametrize(
    ("times", "tasks"),
    [
        # Unknown times: the gradient of micro-batch 0 is to leave device 1 before micro-batch 2 comes there.
        ((0.0, 0.0), "F0.0 M1.0 F0.1 L1.0 M1.1 F0.2 W0.0 L1.1 M1.2 W0.1 L1.2 B0.0 W0.2 B0.1 B0.2"),
        # It takes longer than that, and shares a stream with it.
        ((1.0, 3.0), "F0.0 M1.0 F0.1 L1.0 M1.1 F0.2 M1.2 W0.0 L1.1 B0.0 W0.1 L1.2 B0.1 W0.2 B0.2"),
    ],
)
def test_copies_are_issued_in_the_order_in_which_they_can_begin(times: tuple[float, float], tasks: str) -> None:
    packs = [
        replace(pack, device=pack.index, forward_ms=times[0], backward_ms=times[1]) for pack in packs_of(True, True)
    ]
    visits = [visit(packs[0], TaskKind.FORWARD), visit(packs[1], TaskKind.FUSED), visit(packs[0], TaskKind.BACKWARD)]
    assert text(tuple(order_tasks(visits))) == tasks


def test_each_device_keeps_graphs_in_its_own_memory() -> None:
    cost = CallCost(
        forward=ForwardBytes(kept_graph_bytes=100),
        needs_backward=True,
        forward_ms=1.0,
        backward_ms=3.0,
        propagate_ms=2.0,
        fused_ms=3.0,
    )
    graph = graph_of([1] * 6)
    costs, policy = costs_of(graph.calls, cost), Policy(pipeline=3)
    packing = Packer(graph, costs, FP32, policy).packing(tuple(range(7)))
    request = PlanRequest(HarmonySettings(), 4, None, 0, policy)
    estimator = CandidateEstimator(costs, request)
    peaks = estimator.stage_peaks(estimator.sample(packing, policy))
    request = replace(request, budget_bytes=max(peaks) + 200)
    found = Graphs(costs, request).fitting(packing, policy, peaks, estimator.pack_bytes(packing, policy))
    # The last forward pack of devices 0 and 1 stays there; that of device 2 is fused.
    assert packing.last_forward_packs == (3, 4)
    assert found.graphs == (0, 0, 0, 2, 2, 0)
    assert max(estimator.stage_peaks(estimator.sample(packing, found))) <= max(peaks) + 200
    assert estimator.least_step_ms(packing, policy) == 4 * (4.0 + 4.0)
    assert estimator.least_step_ms(packing, found) == 4 * (4.0 + 4.0) - 2 * cost.saved_ms
