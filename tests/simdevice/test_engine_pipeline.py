"""Several late devices: one device's results, a peak within the plan and no report, however late copies are."""

from __future__ import annotations

import copy
import gc
import random
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from harmony_ds.device.base import HOME, Stream
from harmony_ds.offload.ledger import Ledger
from harmony_ds.offload.stash import Stash
from harmony_ds.scheduler.choose import make_plan
from harmony_ds.scheduler.packing import Packer
from harmony_ds.scheduler.search import Choice, search
from harmony_ds.step import plan_search
from tests.cover import spread
from tests.engine.drive import (
    EVERY_FAMILY,
    Groups,
    config_of,
    engine_for,
    family,
    groups_of,
    loop,
    means_of,
    optimizer_for,
    train_groups,
    weights_of,
)
from tests.engine.test_pipeline import Mixer, Trained, assert_equal
from tests.families import Batch
from tests.graphs import graphs_in, keep_graphs
from tests.model.test_joined import sgd, single_rows, trained
from tests.oracle import assert_same
from tests.scheduler.test_random_plans import cut_at_random, policy_at_random
from tests.simdevice.test_engine_late import late_devices, late_engine
from tests.simdevice.test_engine_steady import Model

pytestmark = [
    pytest.mark.fixed_times,
    pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning"),
]
STEPS, ACCUMULATION = 2, 4


@dataclass(frozen=True)
class Setting:
    """Settings of a run."""

    devices: int
    harmony: dict[str, Any] = field(default_factory=dict)
    clip: float | None = 0.5
    seed: int | None = None
    budget: int | None = None
    looks: bool = False
    graphs: tuple[int, ...] = ()  # of how many micro-batches they are kept: of pack 0, 1, ..., and again from the front


SETTINGS = [
    Setting(2, {"pack_layers": 1, "stash": "host"}),
    Setting(3, {"pack_layers": 1, "stash": "device"}, seed=1),
    Setting(2, {"pack_layers": 2, "stash": "host", "prefetch": False}, clip=None, seed=2),
    Setting(3, {"pack_layers": 1, "stash": "host"}, clip=None, seed=3),
    Setting(2, {"pack_layers": 1, "stash": "host"}, seed=4, looks=True),
]
NAMES = [one.name for one in EVERY_FAMILY]
ROWS = [
    *spread(NAMES, SETTINGS),
    *spread(NAMES, SETTINGS[2:] + SETTINGS[:2]),
    *(("llama", Setting(n, {}, seed=n, budget=500_000)) for n in (2, 3)),
    ("llama", Setting(4, {"pack_layers": 1, "stash": "host"}, seed=5, graphs=(ACCUMULATION, 0, 2))),
    ("SkipNet", Setting(3, {"pack_layers": 1, "stash": "host"}, graphs=(ACCUMULATION, 0, 2))),
    ("gemma4", Setting(2, {"pack_layers": 3})),  # whose layers write into a dictionary for others of the last pack
]


@cache
def on_one_device(name: str, clip: float | None) -> Trained:
    """Return the results of one CPU device."""
    one = family(name)
    model = one.build(0.1)
    with engine_for(model, optimizer_for(one), config_of(ACCUMULATION, clip, {"pack_layers": 1})) as engine:
        losses = train_groups(engine, groups_of(one, STEPS, ACCUMULATION))
    return weights_of(model), losses


@pytest.mark.parametrize(("name", "setting"), ROWS)
def test_several_devices_train_as_one(name: str, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    if setting.graphs:
        keep_graphs(monkeypatch, setting.graphs)
    one, device = family(name), late_devices(setting.devices, setting.seed, setting.budget)
    model, groups = one.build(0.1), groups_of(one, STEPS, ACCUMULATION)
    config = config_of(ACCUMULATION, setting.clip, setting.harmony)
    with late_engine(model, config, make=optimizer_for(one), device=device) as engine:
        losses = means_of(loop(engine, groups, lambda i: i == 1)) if setting.looks else train_groups(engine, groups)
        report = engine.memory_report()
        assert len(report.device_peaks) == setting.devices
        assert setting.looks or max(report.device_peaks) <= report.planned_peak_bytes
        assert engine.plan is not None
        assert not setting.graphs or graphs_in(engine.plan)
    assert_equal((weights_of(model), losses), on_one_device(name, setting.clip))


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_joined_calls_cross_in_order(name: str) -> None:
    groups, sizes = single_rows(name), {"forward": 8, "backward": 4}
    expected = trained(family(name).build(0.0), groups, sgd, micro_batch=sizes)
    model, config = family(name).build(0.0), config_of(len(groups[0]), 0.5, {"pack_layers": 1, "micro_batch": sizes})
    with late_engine(model, config, make=sgd, device=late_devices(3, 1, None)) as engine:
        losses = train_groups(engine, groups)
    assert_equal((weights_of(model), losses), expected)


def test_steps_leave_no_more_on_the_devices_than_the_ones_before() -> None:
    """Unlayered parameters go to other devices, and into the graphs of what is computed there."""
    device, (model, groups) = late_devices(3, 1), build(3)
    counts = []
    with late_engine(model, config_of(len(groups[0]), 0.5, {"pack_layers": 1}), device=device) as engine:
        for _ in range(3):
            train_groups(engine, groups[:1])
            engine.eval()
            engine.eval_batch(iter(groups[1]))
            engine.train()
            gc.collect()
            counts.append(len(device.members[0].late._blocks))
    assert counts[0] == counts[1] == counts[2]


# ---- plans that nobody would choose


def build(seed: int) -> tuple[nn.Module, Groups]:
    """Return a tiny model, and micro-batches of it."""
    source = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Mixer() if seed % 3 == 0 else Model(tied=seed % 3 == 1, layers=6)
    count = 1 + seed % 5

    def batch() -> Batch:
        if isinstance(model, Mixer):
            return {k: torch.randn(2, 6, generator=source) for k in "xy"}
        return {"ids": torch.randint(0, 32, (2, 5), generator=source)}

    return model, [[batch() for _ in range(count)] for _ in range(2)]


def plan_at_random(monkeypatch: pytest.MonkeyPatch, choose: random.Random) -> None:
    """From now on, plans are cut and kept at random, and not searched for."""

    def found(*args: Any, **more: Any) -> tuple[Choice, ...]:
        graph, costs, _, element, request = args
        packing = cut_at_random(Packer(graph, costs, element, request.policy), len(costs.calls), choose)
        policy = policy_at_random(packing, request.policy, request.micro_batches, choose)
        return (replace(search(*args, **more)[0], plan=make_plan(packing, costs, request, policy)),)

    monkeypatch.setattr(plan_search, "search", found)


@pytest.mark.parametrize("seed", range(30))
def test_random_plans_with_random_delays_train_as_one_device(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = random.Random(seed)
    results, clip = [], choose.choice([None, 0.5])
    for devices in (1, choose.choice([2, 3, 4])):
        model, groups = build(seed)
        config = config_of(len(groups[0]), clip, {"pack_layers": 1})
        if devices > 1:
            plan_at_random(monkeypatch, choose)
        with late_engine(model, config, device=late_devices(devices, seed)) as engine:
            losses = train_groups(engine, groups)
        results.append((weights_of(model), losses))
    # Other cuts regroup sums, which some processors' kernels show: 1e-7 was seen. What comes too late is far off.
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-6)
    assert_same(results[1][0], results[0][0], bitwise=False, relative=1e-5)


def test_a_stashed_tensor_that_is_discarded_leaves_no_queued_copy_to_the_next_in_its_buffer() -> None:
    """Of a micro-batch that was looked at and is not propagated back from; the buffer goes to another device's."""
    device = late_devices(2)
    stash = Stash(device, Ledger(device))
    with device.as_current():
        device.enter(1)
        unused = stash.put(torch.full((8,), 1.0, device=device.torch_device), "layer")
        stash.swap_out([unused])
        device.enter(HOME)
        stash.release(unused)
        entry = stash.put(torch.full((8,), 2.0, device=device.torch_device), "layer")
        stash.swap_out([entry])
        for number in (HOME, 1):
            device.enter(number)
            for stream in Stream:
                device.record(stream).synchronize()
        device.enter(HOME)
        assert stash.tensor(entry).eq(2.0).all()
        stash.release(entry)
    stash.destroy()


class Longer(nn.Module):
    """Takes some data through a layer more, after the first one: all later layers run on the other device then."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.more, self.middle = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if len(x) == 3:
            x = torch.tanh(self.more(x))
        return self.last(torch.tanh(self.middle(x))).pow(2).mean()


@pytest.mark.parametrize("stash", ["device", "host"])
def test_micro_batches_that_were_looked_at_before_a_new_plan_are_propagated_back_from_on_its_devices(
    stash: str,
) -> None:
    torch.manual_seed(0)
    model, inputs = Longer(), [torch.randn(rows, 6) for rows in (4, 4, 3, 4)]
    plain = copy.deepcopy(model)
    for x in inputs:
        (plain(x) / len(inputs)).backward()
    sgd(plain.parameters()).step()

    config = config_of(len(inputs), harmony={"pack_layers": 1, "stash": stash})
    with late_engine(model, config, make=sgd, device=late_devices(2)) as engine:
        losses = [engine(x) for x in inputs]
        for loss in losses:
            loss.item()
        for loss in losses:
            engine.backward(loss)
            engine.step()

    assert_same(model, plain, bitwise=True)


class LongerReader(Longer):
    """The same, of tokens, with a head and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = x.sum(-1).long() % 24
        x = torch.tanh(self.first(x))
        if len(x) == 3:
            x = torch.tanh(self.more(x))
        logits = self.last(torch.tanh(self.middle(x)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())


def test_a_head_in_tiles_that_was_looked_at_before_a_new_plan_is_propagated_through_on_its_device() -> None:
    torch.manual_seed(0)
    model, inputs = LongerReader(), [torch.randn(rows, 5, 6) for rows in (4, 4, 3, 4)]
    plain = copy.deepcopy(model)
    for x in inputs:
        (plain(x) / len(inputs)).backward()
    sgd(plain.parameters()).step()

    config = config_of(len(inputs), harmony={"pack_layers": 1, "tokens": {"head": 7, "layers": 4096}})
    with late_engine(model, config, make=sgd, device=late_devices(2)) as engine:
        losses = [engine(x) for x in inputs]
        for loss in losses:
            loss.item()
        assert engine.plan.policy.tile_tokens == 7
        for loss in losses:
            engine.backward(loss)
            engine.step()

    assert_same(model, plain, bitwise=False)
