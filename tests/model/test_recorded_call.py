"""Inputs that several layers share are saved once, and each recomputation gets the inputs of its call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.residual_net import WIDTH, Net, assert_equals_plain


class Layer(nn.Module):
    def __init__(self, _: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor, tables: tuple[Tensor, Tensor], scale: float = 1.0) -> Tensor:
        cos, sin = tables
        return x + torch.tanh(self.linear(x * cos + sin) + mask) * scale


Given = Callable[[int, dict[str, Any]], dict[str, Any]]
GIVEN: dict[str, Given] = {
    "the same": lambda number, given: given,
    "another mask": lambda number, given: {**given, "mask": given["mask"] + number},
    "masks by turns": lambda number, given: {**given, "mask": given["tables"][number % 2]},
    "another table": lambda number, given: {**given, "tables": (given["tables"][0], given["mask"] + number)},
    "another flag": lambda number, given: {**given, "scale": 1.0 + number},
    "another order": lambda number, given: dict(reversed(given.items())) if number % 2 else given,
}


class GivenNet(Net):
    """Blocks that are called with the arguments that `given` returns."""

    def __init__(self, given: Given) -> None:
        super().__init__(Layer)
        self.given = given

    def run(self, x: Tensor) -> Tensor:
        arguments: dict[str, Any] = {"mask": (x[0] > 0).float(), "tables": (x[0].cos(), x[0].sin())}
        for number, block in enumerate(self.blocks):
            arguments = self.given(number, arguments)
            x = block(x, **arguments)
        return x


@pytest.mark.parametrize("pack", [1, 2])
@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_layers_get_what_the_model_gives_them(given: Given, pack: int) -> None:
    assert_equals_plain(lambda: GivenNet(given), pack_layers=pack)
