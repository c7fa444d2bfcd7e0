"""A step like the one before it allocates nothing new, and waits for nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.drive import config_of
from tests.inside import updater_of
from tests.simdevice.late import LateSimDevice
from tests.simdevice.test_engine_late import late_engine

pytestmark = pytest.mark.fixed_times


class Block(nn.Module):
    """A block that reads no value on the device, which would be one more wait."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + F.dropout(self.down(F.gelu(self.up(self.norm(hidden)))), self.dropout, self.training)


class Model(nn.Module):
    def __init__(
        self, tied: bool = False, width: int = 8, layers: int = 4, words: int = 32, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@dataclass(frozen=True)
class Setting:
    """Settings of a run."""

    harmony: dict[str, Any] = field(default_factory=dict)
    clip: float | None = None
    tied: bool = False
    more: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 2


HALF = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
SETTINGS = {
    "immediate": Setting({"stash": "host"}, tied=True),
    "immediate, residents": Setting({"stash": "device", "residency": 2}),
    "deferred": Setting({"stash": "host"}, clip=0.5),
    "deferred, residents": Setting({"stash": "host", "residency": 2}, clip=0.5, tied=True),
    "all resident": Setting({"residency": 100}, clip=0.5),
    "bf16": Setting({"stash": "host", "residency": 1}, clip=0.5, more=HALF),
    "tiles of tokens": Setting({"stash": "host", "tokens": {"head": 3, "layers": 2}}, clip=0.5),
    "joined calls": Setting({"stash": "host", "micro_batch": {"forward": 4, "backward": 4}}, clip=0.5),
    "slices": Setting({"stash": "host", "micro_batch": {"forward": 1, "backward": 1}}, clip=0.5),
    "one micro-batch": Setting({"stash": "host"}, clip=0.5, accumulation=1),
}


def norms_on_the_host(setting: Setting) -> int:
    """How many gradients the thread of updates reads for their norm in two steps."""
    count = []
    device, generator = LateSimDevice(), torch.Generator().manual_seed(1)
    data = iter(lambda: {"ids": torch.randint(0, 32, (2, 5), generator=generator)}, None)
    config = config_of(2, setting.clip, {"pack_layers": 1, **setting.harmony}, **setting.more)
    with late_engine(Model(setting.tied), config, device=device) as engine:
        world = updater_of(engine)._gradients.world
        measured = world.norm_part
        world.norm_part = lambda gradient: (count.append(gradient), measured(gradient))[1]
        for _ in range(2):
            engine.train_batch(data)
        engine.finish_updates()
    return len(count)


def test_norms_are_taken_before_gradients_leave_but_of_those_that_packs_share() -> None:
    assert norms_on_the_host(SETTINGS["deferred"]) == 0
    assert norms_on_the_host(SETTINGS["deferred, residents"]) == 2  # the tied weight, in each step


def steady_waste(setting: Setting) -> list[str]:
    """Return the memory wasted from the third step on.

    Its updates are slow, so that it keeps more gradients on the host than any step before.
    """
    device, generator = LateSimDevice(1), torch.Generator().manual_seed(1)
    data = iter(lambda: {"ids": torch.randint(0, 32, (2, 5), generator=generator)}, None)
    config = config_of(setting.accumulation, setting.clip, {"pack_layers": 1, **setting.harmony}, **setting.more)
    with late_engine(Model(setting.tied), config, device=device) as engine:
        updater = updater_of(engine)
        updater.update = lambda *update: (type(updater).update(updater, *update), updater.wait_all())
        for _ in range(2):
            engine.train_batch(data)
        device.waste.clear()
        del updater.update
        stepping = updater._optimizer.step
        updater._optimizer.step = lambda *update: (time.sleep(0.02), stepping(*update))
        for _ in range(2):
            engine.train_batch(data)
        return list(device.waste)


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_a_steady_step_takes_no_memory_and_waits_for_nothing(setting: Setting) -> None:
    assert steady_waste(setting) == []
