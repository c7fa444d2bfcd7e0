"""The comparison of the search with all plans there are: a few small models."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from benchmarks.search.exhaustive import Exhaustive
from benchmarks.search.models import HALF, Model, random_model
from benchmarks.search.run import compare, summary
from harmony_ds.scheduler.choose import make_plan
from harmony_ds.scheduler.packing import Packer
from harmony_ds.scheduler.plan import Packing, Policy
from harmony_ds.scheduler.simulate import simulate


def every_plan_ms(model: Model) -> list[float]:
    """Of a model of three layers, without any bound: the naive version."""
    packer = Packer(model.graph, model.costs, HALF)
    times = []
    for backward in [(0, 3), (0, 1, 3), (0, 2, 3), (0, 1, 2, 3)]:
        inner = range(1, backward[-2])
        for forward in [(0, backward[-2])] + [(0, i, backward[-2]) for i in inner] if backward[-2] else [(0,)]:
            packing = packer.packing(backward, forward)
            shared = {*packing.forward, packing.backward[-1]} & {*packing.backward}
            sets = [c for n in range(len(shared) + 1) for c in itertools.combinations(sorted(shared), n)]
            for kept, resident in itertools.product(sets, sets):
                for away, early in itertools.product(range(len(packing.forward) + 1), (True, False)):
                    if {*kept} & {*resident} or packing.backward[-1] in kept:
                        continue
                    policy = Policy(
                        deferred_update=model.request.policy.deferred_update,
                        kept=kept,
                        resident=resident,
                        stash_on_host=away,
                        prefetch=early,
                    )
                    for graphs in graphs_of(packing, {*kept, *resident}, model):
                        plan = make_plan(packing, model.costs, model.request, replace(policy, graphs=graphs))
                        if plan.peak_bytes <= (model.request.budget_bytes or 0):
                            times.append(simulate(plan, model.costs, model.machine).step_ms)
    return times


def graphs_of(packing: Packing, stay: set[int], model: Model) -> list[tuple[int, ...]]:
    able = stay & {*packing.forward} & {*packing.backward[:-1]}
    most = model.request.micro_batches if model.request.settings.keep_graphs else 0
    return [*itertools.product(*(range(most + 1) if i in able else (0,) for i in packing.backward))]


@pytest.mark.parametrize("seed", [0, 5, 6, 18])
def test_what_bounds_rule_out_is_never_the_best_plan(seed: int) -> None:
    model = random_model(seed, 3)
    every = Exhaustive(model)

    best_ms, best = every.best(float("inf"))

    assert best is not None
    assert best_ms == pytest.approx(min(every_plan_ms(model)), rel=1e-12)
    assert 0 < every.simulated < every.plans
    assert Exhaustive(model).best(best_ms * (1 + 1e-9))[0] == best_ms  # nor where one as good is known


def test_a_comparison_is_never_better_than_all_plans() -> None:
    found = [compare(seed) for seed in range(3)]

    assert all(one.gap >= 0 for one in found)
    assert summary(found)["gap_worst"] == max(100 * one.gap for one in found)
