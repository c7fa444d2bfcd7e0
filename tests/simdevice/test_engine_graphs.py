"""Kept graphs on a device that counts every byte: plain PyTorch's bits, and a peak within the plan."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.cover import spread
from tests.graphs import graphs_in, keep_graphs
from tests.simdevice.test_engine_exactness import ALL, GROUP, assert_as_plainly_and_as_planned


@dataclass(frozen=True)
class Way:
    """One combination of settings; each family goes one of them."""

    dropout: float
    clip: float
    pack_layers: int
    stash: str
    graphs: tuple[int, ...]  # of how many micro-batches: of pack 0, 1, ..., and again from the front

    def __str__(self) -> str:
        return f"pack{self.pack_layers}-{self.stash}-drop{self.dropout}-graphs{''.join(map(str, self.graphs))}"


WAYS = (
    Way(0.1, 0.5, 1, "device", (GROUP,)),
    Way(0.1, 0.0, 1, "host", (GROUP, 0, 2)),
    Way(0.1, 0.5, 2, "host", (1, 3)),
    Way(0.1, 0.0, 2, "device", (0, 2, GROUP)),
)


@pytest.mark.parametrize(("name", "way"), spread(list(ALL), WAYS), ids=str)
def test_same_weights_as_plain_accumulation_and_a_peak_within_the_plan(
    name: str, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_graphs(monkeypatch, way.graphs)
    harmony = {"stash": way.stash, "pack_layers": way.pack_layers}
    plan = assert_as_plainly_and_as_planned(ALL[name], way.dropout, way.clip, harmony)
    assert graphs_in(plan) or len(plan.packing.forward) < 2
