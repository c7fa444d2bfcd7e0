"""From steps that a wrong profile did not foresee to the plan that the right one gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harmony_ds.config import HarmonySettings
from harmony_ds.profiler.costs import CallCost, CostTable
from harmony_ds.profiler.profile import Machine
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.correct import correct
from harmony_ds.scheduler.plan import Plan, Policy
from harmony_ds.scheduler.search import search
from harmony_ds.scheduler.simulate import simulate
from tests.scheduler.examples import CPU, FP32, GPU, graph_of

SIZES = (900, 300, 300, 300, 300, 300, 1200)
GRAPH = graph_of(SIZES)
GRAPH = replace(
    GRAPH,
    parameters=tuple(replace(s, state_bytes=8 * s.numel, update_bytes=4 * s.numel) for s in GRAPH.parameters),
)
RIGHT = CostTable(
    GRAPH.calls,
    tuple(
        CallCost(
            alive_bytes=300,
            stash_bytes=256,
            shared_bytes=256,
            forward_bytes=500,
            graph_bytes=400,
            backward_bytes=900,
            needs_backward=True,
            forward_ms=size / 300,
            backward_ms=size / 100,
            fused_ms=size / 100,
            propagate_ms=size / 150,
        )
        for size in SIZES
    ),
    tail_bytes=64,
    head_ms=0.2,
    tail_ms=0.4,
)


def searched(costs: CostTable, machine: Machine, deferred: bool) -> Plan:
    request = PlanRequest(HarmonySettings(), 4, 16_000, resident_bytes=0, policy=Policy(deferred_update=deferred))
    return search(GRAPH, costs, machine, FP32, request)[0].plan


def slower(costs: CostTable, factors: tuple[float, ...]) -> CostTable:
    calls = tuple(
        replace(
            c,
            forward_ms=f * c.forward_ms,
            backward_ms=f * c.backward_ms,
            fused_ms=f * c.fused_ms,
            propagate_ms=f * c.propagate_ms,
        )
        for c, f in zip(costs.costs, factors, strict=True)
    )
    return replace(costs, costs=calls, tail_ms=factors[-1] * costs.tail_ms)


WRONG = {
    "compute": (slower(RIGHT, (0.1,) * 7), {}),
    "one layer": (slower(RIGHT, (1, 1, 1, 1, 1, 1, 6)), {}),
    "link": (RIGHT, {"swap_in_bytes_per_ms": 6.0, "swap_out_bytes_per_ms": 0.3, "link_bytes_per_ms": 4.0}),
    "updates": (RIGHT, {"update_elements_per_ms": 8.0}),
    "all": (slower(RIGHT, (3.0,) * 7), {"swap_in_bytes_per_ms": 4.0, "update_elements_per_ms": 0.25}),
}


@pytest.mark.parametrize(("machine", "deferred"), [(GPU, True), (CPU, False)], ids=["GPU, deferred", "CPU, immediate"])
@pytest.mark.parametrize(("wrong", "rates"), WRONG.values(), ids=WRONG)
def test_what_was_wrong_is_found_and_with_it_the_right_plan(
    wrong: CostTable, rates: dict[str, float], deferred: bool, machine: Machine
) -> None:
    mistaken = replace(machine, **{name: getattr(machine, name) * factor for name, factor in rates.items()})
    plan = searched(wrong, mistaken, deferred)
    real = simulate(plan, RIGHT, machine)

    costs, rated = correct(plan, wrong, mistaken, [real.spans] * 3)

    assert simulate(plan, costs, rated).step_ms == pytest.approx(real.step_ms, rel=0.03)
    best = searched(RIGHT, machine, deferred)
    found = searched(costs, rated, deferred)
    assert simulate(found, RIGHT, machine).step_ms <= 1.03 * simulate(best, RIGHT, machine).step_ms


def test_a_plan_that_was_slow_for_a_wrong_link_is_exchanged_for_one_as_fast_as_the_right_one() -> None:
    mistaken = replace(GPU, swap_in_bytes_per_ms=6_000.0, swap_out_bytes_per_ms=30.0, link_bytes_per_ms=6_100.0)
    plan, best = searched(RIGHT, mistaken, deferred=True), searched(RIGHT, GPU, deferred=True)
    real = simulate(plan, RIGHT, GPU)
    assert real.step_ms > 1.05 * simulate(best, RIGHT, GPU).step_ms

    found = searched(*correct(plan, RIGHT, mistaken, [real.spans]), deferred=True)
    assert simulate(found, RIGHT, GPU).step_ms <= 1.005 * simulate(best, RIGHT, GPU).step_ms


def test_what_was_right_stays() -> None:
    plan = searched(RIGHT, GPU, deferred=True)
    costs, machine = correct(plan, RIGHT, GPU, [simulate(plan, RIGHT, GPU).spans])

    assert costs == RIGHT and machine == GPU


def test_one_step_that_was_disturbed_teaches_nothing() -> None:
    plan = searched(RIGHT, GPU, deferred=True)
    quiet = simulate(plan, RIGHT, GPU).spans
    disturbed = tuple(replace(span, end_ms=span.end_ms + 500.0) for span in quiet)

    assert correct(plan, RIGHT, GPU, [quiet, disturbed, quiet]) == (RIGHT, GPU)
