"""One process that drives several devices, whose tensors torch does not mix, gives the bits of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds.device.group import DeviceGroup
from tests import simdevice
from tests.engine.drive import engine_for, family, groups_of, optimizer_for, weights_of
from tests.families import Batch
from tests.graphs import graphs_in, keep_graphs
from tests.simdevice.device import SimDevice
from tests.simdevice.test_engine_exactness import GROUP, STEPS, Way, config_for

HOST, DEVICE = Way(0.1, 0.5, 1, "host"), Way(0.1, 0.0, 1, "device")
GRAPHS = Way(0.1, 0.5, 1, "host", graphs=(GROUP, 0, 2))
CASES = [
    ("SkipNet", 2, HOST),
    ("SkipNet", 3, GRAPHS),
    ("SharedDepthNet", 2, DEVICE),
    ("BatchNormNet", 2, HOST),
    ("LayerDropNet", 3, HOST),
    ("TwoPassNet", 2, HOST),
    ("InPlaceNet", 3, DEVICE),
    ("OutsideParameterNet", 3, HOST),
    ("gpt2", 2, DEVICE),
    ("llama", 4, GRAPHS),
    ("t5", 4, HOST),
    ("deepseek_v3", 2, DEVICE),
]


def trained(model: nn.Module, make: Any, groups: list[list[Batch]], way: Way, device: Any) -> dict[str, Tensor]:
    """Weights, and the losses of the steps."""
    losses = {}
    with engine_for(model, make, config_for(way), device=device) as engine:
        for step, group in enumerate(groups):
            losses[f"loss {step}"] = engine.train_batch(iter(group)).detach().cpu()
            assert max(device.peaks()) <= engine.memory_report().planned_peak_bytes
        assert engine.plan is not None
        assert bool(way.graphs) == bool(graphs_in(engine.plan))
    return losses | weights_of(model)


@pytest.mark.parametrize(("name", "count", "way"), CASES, ids=str)
def test_weights_and_losses_are_those_of_one_device(
    name: str, count: int, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way.graphs:
        keep_graphs(monkeypatch, way.graphs)
    one = family(name)
    make, groups = optimizer_for(one), groups_of(one, STEPS, GROUP)
    expected, before = trained(one.build(way.dropout), make, groups, way, SimDevice()), simdevice.peer_traffic()
    several = DeviceGroup([SimDevice(index=index) for index in range(count)])
    found, after = trained(one.build(way.dropout), make, groups, way, several), simdevice.peer_traffic()
    assert {index for pair in after if after[pair] > before[pair] for index in pair} == set(range(count))
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
