"""Every switch of the schedule, alone and all together: the same bits as plain PyTorch, and another schedule."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest

from harmony_ds import TaskKind
from harmony_ds.config.ablations import ABLATIONS, Ablation
from harmony_ds.scheduler.grid import format_plan
from harmony_ds.scheduler.plan import Plan
from harmony_ds.scheduler.trace import ExecutedStep
from tests.cover import spread
from tests.engine.drive import (
    WHOLE,
    Groups,
    adamw,
    config_of,
    engine_for,
    family,
    groups_of,
    means_of,
    plainly,
    train_groups,
)
from tests.engine.sizes import layer_bytes, packed
from tests.engine.test_precision import BF16, assert_masters_and_weights_are_plain
from tests.oracle import assert_same

pytestmark = pytest.mark.fixed_times

LLAMA = family("llama")
COUNT = 3
GROUPS: Groups = groups_of(LLAMA, 2, COUNT)
EXACT = [ablation for ablation in ABLATIONS if not ablation.device]
EVERYTHING = ABLATIONS[-1]
SWITCHES = ("grouping", "prefetch")
SWITCHED = [ablation for ablation in EXACT if ablation.harmony.keys() & set(SWITCHES)]
BUDGET_GIB = 2e6 / 2**30


def names(ablation: Ablation) -> str:
    return ablation.name


@cache
def executed(clip: float = 0.0, **harmony: Any) -> ExecutedStep:
    """The second step of an engine with these settings."""
    with engine_for(LLAMA.build(0.0), adamw, config_of(COUNT, clip, {"pack_layers": 2, **harmony})) as engine:
        engine.train_batch(iter(GROUPS[0]))
        with engine.record_steps() as steps:
            engine.train_batch(iter(GROUPS[1]))
        return steps[0]


# ---- the same bits


@pytest.mark.parametrize(("ablation", "clip"), spread(EXACT, [0.0, 0.5]), ids=str)
def test_a_model_with_dropout_trains_like_plain(ablation: Ablation, clip: float) -> None:
    """Five layers that draw random numbers; no weight is shared, so that sums of gradients have one order."""
    one = family("phi3")
    plain, losses = plainly(one, 0.1, GROUPS, adamw, clip or None)
    model = one.build(0.1)
    with engine_for(model, adamw, ablation.applied(config_of(COUNT, clip, {"pack_layers": 2}))) as engine:
        actual = train_groups(engine, GROUPS)
        engine.finish_updates()
        assert str(engine.plan_report())
        assert engine.plan is not None
        assert engine.memory_report().device_peak_bytes <= engine.plan.peak_bytes

    assert_same(model, plain, bitwise=True)
    assert actual == means_of(losses)


@pytest.mark.parametrize("ablation", SWITCHED, ids=names)
def test_the_search_finds_a_plan_within_a_budget(ablation: Ablation) -> None:
    plain, losses = plainly(LLAMA, 0.0, GROUPS, adamw)
    model = LLAMA.build(0.0)
    config = ablation.applied(config_of(COUNT, None, {"device_memory_gib": BUDGET_GIB}))
    with engine_for(model, adamw, config) as engine:
        assert train_groups(engine, GROUPS) == means_of(losses)
        assert engine.plan is not None
        assert engine.memory_report().device_peak_bytes <= engine.plan.peak_bytes <= BUDGET_GIB * 2**30
        assert Plan.from_json(engine.plan.to_json()) == engine.plan
        assert max(map(len, format_plan(engine.plan).splitlines())) <= 120
    assert_same(model, plain, bitwise=True)


def test_bf16_sums_are_those_of_plain_mixed_precision() -> None:
    config = config_of(COUNT, 0.5, {"pack_layers": 2, **EVERYTHING.harmony}, **BF16)
    losses, expected = assert_masters_and_weights_are_plain(LLAMA, GROUPS, config)
    assert losses == expected


def test_bf16_gradients_halve_their_traffic_and_are_the_same_grouped_or_not() -> None:
    config = config_of(COUNT, 0.5, {"pack_layers": 2}, bf16={"enabled": True})
    halved = {**config, "data_types": {"grad_accum_dtype": "bf16"}}
    moved, weights = [], []
    for asked in (config, halved, EVERYTHING.applied(halved)):
        model = LLAMA.build(0.0)
        with engine_for(model, adamw, asked) as engine:
            train_groups(engine, GROUPS)
            moved.append(engine.swap_report().device_to_host["gradients"])
        weights.append(model)

    assert moved[0] == 2 * moved[1]
    assert moved[2] == COUNT * moved[1]
    assert_same(weights[1], weights[2], bitwise=True)


# ---- another schedule


@pytest.mark.parametrize(("pack", "clip"), spread([1, 2, WHOLE], [0.0, 0.5]))
def test_without_grouping_weights_and_gradients_move_for_every_micro_batch(pack: int, clip: float) -> None:
    model = LLAMA.build(0.0)
    with engine_for(model, adamw, config_of(COUNT, clip, {"grouping": False, "pack_layers": pack})) as engine:
        train_groups(engine, GROUPS)
        report = engine.swap_report()
        assert engine.plan_report().swapped_bytes == engine.plan_report().choices[0].prediction.swaps.total

    packs = packed(layer_bytes(model, 4), pack)
    assert report.host_to_device["weights"] == COUNT * (sum(packs) + sum(packs[:-1]))
    assert report.device_to_host["gradients"] == COUNT * sum(packs)
    assert report.ratio == COUNT


def test_without_grouping_a_micro_batch_is_done_before_the_next_begins() -> None:
    step = executed(grouping=False)
    runs = [task.micro_batch for task in step.tasks if task.micro_batch >= 0]
    assert runs == sorted(runs)
    assert {task.micro_batch for task in step.tasks if task.kind is TaskKind.BACKWARD} == {0, 1, 2}
    grouped = executed()
    assert [task.micro_batch for task in grouped.tasks if task.micro_batch >= 0] != runs


def test_without_prefetch_each_swap_in_stands_before_its_pack() -> None:
    for prefetch in (False, True):
        step = executed(prefetch=prefetch)
        following = [b.pack for a, b in itertools.pairwise(step.tasks) if a.kind is TaskKind.SWAP_IN]
        swapped = [task.pack for task in step.tasks if task.kind is TaskKind.SWAP_IN]
        assert (following == swapped) is not prefetch
