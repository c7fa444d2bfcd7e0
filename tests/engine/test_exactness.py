"""The engine's losses and weights are those of plain gradient accumulation, and no plan changes a bit of them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.engine.drive import (
    EVERY_FAMILY,
    WHOLE,
    assert_trains_like_plain,
    config_of,
    engine_for,
    family,
    groups_of,
    optimizer_for,
    train_groups,
    weights_of,
)
from tests.families import Family
from tests.oracle import assert_same

ACCUMULATIONS = (1, 4, 7)
PACKS = (1, 2, WHOLE)


def spread() -> list[Any]:
    """Three cases for each family: every accumulation, pack size, dropout and clip at least once, pairs spread."""
    cases = []
    for place, one in enumerate(EVERY_FAMILY):
        for turn, accumulation in enumerate(ACCUMULATIONS):
            pack = PACKS[(place + turn) % 3]
            dropout = (0.0, 0.1)[(place + turn) % 2]
            clip = (None, 0.5)[(place // 2 + turn) % 2]
            name = f"{one.name}-dropout{dropout}-accumulation{accumulation}-clip{clip}-pack{pack}"
            cases.append(pytest.param(one, dropout, accumulation, clip, pack, id=name))
    return cases


@pytest.mark.parametrize(("one", "dropout", "accumulation", "clip", "pack"), spread())
def test_three_steps_equal_plain_gradient_accumulation(
    one: Family, dropout: float, accumulation: int, clip: float | None, pack: int
) -> None:
    config = config_of(accumulation, clip, {"pack_layers": pack})
    assert_trains_like_plain(one, dropout, groups_of(one, 3, accumulation), config, optimizer_for(one))


def outcome(one: Family, clip: float | None, harmony: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    model = one.build(0.1)
    with engine_for(model, optimizer_for(one), config_of(3, clip, harmony)) as engine:
        losses = train_groups(engine, groups_of(one, 2, 3))
    return losses, weights_of(model)


PLANS: tuple[dict[str, Any], ...] = (
    {"pack_layers": 1, "prefetch": True, "stash": "host"},
    {"pack_layers": 2, "prefetch": False, "stash": "host"},
    {"pack_layers": 3, "prefetch": True, "stash": "device"},
    {"pack_layers": WHOLE, "prefetch": False, "stash": "host"},
)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", ["llama", "mixtral", "SkipNet", "BatchNormNet", "LayerDropNet", "UntouchedNet"])
def test_no_plan_changes_a_bit(name: str, clip: float | None) -> None:
    one = family(name)
    losses, weights = outcome(one, clip, {"pack_layers": 1, "prefetch": False, "stash": "device"})
    for plan in PLANS:
        other_losses, other_weights = outcome(one, clip, plan)
        assert other_losses == losses, plan
        assert_same(other_weights, weights, bitwise=True)


@pytest.mark.parametrize("pack", [3, 4, 5, 6])
@pytest.mark.parametrize("name", ["gemma4", "t5", "mixtral"])
def test_glue_that_layers_of_several_packs_share_outlives_the_fused_one(name: str, pack: int) -> None:
    """Gemma 4 computes what each layer adds to its input in one go, before the first layer."""
    one = family(name)
    assert_trains_like_plain(
        one, 0.0, groups_of(one, 2, 2), config_of(2, 0.5, {"pack_layers": pack}), optimizer_for(one)
    )


REGROUPED = ["gpt2", "t5", "gemma4", "SharedDepthNet", "TwoPassNet", "OutsideParameterNet"]


@pytest.mark.parametrize("pack", [1, 2])
@pytest.mark.parametrize("name", REGROUPED)
def test_neither_prefetch_nor_stash_changes_a_bit_where_additions_are_regrouped(name: str, pack: int) -> None:
    one = family(name)
    losses, weights = outcome(one, 0.5, {"pack_layers": pack, "prefetch": False, "stash": "device"})
    other_losses, other_weights = outcome(one, 0.5, {"pack_layers": pack, "prefetch": True, "stash": "host"})
    assert other_losses == losses
    assert_same(other_weights, weights, bitwise=True)


@pytest.mark.parametrize("name", REGROUPED)
def test_plans_differ_by_rounding_only_where_additions_are_regrouped(name: str) -> None:
    """Within a pack, autograd adds a micro-batch's contributions up; across packs, the host adds whole sums."""
    one = family(name)
    _, weights = outcome(one, None, {"pack_layers": 1, "prefetch": False, "stash": "device"})
    for plan in PLANS:
        _, other_weights = outcome(one, None, plan)
        assert_same(other_weights, weights, bitwise=False)
