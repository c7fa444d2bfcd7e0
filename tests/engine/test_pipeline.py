"""One process that drives several devices trains as it does with one, bit for bit, and moves what was planned."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds import HarmonyEngine, format_plan
from harmony_ds.errors import ConfigError, ModelError, UnsupportedError
from harmony_ds.offload.ledger import TrafficKind
from harmony_ds.scheduler.plan import Plan
from tests.engine.drive import (
    EVERY_FAMILY,
    adamw,
    config_of,
    engine_for,
    family,
    groups_of,
    loop,
    optimizer_for,
    train_groups,
    weights_of,
)
from tests.exactness.models import Graph, Neighbours, batches
from tests.families import Family

pytestmark = pytest.mark.fixed_times

STEPS, ACCUMULATION = 2, 4
LLAMA = family("llama")
Trained = tuple[dict[str, Tensor], list[float]]
FEW_CALLS = ("BareParameterNet", "UntouchedNet")


def trained(one: Family, devices: Any, clip: float = 0.5, **more: Any) -> Trained:
    """The weights, and the losses, of a model trained on so many devices, each layer a pack."""
    model = one.build(0.1)
    harmony = {"pack_layers": 1, "devices": devices}
    with engine_for(model, optimizer_for(one), config_of(ACCUMULATION, clip, harmony, **more)) as engine:
        losses = train_groups(engine, groups_of(one, STEPS, ACCUMULATION))
        assert engine.swap_report().ratio <= 1.0
    return weights_of(model), losses


@cache
def trained_alone(one: Family) -> Trained:
    return trained(one, 1)


def assert_equal(one: Trained, other: Trained) -> None:
    assert one[1] == other[1]
    assert all(torch.equal(weight, other[0][name]) for name, weight in one[0].items())


@pytest.mark.parametrize(
    ("one", "devices"),
    [(one, n) for n in (2, 3, 4) for one in EVERY_FAMILY if n < 4 or one.name not in FEW_CALLS],
    ids=str,
)
def test_every_family_trains_as_on_one_device(one: Family, devices: int) -> None:
    assert_equal(trained(one, devices), trained_alone(one))


@pytest.mark.parametrize("more", [{"clip": 0.0}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}], ids=str)
def test_without_clipping_and_in_half_precision(more: dict[str, Any]) -> None:
    assert_equal(trained(LLAMA, 3, **more), trained(LLAMA, 1, **more))


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at")
def test_losses_that_are_looked_at_early() -> None:
    groups, results = groups_of(LLAMA, STEPS, ACCUMULATION), []
    for devices in (1, 3):
        model = LLAMA.build(0.1)
        with engine_for(model, adamw, config_of(ACCUMULATION, 0.5, {"pack_layers": 1, "devices": devices})) as engine:
            losses = loop(engine, groups, look=lambda i: i == 1)
            with torch.no_grad():
                seen = engine.eval_batch(iter(groups[0])).item()
        results.append((weights_of(model), [loss for row in losses for loss in row] + [seen]))
    assert_equal(*results)


class Mixer(nn.Module):
    """Code between layers that mixes what different devices have, in place and out of place."""

    def __init__(self, layer: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer(6, 6) for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("offset", torch.linspace(0.0, 1.0, 6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        kept, first = [], x
        for layer in self.layers:
            x = torch.tanh(layer(x) + first) * self.scale + self.offset
            kept.append(x)
        total = torch.zeros_like(kept[0])
        for one in kept:
            total += one
        return (torch.stack(kept).sum(0) + total - y).pow(2).mean()


class Rounding(nn.Linear):
    """A layer that changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.round_())


def mixed(devices: int, model: nn.Module | None = None) -> tuple[HarmonyEngine, dict[str, Tensor], list[float]]:
    torch.manual_seed(0)
    model = model or Mixer()
    source = torch.Generator().manual_seed(1)
    groups = [[{k: torch.randn(2, 6, generator=source) for k in "xy"} for _ in range(3)] for _ in range(2)]
    with engine_for(model, adamw, config_of(3, 0.5, {"pack_layers": 1, "devices": devices})) as engine:
        losses = train_groups(engine, groups)
    return engine, weights_of(model), losses


def test_code_between_layers_mixes_what_lies_on_several_devices() -> None:
    _, weights, losses = mixed(3)
    _, plain_weights, plain_losses = mixed(1)
    assert_equal((weights, losses), (plain_weights, plain_losses))


def test_reading_an_input_that_a_layer_changed_on_another_device_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"layers\.1 changes its input of shape \(2, 6\) in place, and other code reads"
    ):
        mixed(3, Mixer(Rounding))


@pytest.mark.parametrize("budget", [400_000, 200_000])
def test_under_a_budget_each_device_takes_and_swaps_what_was_planned(budget: int) -> None:
    model = LLAMA.build(0.0)
    harmony = {"devices": 2, "device_memory_gib": budget / 2**30}
    with engine_for(model, adamw, config_of(ACCUMULATION, 0.5, harmony)) as engine:
        train_groups(engine, groups_of(LLAMA, STEPS, ACCUMULATION))
        memory, report = engine.memory_report(), engine.plan_report()
        assert engine.swap_report().swap_bytes == report.planned.weights_in + report.planned.gradients_out
        assert report.swapped_bytes <= report.planned.total  # stash is planned for the longest micro-batch
        planned = report.choices[0].plan.device_peaks
        assert all(
            0.9 * most <= taken <= most <= budget for taken, most in zip(memory.device_peaks, planned, strict=True)
        )


def test_each_weight_crosses_a_link_once_for_each_pass_of_all_devices() -> None:
    model = LLAMA.build(0.0)
    nbytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    with engine_for(model, adamw, config_of(ACCUMULATION, 0.5, {"pack_layers": 1, "devices": 2})) as engine:
        train_groups(engine, groups_of(LLAMA, STEPS, ACCUMULATION))
        swaps = engine.swap_report()
    assert swaps.host_to_device[TrafficKind.WEIGHTS.value] < 2 * nbytes
    assert swaps.device_to_host[TrafficKind.GRADIENTS.value] == pytest.approx(nbytes, rel=0.02)  # tensors are aligned


@pytest.mark.parametrize("name", ["llama", "t5", "mixtral", "SkipNet", "OutsideParameterNet", "BatchNormNet"])
def test_what_crosses_each_link_and_goes_between_devices_is_planned(name: str) -> None:
    one = family(name)
    with engine_for(one.build(0.0), optimizer_for(one), config_of(3, 0.5, {"pack_layers": 1, "devices": 3})) as engine:
        train_groups(engine, [[one.batch(0)] * 3] * 2)
        found, report = engine.swap_report(), engine.plan_report()
        drawn = format_plan(report.choices[0].plan)
    assert report.planned.moved == report.moved_bytes == sum(found.between_devices.values()) > 0
    assert report.planned.total == report.swapped_bytes == sum(into + out for into, out in found.links)
    assert "device 0  device 1  device 2" in drawn and "dealt to 3 devices" in drawn
    assert "link of device 2" in str(found) and "from device 1 to 2" in str(found)
    assert "between devices planned" in str(report)


def test_any_number_of_devices_goes_on_from_a_checkpoint_and_generates(tmp_path: Path) -> None:
    groups, after = groups_of(LLAMA, 4, ACCUMULATION), []
    for devices in (3, 1, 2):
        model = LLAMA.build(0.1)
        with engine_for(model, adamw, config_of(ACCUMULATION, 0.5, {"pack_layers": 1, "devices": devices})) as engine:
            if not after:
                train_groups(engine, groups[:2])
                engine.save_checkpoint(str(tmp_path))
            else:
                engine.load_checkpoint(str(tmp_path))
            losses = train_groups(engine, groups[2:])
            words = engine.generate(groups[0][0]["input_ids"][:1, :4], max_new_tokens=4, do_sample=False)
            losses += [engine.eval_batch(iter(groups[0])).item()]
        after.append((weights_of(model) | {"words": words}, losses))
    assert_equal(after[0], after[1])
    assert_equal(after[0], after[2])


def test_a_plan_of_any_number_of_devices_runs_on_any_other(tmp_path: Path) -> None:
    file, found = tmp_path / "plan.json", []
    for devices, more in ((3, {"pack_layers": 1}), (2, {"plan": str(file)}), (1, {"plan": str(file)})):
        model = LLAMA.build(0.1)
        with engine_for(model, adamw, config_of(ACCUMULATION, 0.5, {"devices": devices, **more})) as engine:
            losses = train_groups(engine, groups_of(LLAMA, 1, ACCUMULATION))
            file.write_text(engine.plan.to_json())
        found.append((weights_of(model), losses))
    assert_equal(found[0], found[1])
    assert_equal(found[0], found[2])
    plan = Plan.from_json(file.read_text())
    file.write_text(replace(plan, policy=replace(plan.policy, resident=(0,))).to_json())
    for wrong, said in (({"residency": 2}, "residency is 2, and 2 devices"), ({"plan": str(file)}, "packs of it stay")):
        with (
            pytest.raises(UnsupportedError, match=said),
            engine_for(LLAMA.build(0.1), adamw, config_of(2, 0.5, {"devices": 2, **wrong})),
        ):
            pass


def test_the_fastest_of_one_device_and_a_pipeline_runs_and_replicas_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """On the CPU, whose devices compute one after the other, one is as fast as two."""
    model = LLAMA.build(0.1)
    with engine_for(model, adamw, config_of(ACCUMULATION, 0.5, {"devices": 2, "parallel": "auto"})) as engine:
        losses = train_groups(engine, groups_of(LLAMA, STEPS, ACCUMULATION))
        *here, replicas = engine.plan_report().choices
    assert [choice.plan.policy.pipeline for choice in here] == [1] * (len(here) - 1) + [2]
    assert replicas.reason.startswith("2 replicas (torchrun --nproc_per_node 2)")
    assert (replicas.reason in caplog.text) == (replicas.prediction.step_ms < here[0].prediction.step_ms)
    assert_equal((weights_of(model), losses), trained_alone(LLAMA))


def test_what_cannot_be_a_pipeline_is_refused_before_training() -> None:
    with (
        pytest.raises(ConfigError, match="asks for 64 devices"),
        engine_for(LLAMA.build(0.0), adamw, config_of(2, 0.5, {"devices": 64})) as engine,
    ):
        train_groups(engine, groups_of(LLAMA, 1, 2))
    for wrong in (0, [], "many"):
        with (
            pytest.raises(ConfigError, match="devices"),
            engine_for(LLAMA.build(0.0), adamw, config_of(2, 0.5, {"devices": wrong})),
        ):
            pass


def test_a_sparse_argument_of_a_layer_is_refused_by_name() -> None:
    with (
        engine_for(Graph(Neighbours), adamw, config_of(2, 0.5, {"devices": 2})) as engine,
        pytest.raises(UnsupportedError, match="is given a tensor of layout"),
    ):
        engine.train_batch(iter(batches(2)))
