"""Layer calls over the rows of several micro-batches: the weights of single calls to rounding, in fewer calls."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds.model.called_layer import CalledLayer
from harmony_ds.profiling import profiler
from harmony_ds.profiling.measurement import Measurement
from harmony_ds.profiling.sample import Sample
from harmony_ds.step import planner
from tests.engine.drive import (
    adamw,
    config_of,
    engine_for,
    family,
    groups_of,
    means_of,
    plainly,
    train_groups,
    weights_of,
)
from tests.families import BLOCKS, FAMILIES, OF_BERT, TEXT, Batch, Family, InjectedLoss, transformer
from tests.patches import constant_rates

pytestmark = pytest.mark.fixed_times

GROUP, STEPS = 8, 3
FULL = (24,) * GROUP
SIZES = [{"forward": 8, "backward": 4}, {"forward": 3, "backward": 8}, {"forward": 8, "backward": 8}]
Groups = list[list[Batch]]


def single_rows(name: str) -> Groups:
    """Micro-batches of one row (a contrastive loss needs two), all of one shape; some masks are padded, others not."""
    flat = [batch for group in groups_of(family(name), 6, 3 * GROUP) for batch in group]
    shapes = [tuple(t.shape for t in batch.values() if isinstance(t, Tensor)) for batch in flat]
    alike = [batch for batch, own in zip(flat, shapes, strict=True) if own == shapes[0]][: STEPS * GROUP]
    rows = alike
    if name != "clip":
        rows = [{key: t[place % len(t) :][:1] for key, t in batch.items()} for place, batch in enumerate(alike)]
    return [rows[place : place + GROUP] for place in range(0, len(rows), GROUP)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Adam would make of rounding in a gradient that is nothing else a full step."""
    return torch.optim.SGD(parameters, lr=0.05)


def trained(model: nn.Module, groups: Groups, make: Any = sgd, **harmony: Any) -> tuple[dict[str, Tensor], list[float]]:
    config = config_of(len(groups[0]), 0.5, {"pack_layers": 1, **harmony})
    with engine_for(model, make, config) as engine:
        losses = train_groups(engine, groups)
        memory, report = engine.memory_report(), engine.plan_report()
        assert engine.swap_report().ratio == 1.0
        assert memory.device_peak_bytes <= memory.planned_peak_bytes
        assert report.swapped_bytes <= report.planned.total
    return weights_of(model), losses


@cache
def trained_plainly(name: str) -> tuple[dict[str, Tensor], list[float]]:
    plain, losses = plainly(family(name), 0.0, single_rows(name), sgd, 0.5)
    return weights_of(plain), means_of(losses)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for key, weight in expected.items():
        torch.testing.assert_close(found[key], weight, rtol=0.0, atol=1e-6 * max(1e-3, weight.abs().max().item()))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers that are run, forward or again."""
    made: list[str] = []
    run = CalledLayer.run

    def noted(layer: CalledLayer, *args: Any) -> Any:
        made.append(layer.name)
        return run(layer, *args)

    monkeypatch.setattr(CalledLayer, "run", noted)
    return made


@pytest.mark.parametrize("sizes", [*SIZES, "auto"], ids=str)
@pytest.mark.parametrize("name", [*map(str, FAMILIES), "TwoPassNet", "OutsideParameterNet"])
def test_weights_are_those_of_single_calls_to_rounding(name: str, sizes: Any) -> None:
    weights, losses = trained_plainly(name)
    joined, found = trained(family(name).build(0.0), single_rows(name), micro_batch=sizes)
    assert found == pytest.approx(losses, rel=1e-6)
    assert_close(joined, weights)


def test_the_same_bits_each_time_and_after_a_resume(tmp_path: Path) -> None:
    groups, sizes = single_rows("mistral"), SIZES[0]
    build = family("mistral").build
    once, losses = trained(build(0.1), groups, adamw, micro_batch=sizes)
    config = config_of(GROUP, 0.5, {"pack_layers": 1, "micro_batch": sizes})
    with engine_for(build(0.1), adamw, config) as engine:
        train_groups(engine, groups[:2])
        engine.save_checkpoint(tmp_path)
    model = build(0.1)
    with engine_for(model, adamw, config) as engine:
        engine.load_checkpoint(tmp_path)
        assert train_groups(engine, groups[2:]) == losses[2:]
    assert all(torch.equal(weight, once[key]) for key, weight in weights_of(model).items())


@pytest.mark.parametrize("devices", [3, 2])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", ["llama", "t5", "mixtral"])
def test_several_devices_train_as_one_does_bit_for_bit(name: str, sizes: dict[str, int], devices: int) -> None:
    one, groups = family(name), single_rows(name)
    weights, losses = trained(one.build(0.0), groups, micro_batch=sizes)
    found, seen = trained(one.build(0.0), groups, micro_batch=sizes, devices=devices)
    assert seen == losses
    assert all(torch.equal(found[key], weight) for key, weight in weights.items())


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", ["llama", "t5", "mixtral", "SkipNet"])
def test_a_tensor_goes_between_devices_once_for_all_micro_batches(name: str, sizes: dict[str, int]) -> None:
    """Whole: it is cut into parts again where code between layers takes one."""
    groups = [[single_rows(name)[0][0]] * GROUP] * 2
    config = config_of(GROUP, 0.5, {"pack_layers": 1, "devices": 3, "micro_batch": sizes})
    with engine_for(family(name).build(0.0), sgd, config) as engine:
        train_groups(engine, groups)
        report = engine.plan_report()
    # A few numbers of Mixtral's load balancing loss, which each micro-batch has for itself, are planned once for all.
    assert report.moved_bytes == pytest.approx(report.planned.moved, rel=0.002 if name == "mixtral" else 0.0)
    assert report.planned.moved > 0
    assert report.swapped_bytes == report.planned.total


def test_a_plan_of_joined_calls_runs_on_any_number_of_devices(tmp_path: Path) -> None:
    groups, file, build = single_rows("mistral"), tmp_path / "plan.json", family("mistral").build
    model = build(0.0)
    with engine_for(model, sgd, config_of(GROUP, 0.5, {"pack_layers": 1, "micro_batch": 4})) as engine:
        train_groups(engine, groups)
        assert engine.plan is not None
        file.write_text(engine.plan.to_json())
    for devices in (1, 2):
        other = build(0.0)
        with engine_for(other, sgd, config_of(GROUP, 0.5, {"plan": str(file), "devices": devices})) as engine:
            train_groups(engine, groups)
            assert engine.plan is not None
            assert engine.plan.policy.joined_count == 4
        joined = weights_of(model)
        assert all(torch.equal(weight, joined[key]) for key, weight in weights_of(other).items())


class Tabled(nn.Module):
    """Hands its layers a table that all rows share, and that differs from micro-batch to micro-batch from a layer on."""

    def __init__(self, differs_from: int | None) -> None:
        super().__init__()
        self.layers, self.differs_from = nn.ModuleList([Scaled(4, 4) for _ in range(3)]), differs_from

    def forward(self, x: Tensor) -> Tensor:
        own, table = x.detach().mean(), torch.linspace(0.0, 1.0, 4)
        for number, layer in enumerate(self.layers):
            if number == self.differs_from:
                table += own
            x = layer(x, table)
        return x.pow(2).mean()


class Scaled(nn.Linear):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return super().forward(x) * table


@pytest.mark.parametrize("differs_from", [None, 0, 1])
def test_what_all_rows_share_has_to_be_equal(differs_from: int | None, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    one = Tabled(differs_from)
    alone, losses = trained(copy.deepcopy(one), rows_of_four())
    joined, found = trained(one, rows_of_four(), micro_batch=8)
    refused = [f"layers.{number} run micro-batch by micro-batch" in caplog.text for number in range(3)]
    assert refused == [differs_from is not None and number >= differs_from for number in range(3)]
    assert found == pytest.approx(losses, rel=1e-6)
    assert all(torch.allclose(weight, joined[key], rtol=1e-5, atol=1e-7) for key, weight in alone.items())


@pytest.mark.parametrize("name", ["InPlaceNet", "BatchNormNet"])
def test_what_cannot_be_joined_runs_one_by_one(name: str) -> None:
    """It changes what layers gave in place; its rows look at each other."""
    groups = single_rows(name)
    alone, losses = trained(family(name).build(0.0), groups)
    joined, found = trained(family(name).build(0.0), groups, micro_batch=64)
    assert found == pytest.approx(losses, rel=1e-6)
    assert all(torch.allclose(weight, joined[key], rtol=1e-5, atol=1e-7) for key, weight in alone.items())


class Layered(nn.Module):
    """Three layers, and a scale of its own after the first."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.layers, self.scale = nn.ModuleList([make() for _ in range(3)]), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x) * self.scale
        return self.layers[2](self.layers[1](x)).pow(2).mean()


class Balanced(nn.Linear):
    """Has a loss over all rows, seen by its gradients alone; where `in_training`, and the rows are all its own if not."""

    def __init__(self, in_training: bool = False) -> None:
        super().__init__(4, 4)
        self.in_training = in_training

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.in_training and not self.training:
            return x
        return InjectedLoss.apply(x, 0.1 * x.softmax(-1).mean(0).square().sum())


def rows_of_four(steps: int = 3) -> Groups:
    source = torch.Generator().manual_seed(1)
    return [[{"x": torch.randn(2, 4, generator=source)} for _ in range(4)] for _ in range(steps)]


def assert_joined_as_alone(build: Any, calls: list[str], expected: dict[str, int], prepare: Any = None) -> None:
    """Weights with joined calls are those of single ones; `expected`: forward calls of layers in the last step."""
    found = []
    for micro_batch in ("config", 8):
        torch.manual_seed(0)
        model = build()
        with engine_for(model, sgd, config_of(4, None, {"pack_layers": 1, "micro_batch": micro_batch})) as engine:
            if prepare is not None:
                prepare(engine)
            losses = train_groups(engine, rows_of_four()[:2])
            calls.clear()
            losses += train_groups(engine, rows_of_four()[2:])
        found.append((weights_of(model), losses))
    (alone, losses), (joined, others) = found
    assert others == pytest.approx(losses, rel=1e-6)
    assert_close(joined, alone)
    assert {name: calls.count(name) for name in expected} == expected


def test_a_loss_that_only_gradients_show_is_not_joined(calls: list[str]) -> None:
    assert_joined_as_alone(lambda: Layered(Balanced), calls, {"layers.0": 8, "layers.1": 8})


def test_a_layer_is_tried_in_each_mode(calls: list[str]) -> None:
    """Its rows are its own in evaluation mode, which comes first."""

    def evaluate(engine: Any) -> None:
        engine.eval_batch(iter(rows_of_four()[0]))

    assert_joined_as_alone(lambda: Layered(lambda: Balanced(True)), calls, {"layers.0": 8}, evaluate)


class Noisy(Layered):
    """Adds noise between two layers, as a variational autoencoder does; where `always`, or to rows that begin above 1."""

    def __init__(self, always: bool) -> None:
        super().__init__(lambda: nn.Linear(4, 4))
        self.always = always

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        if self.always or x[0, 0] > 1:
            h = h + torch.randn_like(h)
        return self.layers[2](self.layers[1](h) * self.scale).pow(2).mean()


def with_noise(loss: Tensor) -> Tensor:
    return loss * (1 + torch.rand(()))


@pytest.mark.parametrize("always", [True, False])
def test_noise_between_layers_is_each_micro_batchs_own(calls: list[str], always: bool) -> None:
    """Noise that no micro-batch has shown before is found in the step that it comes in."""
    groups = rows_of_four()
    for number, group in enumerate(groups):
        for batch in group:
            batch["x"][0, 0] = 2.0 if number else 0.0
    found = []
    for micro_batch in ("config", 8):
        torch.manual_seed(0)
        model = Noisy(always)
        config = config_of(4, None, {"pack_layers": 1, "micro_batch": micro_batch, "seed": 5})
        with engine_for(model, sgd, config) as engine:
            losses = []
            for group in groups:
                calls.clear()
                losses.append(engine.train_batch(iter(group), loss_fn=with_noise).item())
            assert engine.swap_report().ratio == 1.0
        found.append((weights_of(model), losses))
    assert calls.count("layers.1") == 2  # for all four, forward and again
    (alone, losses), (joined, others) = found
    assert others == pytest.approx(losses, rel=1e-6)
    assert_close(joined, alone)


class Routed(nn.Sequential):
    """Rows choose the second or the third layer by their sign; what no row chooses is not called."""

    def forward(self, x: Tensor) -> Tensor:
        y = self[0](x)
        for layer, chosen in ((self[1], x[:, 0] > 0), (self[2], x[:, 0] <= 0)):
            y = y.index_add(0, chosen.nonzero()[:, 0], layer(y[chosen])) if chosen.any() else y
        return y.pow(2).mean()


@pytest.mark.parametrize("micro_batch", ["auto", 8])
def test_a_set_that_calls_layers_that_none_of_its_micro_batches_did_goes_on_in_single_calls(micro_batch: Any) -> None:
    groups, model = rows_of_four(), Routed(*(nn.Linear(4, 4) for _ in range(3)))
    for batch in groups[0][:3]:
        batch["x"].copy_(torch.tensor([1.0, -2.0, 3.0, -4.0]))  # rolled in a set
    alone, losses = trained(copy.deepcopy(model), groups)
    joined, found = trained(model, groups, micro_batch=micro_batch)
    assert found == pytest.approx(losses, rel=1e-6)
    assert_close(joined, alone)


class Bounded(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 99:
            raise ValueError("too large")
        return super().forward(x)


def test_an_error_that_single_calls_raise_too_does_not_end_joining(calls: list[str]) -> None:
    groups, bad = rows_of_four(), rows_of_four(1)
    bad[0][2]["x"] *= 1000  # others before it have been planned for by then
    model = Layered(lambda: Bounded(4, 4))
    with engine_for(model, sgd, config_of(4, None, {"pack_layers": 1, "micro_batch": 8})) as engine:
        train_groups(engine, groups[:1])
        with pytest.raises(ValueError, match="too large"):
            train_groups(engine, bad)
        train_groups(engine, groups[1:2])
        calls.clear()
        train_groups(engine, groups[2:])
    assert calls.count("layers.0") == 2  # forward, and again


def test_what_a_set_gave_that_ran_out_of_memory_is_gone_before_it_is_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outputs: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []
    measure = planner.Planner.measure
    is_short = False

    def loss_of(made: Tensor) -> Tensor:
        nonlocal is_short
        outputs.append(weakref.ref(made))
        if is_short:
            is_short = False
            raise torch.OutOfMemoryError("for a test")
        return made.sum()

    def measured(self: planner.Planner, sample: Sample) -> Any:
        gc.collect()
        alive.append(any(one() is not None for one in outputs))
        return measure(self, sample)

    groups, model = rows_of_four(), Layered(lambda: nn.Linear(4, 4))
    harmony = {"pack_layers": 1, "micro_batch": 8, "device_memory_gib": 0.001}
    with engine_for(model, sgd, config_of(4, None, harmony)) as engine:
        engine.train_batch(iter(groups[0]), loss_of)
        monkeypatch.setattr(planner.Planner, "measure", measured)
        is_short = True
        engine.train_batch(iter(groups[1]), loss_of)

    assert alive
    assert not any(alive)


def clamped(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_parameter(name).register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return model


def test_hooks_see_the_gradient_of_each_micro_batch(calls: list[str]) -> None:
    def build() -> nn.Module:
        return Layered(lambda: nn.Linear(4, 4))

    assert_joined_as_alone(lambda: clamped(build(), "layers.1.weight"), calls, {"layers.0": 2, "layers.1": 8})
    assert_joined_as_alone(lambda: clamped(build(), "scale"), calls, {"layers.0": 8})


def test_rows_with_a_mask_and_rows_without_are_joined_with_their_likes(calls: list[str]) -> None:
    """Transformers drops masks that hide nothing."""
    words = torch.arange(STEPS * GROUP * 6).reshape(STEPS, GROUP, 1, 6) % 90 + 3
    masks = [torch.ones(1, 6, dtype=torch.long), torch.tensor([[1, 1, 1, 1, 0, 0]])]
    groups = [
        [{"input_ids": row, "attention_mask": masks[place % 2], "labels": row % 2} for place, row in enumerate(group)]
        for group in words
    ]
    one = masked_words()
    plain, losses = plainly(one, 0.0, groups, sgd, 0.5)
    model = one.build(0.0)
    joins = []
    with engine_for(model, sgd, config_of(GROUP, 0.5, {"pack_layers": 1, "micro_batch": 8})) as engine:
        found = train_groups(engine, groups[:2])
        calls.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "cat", lambda *args, cat=torch.cat: joins.append(args[0]) or cat(*args))
            found += train_groups(engine, groups[2:])
        memory = engine.memory_report()
        assert memory.device_peak_bytes <= memory.planned_peak_bytes
    assert calls.count("bert.encoder.layer.0") == 4  # with a mask and without, forward and again
    taken = [tensor for tensors in joins for tensor in tensors if tensor.dim() == 4]
    assert len(taken) == GROUP // 2  # a mask that all layers take is joined once
    assert found == pytest.approx(means_of(losses), rel=1e-6)
    assert_close(weights_of(model), weights_of(plain))


of_caller = ContextVar("of_caller", default=1.0)


class Called(nn.Module):
    """Calls its layers in a setting that micro-batches with large values have for themselves."""

    def __init__(self, setting: str) -> None:
        super().__init__()
        self.layers, self.setting = nn.ModuleList([Multiplied(4, 4) for _ in range(3)]), setting

    def forward(self, x: Tensor) -> Tensor:
        with ExitStack() as settings:
            if x.abs().max() > 2.0:
                self.enter(settings)
            for layer in self.layers:
                x = layer(x)
            return x.pow(2).mean()

    def enter(self, settings: ExitStack) -> None:
        if self.setting == "autocast":
            settings.enter_context(torch.autocast("cpu", torch.bfloat16))
        elif self.setting == "a switch of torch":
            settings.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
        else:
            settings.callback(of_caller.reset, of_caller.set(3.0))


class Multiplied(nn.Linear):
    """Its result depends on autocast, the default dtype and a context variable, more than by rounding."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) * of_caller.get()
        if torch.is_autocast_enabled("cpu"):
            x = x * 2.0
        if torch.get_default_dtype() is torch.float64:
            x = x * 3.0
        return torch.tanh(x).float()


@pytest.mark.parametrize("setting", ["autocast", "a switch of torch", "a context variable"])
def test_calls_in_other_settings_are_joined_with_their_likes(setting: str, calls: list[str]) -> None:
    torch.manual_seed(0)
    one = Called(setting)
    rows = [[torch.randn(2, 4).clamp(-1.0, 1.0) for _ in range(4)] for _ in range(3)]
    groups = [[{"x": x + 9.0 * (number % 2)} for number, x in enumerate(group)] for group in rows]
    alone, losses = trained(copy.deepcopy(one), groups)
    with engine_for(one, sgd, config_of(4, 0.5, {"pack_layers": 1, "micro_batch": 8})) as engine:
        found = train_groups(engine, groups[:2])
        calls.clear()
        found += train_groups(engine, groups[2:])
    assert calls.count("layers.0") == 4  # in either setting, forward and again
    # Autocast rounds sums over other numbers of rows to bfloat16; another setting would make other numbers altogether.
    tolerance = 2e-2 if setting == "autocast" else 1e-5
    assert found == pytest.approx(losses, rel=tolerance)
    joined = weights_of(one)
    assert all(torch.allclose(weight, joined[key], rtol=tolerance, atol=tolerance) for key, weight in alone.items())


def masked_words() -> Family:
    return transformer("bert", "BertForTokenClassification", TEXT | BLOCKS, OF_BERT, bitwise=True)


@pytest.mark.parametrize("micro_batch", ["auto", 8])
def test_longer_rows_that_have_no_room_together_run_in_smaller_calls(micro_batch: Any) -> None:
    short, long, build = ragged((6,) * GROUP), ragged(FULL), family("mistral").build
    with engine_for(build(0.0), sgd, config_of(GROUP, 0.5, {"pack_layers": 1})) as engine:
        train_groups(engine, long)
        budget = int(1.1 * engine.memory_report().planned_peak_bytes)
    harmony = {"pack_layers": 1, "micro_batch": micro_batch, "device_memory_gib": budget / 2**30}
    groups, model = [short[0], long[1], short[2]], build(0.0)
    plain, losses = plainly(family("mistral"), 0.0, groups, sgd, 0.5)
    with engine_for(model, sgd, config_of(GROUP, 0.5, harmony)) as engine:
        found = train_groups(engine, groups[:1])
        assert engine.plan is not None
        together = engine.plan.policy.joined_count
        found += train_groups(engine, groups[1:])
        assert engine.plan.policy.joined_count < together
        assert engine.memory_report().device_peak_bytes <= budget
    assert found == pytest.approx(means_of(losses), rel=1e-6)
    assert_close(weights_of(model), weights_of(plain))


def test_evaluation_of_more_rows_measures_no_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    measure = Measurement.measure

    def noted(one: Measurement, sample: Sample) -> Any:
        measured.append(sample.rows)
        return measure(one, sample)

    monkeypatch.setattr(Measurement, "measure", noted)
    batches = ragged(FULL)
    wide = {key: torch.cat([t] * 4) for key, t in batches[0][0].items()}
    with engine_for(family("mistral").build(0.0), sgd, config_of(GROUP, 0.5, {"micro_batch": 8})) as engine:
        train_groups(engine, batches[:1])
        assert max(measured) == 8
        engine.eval_batch(iter([wide] * GROUP))
        train_groups(engine, batches[1:])
        assert engine.plan is not None
        assert engine.plan.policy.joined_count == 8
    assert max(measured) == 8


def ragged(lengths: Sequence[int]) -> Groups:
    """Rows without masks, cut to `lengths`, which may be as long as two."""
    row = {key: tensor for key, tensor in single_rows("mistral")[0][0].items() if key != "attention_mask"}
    rows = [{key: tensor.roll(place, 1).repeat(1, 2) for key, tensor in row.items()} for place in range(STEPS * GROUP)]
    cut = [{k: t[:, : lengths[place % GROUP]] for k, t in one.items()} for place, one in enumerate(rows)]
    return [cut[place : place + GROUP] for place in range(0, len(cut), GROUP)]


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("lengths", "wanted", "sets"),
    [((24, 24, 24, 9, 9, 7, 24, 24), 8, 4), ((*FULL[1:], 5), 3, 4), ((9, 24) * 4, 8, 8), (FULL, 3, 3), (FULL, 8, 1)],
)
def test_neighbours_of_equal_lengths_are_joined_and_others_are_not(
    lengths: tuple[int, ...], wanted: int, sets: int, devices: int, calls: list[str]
) -> None:
    groups, build = ragged(lengths), family("mistral").build
    plain, losses = plainly(family("mistral"), 0.0, groups, sgd, 0.5)
    model, config = build(0.0), config_of(GROUP, 0.5, {"pack_layers": 1, "micro_batch": wanted, "devices": devices})
    with engine_for(model, sgd, config) as engine:
        found = train_groups(engine, groups[:2])
        calls.clear()
        found += train_groups(engine, groups[2:])
        memory = engine.memory_report()
        assert all(map(int.__le__, memory.device_peaks, engine.plan_report().choices[0].plan.device_peaks))
        assert engine.swap_report().ratio == 1.0
    assert calls.count("model.layers.0") == 2 * sets  # forward, and again
    assert found == pytest.approx(means_of(losses), rel=1e-6)
    assert_close(weights_of(model), weights_of(plain))


def test_a_budget_holds_whatever_lengths_there_are(calls: list[str]) -> None:
    """A set that is not full counts as a full one, and does not fit as a third: its micro-batches run one by one."""
    uniform, mixed = ragged(FULL), ragged((24, 24, 24, 24, 9, 9, 9, 7))
    harmony: dict[str, Any] = {"pack_layers": 1, "micro_batch": 4, "stash": "device"}
    build = family("mistral").build
    with engine_for(build(0.0), sgd, config_of(GROUP, 0.5, harmony)) as engine:
        train_groups(engine, uniform)
        budget = int(1.02 * engine.memory_report().planned_peak_bytes)  # four alone take a little more than a set
    with engine_for(build(0.0), sgd, config_of(GROUP, 0.5, {**harmony, "device_memory_gib": budget / 2**30})) as engine:
        train_groups(engine, [uniform[0], mixed[0]])
        calls.clear()
        train_groups(engine, mixed[1:])
        assert engine.memory_report().device_peak_bytes <= budget
    assert calls.count("model.layers.0") == len(mixed[1:]) * 2 * 5


def test_auto_joins_where_that_is_faster() -> None:
    """As it is where a call takes as long with many rows as with one."""
    groups = single_rows("mistral")
    with engine_for(family("mistral").build(0.0), sgd, config_of(GROUP, 0.5, {"micro_batch": "auto"})) as engine:
        train_groups(engine, groups)
        assert engine.plan is not None
        assert engine.plan.policy.joined_count == GROUP


def at_host_speed(bytes_per_ms: float) -> Any:
    """Constant rates, with this one of host memory."""
    return lambda *args: replace(constant_rates(*args), host_bytes_per_ms=bytes_per_ms)


@pytest.mark.parametrize(
    ("micro_batch", "bytes_per_ms", "advised"),
    [("config", 1e5, True), ("config", 1e9, False), ({"forward": 1, "backward": 1}, 1e5, False)],
)
def test_joining_is_advised_once_where_it_would_pay(
    micro_batch: Any, bytes_per_ms: float, advised: bool, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(profiler, "measure_rates", at_host_speed(bytes_per_ms))
    config = config_of(GROUP, 0.5, {"micro_batch": micro_batch})
    with engine_for(family("mistral").build(0.0), sgd, config) as engine:
        train_groups(engine, single_rows("mistral"))
        assert ('"micro_batch": 8' in str(engine.plan_report())) == advised
    assert caplog.text.count("are predicted (not measured)") == advised
