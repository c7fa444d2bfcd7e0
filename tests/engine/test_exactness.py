"""The engine's losses and weights are those of plain gradient accumulation, and no plan changes a bit of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest
from torch import Tensor

from tests.cover import pairs, spread
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
from tests.families import MODULES, Family
from tests.oracle import assert_same

CLIPS = (None, 0.5)
EVERY = 100
"""More packs than any family has."""
SETTINGS = pairs((1, 4, 7), (1, 2, WHOLE), (0.1, 0.0), CLIPS, ("off", EVERY, 2))
"""Accumulation, layers in a pack, dropout, clipping, packs that stay on the device: every two values meet."""


STAYING = (*(family(name) for name in ("gpt2", "gemma4", "opt", "t5", "resnet", "mixtral", "clip")), *MODULES)
"""One of each kind; the others stay on the test device (`tests/simdevice`)."""


def cases() -> list[Any]:
    """Every family with all packs swapped, and one of each kind with some that stay."""
    swapped = cycle([setting for setting in SETTINGS if setting[-1] == "off"])
    staying = cycle([setting for setting in SETTINGS if setting[-1] != "off"])
    return [
        *(pytest.param(one, *next(swapped), id=f"{one.name}-swapped") for one in EVERY_FAMILY),
        *(pytest.param(one, *next(staying), id=f"{one.name}-staying") for one in STAYING),
    ]


@pytest.mark.parametrize(("one", "accumulation", "pack", "dropout", "clip", "residency"), cases())
def test_three_steps_equal_plain_gradient_accumulation(
    one: Family, accumulation: int, pack: int, dropout: float, clip: float | None, residency: Any
) -> None:
    config = config_of(accumulation, clip, {"pack_layers": pack, "residency": residency})
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


SEVERAL = ["llama", "SkipNet", "BatchNormNet", "LayerDropNet", "UntouchedNet"]
REGROUPED = ["gpt2", "t5", "gemma4", "SharedDepthNet", "TwoPassNet", "OutsideParameterNet"]
"""Their additions are regrouped by other packs."""


@pytest.mark.parametrize(
    ("name", "clip", "pack", "plans"),
    [
        *((*setting, 1, PLANS) for setting in spread(SEVERAL, CLIPS)),
        *((name, 0.5, pack, [{"pack_layers": pack, "stash": "host"}]) for name, pack in spread(REGROUPED, (1, 2))),
    ],
)
def test_no_plan_changes_a_bit(name: str, clip: float | None, pack: int, plans: Sequence[dict[str, Any]]) -> None:
    one = family(name)
    losses, weights = outcome(one, clip, {"pack_layers": pack, "prefetch": False, "stash": "device"})
    for plan in plans:
        other_losses, other_weights = outcome(one, clip, plan)
        assert other_losses == losses, plan
        assert_same(other_weights, weights, bitwise=True)


@pytest.mark.parametrize(
    ("name", "pack"), [("gemma4", 3), ("gemma4", 4), ("gemma4", 6), ("t5", 3), ("t5", 4), ("mixtral", 3)]
)
def test_an_inter_layer_graph_that_several_packs_share_outlives_the_fused_one(name: str, pack: int) -> None:
    """Gemma 4 computes what each layer adds to its input in one go, before the first layer."""
    one = family(name)
    assert_trains_like_plain(
        one, 0.0, groups_of(one, 2, 2), config_of(2, 0.5, {"pack_layers": pack}), optimizer_for(one)
    )
