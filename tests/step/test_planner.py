"""What plans are made with, how many are kept, and how one follows another."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from harmony_ds.profiling.sample import form_of_inputs
from harmony_ds.step import plan_composer
from tests.engine.drive import config_of, engine_for, seed_of, sgd
from tests.engine.residual_net import Net, batch_of, built
from tests.inside import planner_of
from tests.oracle import assert_same, train_plainly
from tests.scheduler.examples import GPU

pytestmark = pytest.mark.fixed_times


def test_a_plan_for_all_processes_is_made_with_the_slowest_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_for(built(Net), sgd, config_of(1)) as engine:
        one = planner_of(engine)
        one.profiler.machine = GPU
        others = [replace(GPU, swap_in_bytes_per_ms=1.0), replace(GPU, update_ms=77.0)]
        monkeypatch.setattr(one._runtime.world, "gather_values", lambda kind, value: [value, *others])
        assert one.search._machine() == replace(GPU, swap_in_bytes_per_ms=1.0, update_ms=77.0)


def test_micro_batches_that_are_larger_in_any_dimension_than_all_before_are_not_covered() -> None:
    with engine_for(built(Net), sgd, config_of(1)) as engine:
        engine.train_batch(iter([batch_of(0)]))
        rows, columns = batch_of(0)["x"].shape
        sizes = [(rows, columns), (rows - 1, columns - 1), (rows + 1, columns), (rows, columns + 1)]
        form = form_of_inputs([torch.empty(1)] * 2, None)
        found = [planner_of(engine).has_profiled([torch.empty(size)] * 2, form) for size in sizes]
        assert found == [True, True, False, False]


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at")
def test_as_many_composed_plans_are_kept_as_the_bound_says(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    compose = plan_composer.compose_forward
    monkeypatch.setattr(plan_composer, "_MOST_PLANS", 2)
    monkeypatch.setattr(plan_composer, "compose_forward", lambda *arguments: made.append(0) or compose(*arguments))
    with engine_for(built(Net), sgd, config_of(4)) as engine:
        for index in range(4):
            loss = engine(**batch_of(index))["loss"]
            loss.item()
            engine.backward(loss)
            engine.step()
        assert len(made) == 4 and engine._steps.context.composer._composed.cache_info().currsize == 2


class SlowSGD(torch.optim.SGD):
    """Takes long for every layer, so that the next step begins while updates are pending."""

    elementwise = True

    def step(self, closure: Any = None) -> Any:
        time.sleep(0.05)
        return super().step(closure)


def test_a_new_plan_waits_for_the_updates_of_the_old_ones_packs() -> None:
    """It numbers its packs anew, while updates of the old one's packs may still be under way."""
    groups = [[batch_of(i) for i in range(2)], [batch_of(i) for i in range(2, 6)]]
    plain, model = built(Net), built(Net)
    train_plainly(plain, groups, torch.optim.SGD(plain.parameters(), 0.5), clip=None, seed_of=seed_of)
    with engine_for(model, lambda p: SlowSGD(p, 0.5), config_of(2, None, {"pack_layers": 1})) as engine:
        engine.train_batch(iter(groups[0]))
        before = engine.plan
        # More micro-batches than the plan was made for: a new one, here with larger packs.
        planner = planner_of(engine)
        planner.search._settings = replace(planner.search._settings, pack_layers=3)
        engine.set_train_batch_size(8)
        engine.train_batch(iter(groups[1]))
        assert before is not None and engine.plan is not None
        assert len(before.packs) == 5 and len(engine.plan.packs) == 2
    assert_same(model, plain, bitwise=True)
