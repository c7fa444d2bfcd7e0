"""Which packs may be resident, what their tasks are and what they hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harmony_ds.config import HarmonySettings
from harmony_ds.decomposer import ParameterSpec
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.compose import Group, compose_step
from harmony_ds.scheduler.costs import CallCost
from harmony_ds.scheduler.memory import walk_memory
from harmony_ds.scheduler.packing import ElementBytes, Packer
from harmony_ds.scheduler.plan import Packing, Plan, Policy
from harmony_ds.scheduler.resident import resident_packs, why_not_resident
from harmony_ds.scheduler.search import search
from tests.scheduler.examples import FP32, GPU, costs_of, graph_of, pack_uniformly, packs_of, reused, text
from tests.scheduler.validate import PlanError, validate


def tied(count: int = 4) -> Packing:
    """The last pack has the first one's parameter."""
    packs = packs_of(*(True,) * count)
    return reused((*packs[:-1], replace(packs[-1], parameters=("p0",), owned=())))


@pytest.mark.parametrize(("count", "expected"), [(None, ()), (0, ()), (1, (3,)), (3, (1, 2, 3)), (9, (0, 1, 2, 3))])
def test_the_last_packs_are_resident(count: int | None, expected: tuple[int, ...]) -> None:
    packing = reused(packs_of(*(True,) * 4))
    assert resident_packs(packing, count) == expected
    assert why_not_resident(packing, count) == []


def test_packs_that_share_a_parameter_are_resident_together_or_not_at_all() -> None:
    assert resident_packs(tied(), 2) == (2,)
    assert resident_packs(tied(), 4) == (0, 1, 2, 3)
    assert why_not_resident(tied(), 2) == ["pack 3 is not resident: it shares p0 with pack 0, which is not"]


def test_a_pack_that_the_forward_pass_cuts_otherwise_is_not_resident() -> None:
    graph = graph_of([16] * 4)
    packing = Packer(graph, costs_of(graph.calls), FP32).packing((0, 2, 3, 4), (0, 1, 2, 3))
    assert resident_packs(packing, 3) == (1, 2)


def test_a_resident_pack_that_shares_a_parameter_with_a_swapped_one_is_refused() -> None:
    group = Group((0,))
    tasks = compose_step(tied(), group, Policy(resident=(3,)))
    with pytest.raises(PlanError, match="a resident pack shares a parameter"):
        validate(tied(), tasks, group, Policy(resident=(3,)))


def test_gradients_of_a_shared_parameter_are_counted_until_its_owner_is_updated() -> None:
    packing = tied(3)
    tasks = compose_step(packing, Group((0,)), Policy(deferred_update=False, resident=(0, 1, 2)))
    costs = costs_of((0, 1, 2), CallCost(needs_backward=True))
    walked = walk_memory(packing.packs, tasks, costs)
    assert text(tasks) == "F0.0 F1.0 L2.0 D2 B1.0 D1 B0.0 D0"
    held = [nbytes - walked.activation_bytes[0] for nbytes in walked.activation_bytes]
    assert held == [0, 0, 10, 10, 20, 20, 20, 20]


def test_a_plan_counts_weights_masters_state_and_the_update_of_resident_packs() -> None:
    graph = graph_of([16, 16, 16])
    specs = tuple(ParameterSpec(s.name, s.shape, True, state_bytes=1000, update_bytes=5000) for s in graph.parameters)
    graph = replace(graph, parameters=specs)
    costs = costs_of(graph.calls)

    def planned(residency: str | int) -> Plan:
        settings = HarmonySettings(pack_layers=1, stash="device", residency=residency)
        return search(graph, costs, GPU, FP32, PlanRequest(settings, 2, None, 7, Policy()))[0].plan

    without, plan = planned("off"), planned(2)
    assert plan.policy.resident == (1, 2)
    assert without.resident_bytes == 7
    assert plan.resident_bytes == 7 + 2 * (64 + 1000)
    assert plan.peak_bytes >= plan.resident_bytes + 5000
    assert pack_uniformly(graph, costs, FP32, 3)[0].resident_bytes == 3 * (64 + 1000)
    (in_bf16,) = pack_uniformly(graph, costs, ElementBytes(weight=2, gradient=2), 3)
    assert in_bf16.update_bytes == 3 * 16 * 4 + 5000  # all gradients in fp32, before the first parameter is stepped
