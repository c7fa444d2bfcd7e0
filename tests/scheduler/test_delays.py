"""A swap-in whose update is under way is issued after the runs that the device can compute meanwhile, and no later."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harmony_ds.config import HarmonySettings
from harmony_ds.scheduler import delay_choice
from harmony_ds.scheduler.choose import PlanRequest, make_plan
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.delays import delay_swap_ins
from harmony_ds.scheduler.memory import walk_memory
from harmony_ds.scheduler.packing import Packer
from harmony_ds.scheduler.partition import uniform_bounds
from harmony_ds.scheduler.plan import Packing, Plan, Policy
from harmony_ds.scheduler.profile import Machine
from harmony_ds.scheduler.simulate import run_steps, step_ms
from tests.scheduler.examples import COST, CPU, FP32, GPU, costs_of, graph_of, packs_of, parse, text, with_unlayered

PACKING = Packing(packs_of(True, True, True), (0, 1), (0, 1, 2))
TASKS = "I0 I1 F0.0 S0.0 F0.1 S0.1 E0 I2 F1.0 F1.1 E1 L2.0 L2.1 O2 E2 I1 B1.0"
NEVER = 1_000


@pytest.mark.parametrize(
    ("delays", "expected"),
    [
        ((), TASKS),
        ((0, 0, 0), TASKS),
        ((0, 1, 0), "I0 F0.0 S0.0 I1 F0.1 S0.1 E0 I2 F1.0 F1.1 E1 L2.0 L2.1 O2 E2 I1 B1.0"),
        ((0, 2, 1), "I0 F0.0 S0.0 F0.1 S0.1 I1 E0 F1.0 I2 F1.1 E1 L2.0 L2.1 O2 E2 I1 B1.0"),
        ((0, NEVER, NEVER), "I0 F0.0 S0.0 F0.1 S0.1 I1 E0 F1.0 F1.1 I2 E1 L2.0 L2.1 O2 E2 I1 B1.0"),
        ((2, 0, 0), "I0 F0.0 S0.0 I1 F0.1 S0.1 E0 I2 F1.0 F1.1 E1 L2.0 L2.1 O2 E2 I1 B1.0"),
    ],
    ids=["none", "zeros", "a run", "two packs", "before their first tasks", "swap-ins keep their order"],
)
def test_a_swap_in_comes_after_so_many_runs_and_before_the_first_task_of_its_pack(
    delays: tuple[int, ...], expected: str
) -> None:
    assert text(delay_swap_ins(parse(TASKS), PACKING, delays)) == expected


def test_devices_of_one_process_do_not_wait_for_each_others_swap_ins() -> None:
    packs = tuple(replace(pack, device=pack.index % 2) for pack in packs_of(True, True, True))
    tasks = parse("I0 I2 I1 F0.0 F0.1 E0 F1.0 F1.1 F2.0")
    delayed = delay_swap_ins(tasks, Packing(packs, (0, 1), (0, 1, 2)), (0, NEVER, NEVER))
    assert text(delayed) == "I0 F0.0 F0.1 I2 E0 I1 F1.0 F1.1 F2.0"


# ---- the choice


def lagging(
    deferred: bool = True,
    update_elements_per_ms: float = 60.0,
    pipeline: int = 1,
    micro_batches: int = 4,
    layers: int = 6,
) -> tuple[Plan, CostTable, Machine]:
    """A plan whose updates of 250 elements go on while the next step begins."""
    policy = Policy(deferred_update=deferred, pipeline=pipeline)
    graph = graph_of([250] * layers)
    costs = replace(costs_of(graph.calls, COST), head_ms=0.25, tail_ms=0.5)
    packing = Packer(graph, costs, FP32, policy).packing(uniform_bounds(layers, 1), None)
    machine = replace(GPU, update_elements_per_ms=update_elements_per_ms, task_ms=0.02)
    return plan_of(packing, costs, policy, micro_batches), costs, machine


def plan_of(packing: Packing, costs: CostTable, policy: Policy, micro_batches: int) -> Plan:
    return make_plan(packing, costs, PlanRequest(HarmonySettings(), micro_batches, None, 0, policy), policy)


def choose_delays(plan: Plan, costs: CostTable, machine: Machine) -> tuple[int, ...]:
    return delay_choice.choose_delays(plan, costs, machine, run_steps(plan, costs, machine))


def with_delays(plan: Plan, costs: CostTable, delays: tuple[int, ...]) -> Plan:
    return plan_of(plan.packing, costs, replace(plan.policy, swap_in_delays=delays), plan.micro_batches)


def latest(plan: Plan) -> tuple[int, ...]:
    """The delays that put every swap-in as late as it may be: what waits for an update then holds up the fewest runs."""
    return (0, *(NEVER for pack in plan.packs[1:]))


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("update_elements_per_ms", [15.0, 30.0, 60.0, 120.0])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_no_step_is_longer_than_with_swap_ins_as_early_or_as_late_as_can_be(
    deferred: bool, update_elements_per_ms: float, pipeline: int
) -> None:
    early, costs, machine = lagging(deferred, update_elements_per_ms, pipeline)
    delays = choose_delays(early, costs, machine)
    took = step_ms(with_delays(early, costs, delays), costs, machine)

    assert took <= step_ms(early, costs, machine)
    assert took <= 1.002 * step_ms(with_delays(early, costs, latest(early)), costs, machine)


def test_packs_that_are_on_the_device_compute_while_the_next_ones_are_updated() -> None:
    early, costs, machine = lagging()
    chosen = with_delays(early, costs, choose_delays(early, costs, machine))

    assert text(chosen.tasks).startswith("I0 F0.0 F0.1 F0.2 I1 F0.3 E0 F1.0")  # an update takes as long as four runs
    run_ms = COST.forward_ms
    assert step_ms(early, costs, machine) - step_ms(chosen, costs, machine) > 3 * run_ms  # those before the wait


def test_a_plan_whose_updates_are_done_in_time_stays_as_it_is() -> None:
    early, costs, machine = lagging(deferred=False, update_elements_per_ms=10_000.0)
    assert choose_delays(early, costs, machine) == ()
    assert choose_delays(early, costs, CPU) == ()  # whose copies do not run beside compute


def test_swap_ins_that_processes_share_keep_their_common_order() -> None:
    early, costs, machine = lagging()
    shared = replace(early, policy=replace(early.policy, swaps_in_shares=True))
    assert choose_delays(shared, costs, machine) == ()


def test_parameters_without_calls_are_never_swapped_in_later() -> None:
    early, costs, machine = lagging()
    early = plan_of(with_unlayered(early.packing), costs, early.policy, 4)
    delays = choose_delays(early, costs, machine)
    assert delays[-1] == 0 < max(delays)
    assert text(with_delays(early, costs, delays).tasks).startswith("I6 I0 F0.0")  # updated first, since used first


@given(st.data())
def test_no_delays_take_more_memory(data: st.DataObject) -> None:
    early, costs, _ = lagging(pipeline=data.draw(st.integers(1, 3)), micro_batches=data.draw(st.integers(1, 3)))
    delays = tuple(data.draw(st.lists(st.integers(0, 9), min_size=6, max_size=6)))
    late = with_delays(early, costs, delays)

    assert sorted(text(late.tasks).split()) == sorted(text(early.tasks).split())
    before, after = (walk_memory(plan.packs, plan.tasks, costs).device_peaks for plan in (early, late))
    assert all(a <= b for a, b in zip(after, before, strict=True))
