"""Resident packs on a device that counts every byte and that is not the host."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import simdevice
from tests.oracle import assert_same
from tests.simdevice.device import SimDevice, engine_of
from tests.simdevice.test_engine_memory import LAYERS, batches, build

pytestmark = pytest.mark.fixed_times

EVERY = 100
BF16 = {"bf16": {"enabled": True}}
SUMMED = {"data_types": {"grad_accum_dtype": "bf16"}}


def engine_with(make: Any, residency: Any, model: nn.Module | None = None, **more: Any) -> tuple[Any, SimDevice]:
    harmony = {"pack_layers": 2, "residency": residency, **more.pop("harmony", {})}
    return engine_of(build() if model is None else model, make, 3, harmony=harmony, **more)


def peaks(make: Any, residency: Any, clip: float, layers: int = LAYERS, **more: Any) -> tuple[int, int]:
    """Return the largest measured peak of three steps, and the planned one."""
    engine, _ = engine_with(make, residency, build(layers), clip=clip, **more)
    data, measured = batches(), 0
    for _ in range(3):
        engine.train_batch(data)
        measured = max(measured, engine.memory_report().device_peak_bytes)
    planned = engine.plan.peak_bytes
    engine.destroy()
    return measured, planned


@pytest.mark.parametrize(
    ("make", "residency", "clip"),
    [
        (torch.optim.AdamW, 1, 0.0),
        (torch.optim.AdamW, 3, 0.5),
        (torch.optim.AdamW, EVERY, 0.0),
        (lambda p: torch.optim.AdamW(p, fused=True), EVERY, 0.5),
        (lambda p: torch.optim.AdamW(p, foreach=True), EVERY, 0.5),
        (lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.1), EVERY, 0.5),
        (lambda p: torch.optim.Adagrad(p, weight_decay=0.1, maximize=True), EVERY, 0.5),
        (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), EVERY, 0.5),
    ],
)
def test_the_plan_knows_the_memory_of_each_optimizer(make: Any, residency: int, clip: float) -> None:
    measured, planned = peaks(make, residency, clip)
    assert measured <= planned <= 1.25 * measured


@pytest.mark.parametrize(
    ("residency", "clip", "layers", "more"),
    [(EVERY, 0.5, 8, SUMMED), (EVERY, 0.5, LAYERS, SUMMED), (1, 0.5, LAYERS, {}), (EVERY, 0.0, LAYERS, {})],
    ids=str,
)
def test_masters_are_planned_for(residency: int, clip: float, layers: int, more: dict[str, Any]) -> None:
    """In bf16, what residency adds to the peak is planned: measured costs of layers are off by the same either way.

    Gradients that are summed in bf16 are cast for the updates, which have the peak where there are few layers.
    """
    measured, planned = peaks(torch.optim.AdamW, "off", clip, layers, **BF16, **more)
    error = max(0, measured - planned)
    measured, planned = peaks(torch.optim.AdamW, residency, clip, layers, **BF16, **more)
    assert measured <= planned + error
    if not more:
        assert planned <= 1.25 * measured


@pytest.mark.parametrize("residency", ["off", 3, EVERY])
def test_the_engine_moves_exactly_the_bytes_that_it_reports(residency: Any) -> None:
    harmony = {"pack_layers": 2, "stash": "host"}
    engine, _ = engine_with(torch.optim.AdamW, residency, clip=0.5, harmony=harmony)
    data = batches()
    engine.train_batch(data)
    before = simdevice.traffic()
    engine.module.state_dict()  # a look between steps is reported with the next one
    engine.train_batch(data)
    after = simdevice.traffic()
    report = engine.swap_report()
    engine.destroy()
    assert after[0] - before[0] == sum(report.host_to_device.values())
    # The model asks each micro-batch's mask one question (one byte) by itself.
    assert after[1] - before[1] - 3 == sum(report.device_to_host.values())


@pytest.mark.parametrize(
    ("type_", "params", "clip"),
    [
        ("AdamW", {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-5}, 0.5),
        ("Adam", {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-4, "adam_w_mode": False}, 0.0),
        ("Adagrad", {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-3}, 0.5),
    ],
)
def test_deepspeeds_optimizers_are_replaced_by_torchs_on_the_device(type_: str, params: Any, clip: float) -> None:
    """Half of the steps here, half there: states go to and fro."""
    models, states = [build(), build()], []
    for model, residency in zip(models, ("off", 4), strict=True):
        optimizer = {"type": type_, "params": params}
        engine, _ = engine_with(None, residency, model, clip=clip, optimizer=optimizer)
        data = batches()
        for step in range(6):
            engine.train_batch(data)
            if step == 2:
                state = engine.optimizer.state_dict()
                engine.optimizer.load_state_dict(state)
        engine.finish_updates()
        report = engine.memory_report()
        assert report.device_peak_bytes <= report.planned_peak_bytes
        states.append(engine.optimizer.state_dict()["state"])
        engine.destroy()
    assert_same(models[1], models[0], bitwise=False, relative=1e-4)
    for mine, theirs in zip(states[1].values(), states[0].values(), strict=True):
        assert mine.keys() == theirs.keys()
        assert mine["step"] == theirs["step"] == 6
        assert all(type(value) is type(theirs[key]) for key, value in mine.items())


def test_gradients_of_resident_packs_are_read_and_set_as_those_of_others() -> None:
    models = [build(2), build(2)]
    for model, residency in zip(models, ("off", EVERY), strict=True):
        engine, _ = engine_with(lambda p: torch.optim.SGD(p, lr=1e-2), residency, model)
        data = batches()
        for _ in range(3):
            engine(**next(data)).loss.backward()
            model.lm_head.weight.square().sum().backward()  # on the host
            if engine.is_gradient_accumulation_boundary():
                for parameter in model.parameters():
                    parameter.grad = torch.sign(parameter.grad)
            engine.step()
        engine.destroy()
    assert_same(models[1], models[0], bitwise=False, relative=1e-4)


@pytest.mark.parametrize(
    ("make", "residency"),
    [(torch.optim.AdamW, 3), (lambda p: torch.optim.Adam(p, amsgrad=True), EVERY), (None, 1)],
    ids=["adamw", "amsgrad", "deepspeed"],
)
def test_the_first_step_takes_as_much_device_memory_as_later_ones(make: Any, residency: int) -> None:
    """Optimizer state comes with its pack, and is not made among the activations of the first update."""
    more = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}} if make is None else {}
    engine, _ = engine_with(make, residency, clip=0.5, **more)
    data, taken = batches(), []
    for _ in range(3):
        engine.train_batch(data)
        taken.append(engine.memory_report().device_peak_bytes)
    engine.destroy()
    assert taken[0] == taken[1] == taken[2]


class Scaled(nn.Module):
    """A layer with a scale that it may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, inputs: Tensor, scaled: bool) -> Tensor:
        outputs = torch.tanh(self.linear(inputs))
        return outputs * self.scale if scaled else outputs


class ScaledLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(3))

    def forward(self, inputs: Tensor, scaled: bool = False) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs, scaled)
        return inputs.square().mean()


def test_a_parameter_without_a_gradient_has_no_state_until_it_gets_one() -> None:
    """As in plain PyTorch, also where its state waits on the device."""
    torch.manual_seed(0)
    model = ScaledLayers()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    engine, _ = engine_of(model, lambda p: torch.optim.AdamW(p, lr=1e-2), 1, harmony={"residency": EVERY})
    inputs = torch.randn(4, 8)
    for scaled in (False, False, True, True):
        optimizer.zero_grad()
        plain(inputs, scaled).backward()
        optimizer.step()
        engine.backward(engine(inputs, scaled))
        engine.step()
        ours, theirs = engine.optimizer.state_dict()["state"], optimizer.state_dict()["state"]
        assert ours.keys() == theirs.keys()
        for key, state in theirs.items():
            assert ours[key]["step"] == state["step"]
            torch.testing.assert_close(ours[key]["exp_avg_sq"], state["exp_avg_sq"], rtol=1e-4, atol=0)
    engine.destroy()
    assert_same(model, plain, bitwise=False, relative=1e-4)
