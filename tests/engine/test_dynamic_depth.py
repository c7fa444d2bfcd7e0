"""Micro-batches that end early: some layers, the last one too, are not called by each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.drive import adamw, config_of, engine_for, seed_of
from tests.families import build_seeded
from tests.oracle import assert_same, train_plainly

WIDTH = 8


class Tower(nn.Module):
    """As many layers as the call asks for, and no head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)) for _ in range(5))

    def forward(self, x: Tensor, depth: int) -> Tensor:
        for layer in self.layers[:depth]:
            x = torch.tanh(layer(x))
        return x.square().mean()


def batch(index: int, depth: int) -> dict[str, Any]:
    return {"x": torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(index)), "depth": depth}


@pytest.mark.parametrize(
    ("depths", "harmony"),
    [
        ((5, 2, 4), {"pack_layers": 1}),
        ((2, 5, 1), {"pack_layers": 2}),
        ((1, 2, 3), {"pack_layers": 2}),
        ((2, 5, 1), {"pack_layers": 2, "fuse_last_pack": False}),
    ],
)
def test_each_micro_batch_as_deep_as_it_asks(depths: tuple[int, ...], harmony: Any) -> None:
    groups = [[batch(3 * step + i, depth) for i, depth in enumerate(depths)] for step in range(3)]
    plain = build_seeded(Tower)
    losses = train_plainly(plain, groups, adamw(plain.parameters()), clip=None, seed_of=seed_of)
    model = build_seeded(Tower)
    with engine_for(model, adamw, config_of(3, None, {**harmony, "layers": ["layers.?"]})) as engine:
        actual = [engine.train_batch(iter(group)).item() for group in groups]
    assert actual == [torch.tensor(row).mean().item() for row in losses]
    assert_same(model, plain, bitwise=True)
