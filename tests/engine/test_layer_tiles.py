"""Calls inside layers in tiles of tokens: the gradients stay what they are in plain PyTorch.

Sums over tokens are made tile by tile, so that gradients agree to 1e-5 relative, not bit by bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import HarmonyEngine
from tests.cover import spread
from tests.engine.drive import EVERY_FAMILY, config_of, engine_for, groups_of, means_of, optimizer_for, plainly, train_groups
from tests.families import Family
from tests.oracle import assert_same

TILE = 6
"""Tokens of a tile, of both rows together: three places of a row of twelve."""


def in_tiles(engine: HarmonyEngine, size: int = TILE) -> Any:
    tiles = engine._state.runtime.layer_calls.layer_tiles
    tiles.size = size
    return tiles


@pytest.mark.parametrize("one", EVERY_FAMILY, ids=str)
def test_every_family_trains_as_in_plain_pytorch(one: Family) -> None:
    groups = groups_of(one, steps=3, accumulation=2)
    make = optimizer_for(one)
    plain, losses = plainly(one, 0.0, groups, make, clip=1.0)
    model = one.build(0.0)
    with engine_for(model, make, config_of(2, clip=1.0)) as engine:
        tiles = in_tiles(engine)
        actual = train_groups(engine, groups)
        print(one.name, len(tiles._known), tiles.refused)
    for (name, a), b in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert (a.float() - b.float()).norm() <= 1e-5 * b.float().norm() + 1e-7, (name, (a.float() - b.float()).norm() / b.float().norm())
    assert all(abs(a - e) <= 1e-5 * abs(e) for a, e in zip(actual, means_of(losses), strict=True))
