"""The engine on a device that is not the host, prompt or late: plain PyTorch's bits, a peak within the plan, no report."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds.config.ablations import ABLATIONS
from harmony_ds.errors import UnsupportedError
from harmony_ds.scheduler.plan import Plan
from tests.cover import spread
from tests.engine.drive import EVERY_FAMILY, adamw, config_of, engine_for, family, groups_of, optimizer_for, plainly
from tests.families import Family
from tests.graphs import graphs_in, keep_graphs
from tests.oracle import assert_same
from tests.simdevice.device import SimDevice, engine_of
from tests.simdevice.test_engine_late import late_engine

pytestmark = pytest.mark.fixed_times

GROUP = 4
STEPS = 2
NAMES = [one.name for one in EVERY_FAMILY]


@dataclass(frozen=True)
class Way:
    """A combination of settings; each family is run with one."""

    dropout: float
    clip: float
    pack_layers: int
    stash: str
    residency: int | str = "off"
    graphs: tuple[int, ...] = ()  # of how many micro-batches they are kept: of pack 0, 1, ..., and again from the front
    late: bool = False  # streams are late: by random delays if there is a seed, else as late as possible
    seed: int | None = None

    def __str__(self) -> str:
        kept = "".join(map(str, self.graphs))
        streams = "prompt" if not self.late else "latest" if self.seed is None else f"late{self.seed}"
        return (
            f"pack{self.pack_layers}-{self.stash}-drop{self.dropout}-resident-{self.residency}-graphs{kept}-{streams}"
        )


EVERY = 100
WAYS = (
    Way(0.0, 0.0, 1, "host", late=True),
    Way(0.1, 0.5, 1, "auto", EVERY, late=True),
    Way(0.1, 0.5, 2, "device"),
    Way(0.0, 0.0, 1, "host", 2, late=True, seed=1),
    Way(0.0, 0.5, EVERY, "auto"),
    Way(0.1, 0.5, 1, "host", 1, late=True, seed=3),
    Way(0.1, 0.5, 1, "host", late=True),
)
WAYS_WITH_GRAPHS = (
    Way(0.1, 0.5, 1, "device", graphs=(GROUP,), late=True),
    Way(0.1, 0.0, 1, "host", graphs=(GROUP, 0, 2)),
    Way(0.1, 0.5, 2, "host", graphs=(1, 3), late=True, seed=1),
    Way(0.1, 0.0, 2, "device", graphs=(0, 2, GROUP)),
    Way(0.1, 0.0, 1, "host", 3, graphs=(3, 2), late=True, seed=3),
)
MOST_OFF = 1.25
"""The planned peak over the measured one. A micro-batch that runs alone hides less of what is planned with care."""
OFF: dict[str, dict[str, Any]] = {
    a.name: dict(a.harmony) for a in ABLATIONS if not a.device and a.harmony.keys() != {"stash"}
}
WAYS_OFF = [
    *(("llama", Way(0.0, clip, 2, "device"), name) for name in OFF for clip in (0.0, 0.5)),
    ("bert", Way(0.0, 0.5, 1, "host"), "without everything"),
    ("t5", Way(0.0, 0.5, 2, "host"), "without everything"),
    ("mixtral", Way(0.0, 0.5, EVERY, "device"), "without everything"),
    ("SkipNet", Way(0.0, 0.5, 1, "host"), "without everything"),
    ("BatchNormNet", Way(0.0, 0.0, 1, "device"), "without everything"),
    ("LayerDropNet", Way(0.0, 0.5, 2, "host"), "without everything"),
]


def config_for(way: Way, **harmony: Any) -> Any:
    settings = {"pack_layers": way.pack_layers, "stash": way.stash, "residency": way.residency}
    return config_of(GROUP, way.clip, settings | harmony)


def assert_as_plainly_and_as_planned(one: Family, way: Way, most: float = math.inf, **harmony: Any) -> Plan:
    """Check weights against plain accumulation and the peak against the plan; return the plan."""
    groups, make = groups_of(one, STEPS, GROUP), optimizer_for(one)
    plain, _ = plainly(one, way.dropout, groups, make, way.clip or None)
    model, measured = one.build(way.dropout), 0
    config = config_for(way, **harmony)
    opened = (
        late_engine(model, config, way.seed, make) if way.late else engine_for(model, make, config, device=SimDevice())
    )
    with opened as engine:
        for group in groups:
            engine.train_batch(iter(group))
            measured = max(measured, engine.memory_report().device_peak_bytes)
        engine.finish_updates()
        report, plan = engine.memory_report(), engine.plan
    assert plan is not None
    assert_same(model, plain, one.bitwise)
    measured = max(measured, report.device_peak_bytes)
    assert measured <= report.planned_peak_bytes <= most * measured
    return plan


class Scattered(nn.Linear):
    """A layer of which the last bits differ from run to run, as sums by atomic operations on a GPU do."""

    runs = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) * (1 + 1e-6 * next(self.runs))).square().mean(-1, keepdim=True)


def test_last_bits_that_differ_from_run_to_run_are_no_fault_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Scattered(8, 8), nn.Flatten(0))
    with engine_for(model, adamw, config_of(GROUP), device=SimDevice()) as engine:
        engine.train_batch(iter(torch.randn(GROUP, 1, 8)))
        assert engine.global_steps == 1


class Impatient(nn.Sequential):
    """A model that propagates back between its layers, on a thread of its device's unless that is refused."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self[0](x)
        hidden.sum().backward(retain_graph=True)
        return self[1](hidden).mean()


def test_a_backward_pass_within_forward_is_refused_as_on_the_host() -> None:
    model = Impatient(nn.Linear(8, 8), nn.Linear(8, 1))
    with (
        engine_for(model, adamw, config_of(GROUP), device=SimDevice()) as engine,
        pytest.raises(UnsupportedError, match="forward propagates back"),
    ):
        engine.train_batch(iter(torch.randn(GROUP, 1, 8)))


def test_threads_have_the_engines_device_as_their_current_one(tmp_path: Path) -> None:
    on_disk = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}
    config, index = config_of(1, zero_optimization=on_disk), torch.accelerator.current_device_index
    with engine_for(nn.Sequential(nn.Linear(8, 8)), adamw, config, device=SimDevice(index=1)) as engine:
        weights = engine._state.store.disk_weights
        assert weights is not None
        assert engine._state.runtime.updater._ask(index) == weights._reader.submit(index).result() == 1
    assert index() == 0


@pytest.mark.parametrize(("name", "way"), spread(NAMES, WAYS), ids=str)
def test_same_weights_as_plain_accumulation_and_a_peak_within_the_plan(name: str, way: Way) -> None:
    assert_as_plainly_and_as_planned(family(name), way)


@pytest.mark.parametrize(("name", "way"), spread(NAMES, WAYS_WITH_GRAPHS), ids=str)
def test_same_weights_and_peak_with_kept_graphs(name: str, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_graphs(monkeypatch, way.graphs)
    plan = assert_as_plainly_and_as_planned(family(name), way)
    assert graphs_in(plan) or len(plan.packing.forward) < 2


@pytest.mark.parametrize(("name", "way", "off"), WAYS_OFF, ids=str)
def test_same_weights_and_peak_with_mechanisms_switched_off(name: str, way: Way, off: str) -> None:
    assert_as_plainly_and_as_planned(family(name), way, MOST_OFF, **OFF[off])


class Writing(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2)).square().mean()


def test_a_batch_that_is_on_the_device_is_written_into_as_little_as_one_on_the_host() -> None:
    losses = []
    for home in ("cpu", SimDevice().torch_device):
        torch.manual_seed(0)
        engine, _ = engine_of(Writing(nn.Linear(4, 4), nn.Linear(4, 1)), adamw, 2)
        batches = [torch.ones(2, 4).to(home) for _ in range(2)]
        losses += [[engine.train_batch([(batch,) for batch in batches]).item() for _ in range(2)]]
        assert all(batch.eq(1).all() for batch in batches)
        engine.destroy()
    assert losses[0] == losses[1]
