"""Plans print, compare and survive JSON."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harmony_ds import Plan, Task, TaskKind
from harmony_ds.config import HarmonySettings
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.compose import Group, compose_step
from harmony_ds.scheduler.plan import Policy
from harmony_ds.scheduler.search import search
from tests.scheduler.examples import FP32, GPU, costs_of, graph_of, packs_of, reused


def plan_of(micro_batches: int = 2, stash_on_host: int = 0) -> Plan:
    packs = packs_of(True, True)
    packing, policy = reused(packs), Policy(prefetch=False, stash_on_host=stash_on_host)
    tasks = compose_step(packing, Group.with_fresh(micro_batches), policy)
    return Plan(packing, policy, tasks, micro_batches, resident_bytes=64, peak_bytes=12_345)


@pytest.mark.parametrize(
    ("task", "printed"),
    [
        (Task(TaskKind.SWAP_IN, 2), "I2"),
        (Task(TaskKind.FORWARD, 2, 0), "F2.0"),
        (Task(TaskKind.FUSED, 3, 10), "L3.10"),
        (Task(TaskKind.STASH_IN, 0, 1), "T0.1"),
        (Task(TaskKind.NORM, 0), "N"),
    ],
)
def test_a_task_prints_as_kind_pack_and_micro_batch_and_is_parsed(task: Task, printed: str) -> None:
    assert str(task) == printed
    assert Task.parse(printed) == task


@pytest.mark.parametrize("text", ["", "F", "N2", "2.0", "f2.0", "Q2", "F2.", "F2.0 ", "F02", "FF2"])
def test_what_no_task_prints_as_is_not_parsed(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        Task.parse(text)
    with pytest.raises(ValueError, match="'Q' is not a valid TaskKind"):
        Plan.from_json(plan_of().to_json().replace('"N"', '"Q"'))


@given(st.lists(st.integers(1, 99), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 7), st.booleans())
def test_any_chosen_plan_survives_json(numels: list[int], micro_batches: int, pack_layers: int, defer: bool) -> None:
    graph = graph_of(numels)
    settings = HarmonySettings(pack_layers=pack_layers, residency="off")
    request = PlanRequest(settings, micro_batches, None, 7, Policy(deferred_update=defer))
    plan = search(graph, costs_of(graph.calls), GPU, FP32, request)[0].plan

    assert Plan.from_json(plan.to_json()) == plan


def test_gradients_of_each_pack_that_shares_a_parameter_with_an_earlier_one_wait_on_the_host() -> None:
    packs = list(packs_of(True, True, True, True, True))
    packs[3], packs[4] = (replace(pack, parameters=(*pack.parameters, f"p{pack.index - 3}")) for pack in packs[3:])
    plan = replace(plan_of(), packing=reused(tuple(packs)))
    assert [replace(plan, policy=Policy(deferred_update=late)).held_transfers for late in (False, True)] == [2, 5]
