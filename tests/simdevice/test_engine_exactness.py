"""The engine on a device that is not the host: a tensor made in the wrong place raises, and results are the CPU's bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import harmony_ds
from harmony_ds.scheduler.plan import Plan
from tests.cover import spread
from tests.families import FAMILIES, MODULES, Family
from tests.oracle import assert_same, train_plainly
from tests.simdevice.device import SimDevice

SEED = 5
GROUP = 4
STEPS = 2
ALL = {family.name: family for family in (*MODULES, *FAMILIES)}


@dataclass(frozen=True)
class Way:
    """One combination of settings; each family goes one of them."""

    dropout: float
    clip: float
    pack_layers: int
    stash: str
    residency: int | str = "off"

    def __str__(self) -> str:
        return f"pack{self.pack_layers}-{self.stash}-drop{self.dropout}-resident-{self.residency}"


EVERY = 100
WAYS = (
    Way(0.0, 0.0, 1, "host"),
    Way(0.1, 0.5, 1, "auto", EVERY),
    Way(0.1, 0.5, 2, "device"),
    Way(0.0, 0.0, 1, "host", 2),
    Way(0.0, 0.5, EVERY, "auto"),
)


def optimizer_for(family: Family, model: torch.nn.Module) -> torch.optim.Optimizer:
    # Adam turns the rounding of regrouped sums into visible differences where gradients are close to zero.
    if family.bitwise:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    return torch.optim.SGD(model.parameters(), lr=1e-2)


def assert_as_plainly_and_as_planned(family: Family, dropout: float, clip: float, harmony: dict[str, Any]) -> Plan:
    """The weights are those of plain accumulation, and the peak is within the plan, which is returned."""
    model, plain = family.build(dropout).train(), family.build(dropout).train()
    if family.name in ("gpt2", "opt"):
        plain.config.use_cache = False  # a cache changes the bits of attention dropout, in plain PyTorch too
    groups: list[list[dict[str, Any]]] = [[family.batch(s * GROUP + i) for i in range(GROUP)] for s in range(STEPS)]
    train_plainly(
        plain,
        groups,
        optimizer_for(family, plain),
        clip=clip or None,
        seed_of=lambda step, index: harmony_ds.micro_batch_seed(SEED, step, index),
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": GROUP,
        "gradient_clipping": clip,
        "harmony": {"seed": SEED, **harmony},
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
    assert report.device_peak_bytes <= report.planned_peak_bytes
    return plan


@pytest.mark.parametrize(("name", "way"), spread(list(ALL), WAYS), ids=str)
def test_same_weights_as_plain_accumulation_and_a_peak_within_the_plan(name: str, way: Way) -> None:
    harmony = {"pack_layers": way.pack_layers, "stash": way.stash, "residency": way.residency}
    assert_as_plainly_and_as_planned(ALL[name], way.dropout, way.clip, harmony)
