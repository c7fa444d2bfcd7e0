"""One process that drives several devices whose tensors do not mix: the bits are those of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import harmony_ds
from harmony_ds.device.group import DeviceGroup
from tests import simdevice
from tests.exactness.models import weights
from tests.families import Family
from tests.graphs import graphs_in, keep_graphs
from tests.simdevice.device import SimDevice
from tests.simdevice.test_engine_exactness import ALL, EVERY, GROUP, SEED, STEPS, Way, optimizer_for

HOST, DEVICE = Way(0.1, 0.5, 1, "host"), Way(0.1, 0.0, 1, "device")
RESIDENT, GRAPHS = Way(0.0, 0.5, 1, "host", EVERY), Way(0.1, 0.5, 1, "host", graphs=(GROUP, 0, 2))


def todo(why: str, *values: Any) -> Any:
    """A case that the engine has yet to learn."""
    return pytest.param(*values, marks=pytest.mark.xfail(raises=RuntimeError, strict=True, reason=why))


CASES = [
    ("SkipNet", 2, HOST),
    ("SkipNet", 3, GRAPHS),
    ("SharedDepthNet", 2, DEVICE),
    ("LayerDropNet", 3, HOST),
    ("TwoPassNet", 2, HOST),
    ("InPlaceNet", 3, DEVICE),
    ("OutsideParameterNet", 3, HOST),
    ("gpt2", 2, DEVICE),
    ("llama", 4, GRAPHS),
    ("t5", 3, HOST),
    ("BatchNormNet", 2, HOST),
    ("deepseek_v3", 2, DEVICE),
    todo("packs stay on device 0 from step to step", "SkipNet", 2, RESIDENT),
]


def devices(count: int) -> DeviceGroup:
    return DeviceGroup([SimDevice(index=index) for index in range(count)])


def engine_of(family: Family, way: Way, device: Any) -> Any:
    model = family.build(way.dropout).train()
    harmony = {"seed": SEED, "pack_layers": 1, "stash": way.stash, "residency": way.residency}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": GROUP,
        "gradient_clipping": way.clip,
        "harmony": harmony,
    }
    optimizer = optimizer_for(family, model)
    return harmony_ds.initialize(model=model, optimizer=optimizer, config=config, device=device)[0]


def trained(family: Family, way: Way, device: Any) -> dict[str, Tensor]:
    """Weights, and the losses of the steps."""
    engine = engine_of(family, way, device)
    found = {}
    for step in range(STEPS):
        found[f"loss {step}"] = engine.train_batch(family.batch(step * GROUP + i) for i in range(GROUP)).detach().cpu()
        report = engine.memory_report()
        assert max(device.peaks()) <= report.planned_peak_bytes
    engine.finish_updates()
    assert bool(way.graphs) == bool(graphs_in(engine.plan))
    engine.destroy()
    return {**found, **weights(engine.module)}


@pytest.mark.parametrize(("name", "count", "way"), CASES, ids=str)
def test_weights_and_losses_are_those_of_one_device(
    name: str, count: int, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way.graphs:
        keep_graphs(monkeypatch, way.graphs)
    expected, before = trained(ALL[name], way, SimDevice()), simdevice.peer_traffic()
    found, after = trained(ALL[name], way, devices(count)), simdevice.peer_traffic()
    assert {index for pair in after if after[pair] > before[pair] for index in pair} == set(range(count))
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
