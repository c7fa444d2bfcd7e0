"""Plans that are found, reported, saved and run again; profiles that are kept."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import ConfigError, DoesNotFitError, HarmonyEngine
from harmony_ds.device.cpu import CpuDevice
from harmony_ds.offload.device_copies import DeviceCopies
from harmony_ds.optim.host_optimizer import HostOptimizer
from harmony_ds.optim.updater import Updater
from harmony_ds.scheduler.choose import make_plan
from harmony_ds.scheduler.packing import Packer
from harmony_ds.scheduler.plan import Plan, Task
from harmony_ds.scheduler.search import Choice, search
from harmony_ds.step import plan_search
from tests.engine.drive import adamw, config_of, engine_for, family, groups_of, train_groups
from tests.inside import has_pending, updater_of
from tests.oracle import assert_same

pytestmark = pytest.mark.fixed_times

LLAMA = family("llama")
GROUPS = groups_of(LLAMA, 3, 2)
GIB = 2**30


def train(clip: float = 1.0, **harmony: Any) -> tuple[HarmonyEngine, nn.Module]:
    """A destroyed engine, which has taken three steps, and its model."""
    model = LLAMA.build(0.0)
    with engine_for(model, adamw, config_of(2, clip, harmony)) as engine:
        train_groups(engine, GROUPS)
    return engine, model


def test_a_report_compares_predictions_with_measurements() -> None:
    engine, _ = train(pack_layers=2)
    report = engine.plan_report()

    assert report.choices[0].plan == engine.plan
    assert len(report.measured_step_ms) == len(GROUPS) - 1
    assert report.predicted_step_ms > 0
    assert report.typical_step_ms is not None
    assert report.time_error == report.predicted_step_ms / report.typical_step_ms - 1
    assert report.peak_error >= 0
    assert report.swapped_bytes == report.choices[0].prediction.swaps.total
    assert "ms predicted" in str(report)
    assert "ms measured (1.00 x the prediction)" in str(
        replace(report, measured_step_ms=(report.predicted_step_ms * 1.0001,) * 2)
    )


@pytest.mark.parametrize("share", [1.5, 2.0, 4.0, 20.0])
def test_every_plan_within_a_budget_gives_the_same_bits_and_keeps_to_it(share: float) -> None:
    engine, reference = train(pack_layers=1)
    weights = sum(p.numel() * p.element_size() for p in reference.parameters())
    engine, model = train(device_memory_gib=share * weights / GIB)
    report = engine.plan_report()

    assert_same(model, reference, bitwise=True)
    assert report.device_peak_bytes <= report.choices[0].plan.peak_bytes <= share * weights
    assert 1 <= len(report.choices) <= 10


def test_spare_memory_ends_the_swapping() -> None:
    engine, _model = train(device_memory_gib=1.0)
    swaps = engine.swap_report()

    assert engine.plan.policy.resident
    assert swaps.swap_bytes == 0


@pytest.mark.parametrize("harmony", [{"pack_layers": 3, "stash": "host"}, {"micro_batch": 1}], ids=str)
def test_a_saved_plan_is_run_as_it_is(harmony: dict[str, Any], tmp_path: Path) -> None:
    engine, reference = train(**harmony)
    path = tmp_path / "plan.json"
    path.write_text(engine.plan.to_json())
    again, model = train(plan=str(path))

    assert again.plan == engine.plan
    assert harmony.get("micro_batch", 0) == engine.plan.policy.backward_rows
    assert again.plan_report().choices[0].reason == "as saved"
    assert_same(model, reference, bitwise=True)


def test_a_saved_plan_that_does_not_match_is_refused(tmp_path: Path) -> None:
    engine, _ = train(pack_layers=3)
    path = tmp_path / "plan.json"
    path.write_text(engine.plan.to_json())

    with pytest.raises(
        ConfigError, match=r"made for gradient clipping or loss scaling: true, and is to run with false"
    ):
        train(clip=0.0, plan=str(path))
    with pytest.raises(DoesNotFitError, match=r"harmony.plan needs [\d,]+ bytes"):
        train(plan=str(path), device_memory_gib=0.95 * engine.plan.peak_bytes / GIB)
    data = json.loads(engine.plan.to_json())
    data["packing"]["packs"][0]["weight_bytes"] += 64
    path.write_text(json.dumps(data))
    with pytest.raises(
        ConfigError, match=r"made for weights whose bytes are [\d,]+, and is to run with [\d,]+\. Plan again"
    ):
        train(plan=str(path))
    data["packing"]["packs"][-1]["positions"].append(99)
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="or is another model's"):
        train(plan=str(path))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("packing.forward", [0, 9]),
        ("packing.forward", [0, 2]),
        ("packing.backward", []),
        ("packing.packs.0.positions", []),
        ("packing.packs.1.positions", [4, 5]),
        ("policy.resident", [9]),
    ],
)
def test_a_saved_plan_that_contradicts_itself_is_refused(tmp_path: Path, path: str, value: list[int]) -> None:
    engine, _ = train(pack_layers=3)
    data = part = json.loads(engine.plan.to_json())
    *keys, last = path.split(".")
    for key in keys:
        part = part[int(key) if key.isdecimal() else key]
    part[last] = value
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"harmony.plan contradicts itself"):
        train(plan=str(tmp_path / "plan.json"))


def test_a_file_that_is_no_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        train(plan=str(tmp_path / "missing.json"))
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match="no plan of this version"):
        train(plan=str(tmp_path / "other.json"))
    with pytest.raises(ConfigError, match="two ways to say"):
        train(plan=str(tmp_path / "other.json"), pack_layers=2)


def test_a_kept_profile_is_used_again_and_a_foreign_one_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "profile.json"
    first, _ = train(profile=str(path), pack_layers=2)
    written = path.read_text()
    second, _ = train(profile=str(path), pack_layers=2)

    assert path.read_text() == written
    assert second.plan_report().predicted_step_ms == first.plan_report().predicted_step_ms

    data = json.loads(written)
    data["key"]["torch"] = "0.4"
    path.write_text(json.dumps(data))
    with caplog.at_level(logging.WARNING):
        train(profile=str(path), pack_layers=2)
    assert "torch was '0.4'" in caplog.text
    assert json.loads(path.read_text())["key"]["torch"] == torch.__version__


def test_a_plan_found_with_memory_to_spare_for_residents_is_adopted_without_any(tmp_path: Path) -> None:
    engine, reference = train(device_memory_gib=1.0, residency="auto")
    found = engine.plan_report().choices[0].plan
    plan = replace(found, policy=replace(found.policy, resident=()))
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    engine, model = train(device_memory_gib=1.0, plan=str(path))
    assert engine.plan is not None
    assert engine.plan.policy == plan.policy
    assert_same(model, reference, bitwise=True)


def test_runs_before_a_delayed_swap_in_go_on_while_its_pack_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every update of layer 1 ends only once the next step has run micro-batches through the pack before it."""
    _, plain = train(pack_layers=1)
    run_before, gated = threading.Event(), iter(range(len(GROUPS) - 1))
    step = HostOptimizer.step
    tasks: list[str] = []

    def found(*args: Any, **more: Any) -> tuple[Choice, ...]:
        _, costs, _, _, request = args
        choice = search(*args, **more)[0]
        packs = choice.plan.packs
        delays = tuple(2 * (pack.index in layer_1_or_later(choice.plan)) for pack in packs)
        policy = replace(choice.plan.policy, prefetch=True, swap_in_delays=delays)
        return (replace(choice, plan=make_plan(choice.plan.packing, costs, request, policy)),)

    def layer_1_or_later(plan: Plan) -> list[int]:
        first = next(pack.index for pack in plan.packs if any(".1." in name for name in pack.parameters))
        return [pack.index for pack in plan.packs if pack.positions and pack.index >= first]

    def late_step(self: HostOptimizer, gradients: Mapping[str, Tensor], hyper: Any) -> None:
        if any(".1." in name for name in gradients) and next(gated, None) is not None:
            assert run_before.wait(60)
            run_before.clear()
        step(self, gradients, hyper)

    def watch(done: int, total: int, task: Task) -> None:
        if done == 1:
            tasks.clear()
        tasks.append(str(task))
        assert engine.plan is not None
        if has_pending(updater, engine.plan.packs[layer_1_or_later(engine.plan)[0]].needed_at):
            before = layer_1_or_later(engine.plan)[0] - 1
            if {f"F{before}.0", f"F{before}.1"} <= {*tasks}:
                run_before.set()

    monkeypatch.setattr(plan_search, "search", found)
    monkeypatch.setattr(HostOptimizer, "step", late_step)
    model = LLAMA.build(0.0)
    with engine_for(model, adamw, config_of(2, 1.0, {"pack_layers": 1})) as engine:
        updater = updater_of(engine)
        engine.on_progress(watch)
        train_groups(engine, GROUPS)
    assert next(gated, None) is None
    assert_same(model, plain, bitwise=True)


def test_a_forward_pack_waits_for_all_the_packs_that_update_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late update waits until the next step either waits for it, or has swapped in without."""
    _, plain = train(pack_layers=1)
    going_on, gated = threading.Event(), iter(range(len(GROUPS) - 1))
    step, wait, swap_in = HostOptimizer.step, Updater.wait, DeviceCopies.swap_in

    def found(*args: Any, **more: Any) -> tuple[Choice, ...]:
        graph, costs, _, element, request = args
        calls = len(costs.calls)
        packing = Packer(graph, costs, element, request.policy).packing((*range(calls), calls), (0, calls - 1))
        return (replace(search(*args, **more)[0], plan=make_plan(packing, costs, request, request.policy)),)

    def late_step(self: HostOptimizer, gradients: Mapping[str, Tensor], hyper: Any) -> None:
        if any(".1." in name for name in gradients) and next(gated, None) is not None:
            assert going_on.wait(60)
            going_on.clear()
        step(self, gradients, hyper)

    def waiting(self: Updater, pack: int) -> None:
        if pack and has_pending(self, pack):
            going_on.set()
        wait(self, pack)

    def swapped_in(self: DeviceCopies, names: Iterable[str], *args: Any, **more: Any) -> Any:
        names = tuple(names)
        copy = swap_in(self, names, *args, **more)
        if any(".0." in name for name in names) and any(".1." in name for name in names) and updating():
            going_on.set()
        return copy

    monkeypatch.setattr(plan_search, "search", found)
    monkeypatch.setattr(HostOptimizer, "step", late_step)
    monkeypatch.setattr(Updater, "wait", waiting)
    monkeypatch.setattr(DeviceCopies, "swap_in", swapped_in)
    model = LLAMA.build(0.0)
    with engine_for(model, adamw, config_of(2, 1.0, {})) as engine:
        updater = updater_of(engine)

        def updating() -> bool:
            return updater.is_updating("model.layers.1.mlp.up_proj.weight")

        train_groups(engine, GROUPS)
    assert next(gated, None) is None
    assert_same(model, plain, bitwise=True)


class Watched(CpuDevice):
    """Notes when peaks are reset, and lets one step seem to take more than it does, or a peak be an earlier one."""

    def __init__(self) -> None:
        super().__init__()
        self.resets, self.watches = 0, 0
        self.stale_bytes: int | None = None

    def reset_peak(self) -> None:
        self.resets += 1
        super().reset_peak()

    def watch_peak(self) -> None:
        self.watches += 1
        CpuDevice.reset_peak(self)

    def peak_has_risen(self) -> bool:
        return self.stale_bytes is None

    def peak_bytes(self) -> int:
        return super().peak_bytes() if self.stale_bytes is None else self.stale_bytes


def test_peaks_are_reset_while_the_model_is_measured_alone(caplog: pytest.LogCaptureFixture) -> None:
    device, groups = Watched(), groups_of(LLAMA, 4, 2)
    with engine_for(LLAMA.build(0.0), adamw, config_of(2), device=device) as engine:
        train_groups(engine, groups[:1])
        resets, watches = device.resets, device.watches
        assert resets > 0 and watches > 0
        train_groups(engine, groups[1:3])
        assert device.resets == resets and device.watches > watches
        device.stale_bytes = 2**40  # of the program's own work before
        train_groups(engine, groups[3:])
        assert engine.memory_report().device_peak_bytes == 2**40
    assert "more than planned" not in caplog.text
