"""What plans are made with, and how many are kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from harmony_ds.stepping import group_plans
from tests.engine.drive import config_of, engine_for, sgd
from tests.engine.test_paths import Net, batch_of, built
from tests.inside import assembly_of, planner_of
from tests.scheduler.examples import GPU


def test_a_plan_for_all_processes_is_made_with_the_slowest_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_for(built(Net), sgd, config_of(1)) as engine:
        one = planner_of(engine)
        one.measuring.machine = GPU
        others = [replace(GPU, swap_in_bytes_per_ms=1.0), replace(GPU, update_ms=77.0)]
        monkeypatch.setattr(one._parts.world, "all", lambda kind, value: [value, *others])
        assert one._machine() == replace(GPU, swap_in_bytes_per_ms=1.0, update_ms=77.0)


def test_micro_batches_that_are_larger_in_any_dimension_than_all_before_are_not_covered() -> None:
    with engine_for(built(Net), sgd, config_of(1)) as engine:
        engine.train_batch(iter([batch_of(0)]))
        rows, columns = batch_of(0)["x"].shape
        sizes = [(rows, columns), (rows - 1, columns - 1), (rows + 1, columns), (rows, columns + 1)]
        found = [planner_of(engine).covers([torch.empty(size)] * 2) for size in sizes]
        assert found == [True, True, False, False]


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at")
def test_as_many_composed_plans_are_kept_as_the_bound_says(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    compose = group_plans.compose_forward
    monkeypatch.setattr(group_plans, "_MOST_PLANS", 2)
    monkeypatch.setattr(group_plans, "compose_forward", lambda *arguments: made.append(0) or compose(*arguments))
    with engine_for(built(Net), sgd, config_of(4)) as engine:
        for index in range(4):
            loss = engine(**batch_of(index))["loss"]
            loss.item()
            engine.backward(loss)
            engine.step()
        assert len(made) == 4 and assembly_of(engine).runner.plans._composed.cache_info().currsize == 2
