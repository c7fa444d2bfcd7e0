"""Steps in which the caching allocator was short of room: one warning, and then plans that leave it more of the budget."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from harmony_ds import HarmonyEngine
from harmony_ds.device import CpuDevice
from tests.engine.drive import config_of, engine_for, family, groups_of, sgd, train_groups, weights_of

pytestmark = pytest.mark.fixed_times

LLAMA = family("llama")
GROUPS = groups_of(LLAMA, 12, 2)
WARNING = "short of room"


class ShortDevice(CpuDevice):
    """A device with a caching allocator, which is short of room whenever it is asked and `is_short` is set."""

    is_short = True
    retries = 0

    def reserved_bytes(self) -> int | None:
        return 77

    def allocator_retries(self) -> int:
        self.retries += self.is_short
        return self.retries


@contextmanager
def engine_on(device: CpuDevice, **harmony: Any) -> Iterator[HarmonyEngine]:
    config = config_of(2, 0.5, {"residency": "off", **harmony})
    with engine_for(LLAMA.build(0.0), sgd, config, device=device) as engine:
        yield engine


@cache
def most_bytes() -> int:
    """Return the peak of a plan that has all the memory it wants."""
    with engine_on(CpuDevice(2**30)) as engine:
        train_groups(engine, GROUPS[:1])
        assert engine.plan is not None
        return engine.plan.peak_bytes


def train_and_list_plans(engine: HarmonyEngine, steps: int) -> list[Any]:
    """Return the plan that each step has run."""
    plans = []
    for group in GROUPS[:steps]:
        train_groups(engine, [group])
        plans.append(engine.plan)
    return plans


def test_after_two_short_steps_the_next_plan_leaves_a_32nd_free(caplog: pytest.LogCaptureFixture) -> None:
    device = ShortDevice(most_bytes())
    with engine_on(device) as engine:
        plans = train_and_list_plans(engine, 2)
        assert WARNING not in caplog.text  # what was allocated before may be in the way of a plan's first steps
        plans += train_and_list_plans(engine, 3)
        assert caplog.text.count(WARNING) == 1
        assert plans[0] is plans[3] and plans[4] is not plans[3]
        assert plans[3].peak_bytes == most_bytes()
        assert plans[4].peak_bytes <= most_bytes() * 31 // 32
        assert engine.memory_report().beside_bytes == most_bytes() // 32
        device.is_short = False
        train_and_list_plans(engine, 4)
        assert engine.plan is plans[4]
        report = engine.memory_report()
    assert report.reserved_bytes == 77 and report.allocator_retries == device.retries
    assert "reserved by the allocator 77 B (" in str(report)
    assert f"), retries {device.retries}" in str(report)


def test_an_eighth_is_left_free_at_most_and_weights_are_those_of_one_plan() -> None:
    with engine_on(CpuDevice(most_bytes())) as engine:
        losses = train_groups(engine, GROUPS * 2)
        expected = weights_of(engine.module)
    with engine_on(ShortDevice(most_bytes())) as engine:
        assert train_groups(engine, GROUPS * 2) == losses
        assert engine.memory_report().beside_bytes == 4 * (most_bytes() // 32)
        assert engine.plan is not None and engine.plan.peak_bytes <= most_bytes() * 7 // 8
        found = weights_of(engine.module)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_a_plan_without_anything_free_runs_where_no_other_fits() -> None:
    harmony = {"pack_layers": 1, "stash": "host", "prefetch": False}
    with engine_on(CpuDevice(2**30), **harmony) as engine:
        train_groups(engine, GROUPS[:1])
        assert engine.plan is not None
        smallest = engine.plan.peak_bytes
    with engine_on(ShortDevice(smallest), **harmony) as engine:
        plans = train_and_list_plans(engine, 12)
        assert engine.memory_report().beside_bytes == 0
    assert {plan.peak_bytes for plan in plans} == {smallest}
    assert len(set(map(id, plans))) == 2  # it was looked for once


def test_a_plan_that_was_given_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "plan.json"
    with engine_on(CpuDevice(most_bytes())) as engine:
        train_groups(engine, GROUPS[:1])
        assert engine.plan is not None
        path.write_text(engine.plan.to_json())
    with engine_on(ShortDevice(most_bytes()), plan=str(path)) as engine:
        plans = train_and_list_plans(engine, 8)
    assert all(plan is plans[0] for plan in plans)
    assert caplog.text.count(WARNING) == 1


def test_a_device_without_a_caching_allocator_reports_none() -> None:
    with engine_on(CpuDevice()) as engine:
        train_groups(engine, GROUPS[:1])
        report = engine.memory_report()
    assert report.reserved_bytes is None and report.allocator_retries == 0
    assert "reserved" not in str(report)
