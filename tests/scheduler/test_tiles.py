"""Sizes of tiles of tokens: where they come from, what they are called, and what is cut next."""

from __future__ import annotations

import pytest

from harmony_ds.scheduler.costs import BackwardBytes, CallCost, CostTable
from harmony_ds.scheduler.plan import Policy
from harmony_ds.scheduler.tiles import UNCUT, Tiles, head_takes_most


@pytest.mark.parametrize(
    ("tokens", "tiles"), [("auto", UNCUT), ("off", UNCUT), (512, Tiles(512)), ((512, 64), Tiles(512, 64))]
)
def test_tiles_of_the_config(tokens: str | int | tuple[int, int], tiles: Tiles) -> None:
    assert Tiles.from_config(tokens) == tiles


def test_tiles_of_a_policy_and_of_one_that_an_earlier_version_saved() -> None:
    assert Tiles.from_policy(Policy(tile_tokens=512, layer_tile_tokens=64)) == Tiles(512, 64)
    assert Tiles.from_policy({"tile_tokens": 512, "layer_tile_tokens": 64}) == Tiles(512, 64)
    assert Tiles.from_policy({"tile_tokens": 512}) == Tiles(512)
    assert Tiles.from_policy({}) == UNCUT


def test_tiles_in_words() -> None:
    assert str(Tiles(1024, 4096)) == "the last layer and the loss take 1,024 tokens at a time, parts of layers 4,096"
    assert str(Tiles(layers=4096)) == "parts of layers take 4,096 tokens at a time"
    assert str(Tiles(head=4)) == "the last layer and the loss take 4 tokens at a time"
    assert not UNCUT.cut


def call(peak_bytes: int) -> CallCost:
    return CallCost(backward=BackwardBytes(peak_bytes=peak_bytes))


@pytest.mark.parametrize(
    ("last", "tail", "weights", "most"),
    [(10, 11, 0, True), (21, 0, 0, True), (10, 10, 0, False), (0, 5, 0, False), (10, 10, 1, True)],
)
def test_the_head_takes_most_if_it_and_the_loss_take_more_than_any_layer(
    last: int, tail: int, weights: int, most: bool
) -> None:
    table = CostTable((0, 1, 2), (call(7), call(20), call(last)), tail_bytes=tail)
    assert head_takes_most(table, (3, 3, 3 + weights)) is most
