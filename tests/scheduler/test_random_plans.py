"""Plans of several devices, cut, dealt and kept at random: every list of tasks keeps to the rules."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from harmony_ds.scheduler.compose import Group
from harmony_ds.scheduler.costs import CallCost, CostTable, StashBytes
from harmony_ds.scheduler.memory import walk_memory
from harmony_ds.scheduler.packing import Packer
from harmony_ds.scheduler.plan import Packing, Policy
from tests.scheduler.examples import FP32, graph_of, parse, text, with_unlayered
from tests.scheduler.validate import PlanError, composed, validate


def cut_at_random(packer: Packer, calls: int, choose: random.Random) -> Packing:
    """Packs of `calls`, at least as many as there are devices."""
    least = packer._policy.pipeline
    inner = choose.sample(range(1, calls), choose.randint(least - 1, calls - 1))
    return packer.packing((0, *sorted(inner), calls))


def policy_at_random(packing: Packing, policy: Policy, micro_batches: int, choose: random.Random) -> Policy:
    """`policy`, with some packs kept, some graphs, some of the stash on the host."""
    return replace(
        policy,
        prefetch=choose.random() < 0.7,
        stash_on_host=choose.choice([0, len(packing.packs), choose.randint(0, len(packing.packs))]),
        crossing_on_host=choose.random() < 0.5,
        kept=tuple(index for index in packing.forward if choose.random() < 0.3),
        graphs=tuple(choose.choice([0, 0, choose.randint(0, micro_batches)]) for _ in packing.backward),
        swap_in_delays=tuple(choose.choice([0, 0, choose.randint(0, 9)]) for _ in range(len(packing.packs) + 1)),
    )


def random_plan(choose: random.Random) -> tuple[Packing, Group, Policy, CostTable]:
    calls, count = choose.randint(4, 12), choose.randint(1, 6)
    costs = [CallCost(stash=StashBytes(new_bytes=64), needs_backward=choose.random() < 0.9) for _ in range(calls)]
    table = CostTable(tuple(range(calls)), tuple(costs), tail_bytes=0)
    policy = Policy(
        pipeline=choose.choice([2, 3, 4]), deferred_update=choose.random() < 0.5, grouping=choose.random() < 0.9
    )
    packing = cut_at_random(Packer(graph_of([100] * calls), table, FP32, policy), calls, choose)
    forwarded = tuple(m for m in range(count) if choose.random() < 0.1)
    fresh = tuple(m for m in range(count) if m not in forwarded)
    sharing = ()
    if len(fresh) > 1 and choose.random() < 0.5:
        sharing = (tuple(sorted(choose.sample(fresh, choose.randint(2, len(fresh))))),)
    group = Group(fresh, forwarded, bool(forwarded), sharing)
    policy = policy_at_random(packing, policy, count, choose)
    return (with_unlayered(packing) if choose.random() < 0.3 else packing), group, policy, table


def test_a_thousand_random_plans_keep_to_the_rules() -> None:
    choose, moves = random.Random(1), 0
    for _ in range(1000):
        packing, group, policy, costs = random_plan(choose)
        tasks = composed(packing, group, policy)
        moves += any(task.kind.value in "MW" for task in tasks)
        assert min(walk_memory(packing.packs, tasks, costs, shared_losses=group.shared_losses).activation_bytes) >= 0
    assert moves > 950


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("M1.0 ", "", "on another device"),
        ("W0.1 ", "", "on another device"),
        ("M1.0", "M1.0 M1.0", "there already"),
        ("W0.0", "M0.0", "the other way round"),
        ("F0.0", "M1.0 F0.0", "does not go to the pack that comes next"),
    ],
)
def test_a_micro_batch_that_is_not_moved_where_it_runs_is_caught(right: str, wrong: str, message: str) -> None:
    policy = Policy(pipeline=2, prefetch=False)
    costs = CostTable((0, 1), (CallCost(needs_backward=True),) * 2, tail_bytes=0)
    packing = Packer(graph_of([100] * 2), costs, FP32, policy).packing((0, 1, 2))
    tasks = text(composed(packing, Group.with_fresh(2), policy))
    assert tasks.startswith("I0 I1 F0.0 M1.0 ")
    with pytest.raises(PlanError, match=message):
        validate(packing, parse(tasks.replace(right, wrong, 1)), Group.with_fresh(2), policy)
