"""Kept graphs on a device that counts every byte: plain PyTorch's bits, and a peak within the plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

import harmony_ds
from tests.cover import spread
from tests.graphs import graphs_in, keep_graphs
from tests.oracle import assert_same, train_plainly
from tests.simdevice.device import SimDevice
from tests.simdevice.test_engine_exactness import ALL, GROUP, SEED, STEPS, optimizer_for


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
    family = ALL[name]
    plain = family.build(way.dropout).train()
    if name in ("gpt2", "opt"):
        plain.config.use_cache = False  # a cache changes the bits of attention dropout, in plain PyTorch too
    groups: list[list[dict[str, Any]]] = [[family.batch(s * GROUP + i) for i in range(GROUP)] for s in range(STEPS)]
    train_plainly(
        plain,
        groups,
        optimizer_for(family, plain),
        clip=way.clip or None,
        seed_of=lambda step, index: harmony_ds.micro_batch_seed(SEED, step, index),
    )

    keep_graphs(monkeypatch, way.graphs)
    model = family.build(way.dropout).train()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": GROUP,
        "gradient_clipping": way.clip,
        "harmony": {"seed": SEED, "stash": way.stash, "pack_layers": way.pack_layers},
    }
    engine, *_ = harmony_ds.initialize(
        model=model, optimizer=optimizer_for(family, model), config=config, device=SimDevice()
    )
    for group in groups:
        engine.train_batch(iter(group))
    engine.finish_updates()
    report, plan = engine.memory_report(), engine.plan
    engine.destroy()
    assert_same(model, plain, family.bitwise)
    assert graphs_in(plan) or len(plan.packing.forward) < 2
    assert report.device_peak_bytes <= report.planned_peak_bytes
