"""Resident packs on a device that counts every byte and that is not the host."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import harmony_ds
from tests import simdevice
from tests.families import FAMILIES, MODULES
from tests.oracle import assert_same, train_plainly
from tests.simdevice.device import SimDevice
from tests.simdevice.test_engine_exactness import SEED, optimizer_for
from tests.simdevice.test_engine_memory import _no_limit_left_behind, batches, build  # noqa: F401

EVERY = 100
BF16 = {"bf16": {"enabled": True}}


def engine_with(optimizer: Any, residency: Any, model: nn.Module | None = None, **more: Any) -> tuple[Any, SimDevice]:
    device = SimDevice()
    model = build() if model is None else model
    harmony = {"seed": SEED, "residency": residency, **more.pop("harmony", {"pack_layers": 2})}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "harmony": harmony,
        **more,
    }
    made = None if optimizer is None else optimizer(model.parameters())
    engine, *_ = harmony_ds.initialize(model=model, optimizer=made, config=config, device=device)
    return engine, device


@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("residency", [1, 3, EVERY])
@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.AdamW,
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.1),
        torch.optim.RAdam,
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    ],
    ids=["adamw", "fused", "amsgrad", "radam", "sgd"],
)
def test_measured_peak_is_never_above_the_plan(optimizer: Any, residency: int, clip: float, precision: Any) -> None:
    engine, _ = engine_with(optimizer, residency, gradient_clipping=clip, **precision)
    data = batches()
    for _ in range(3):
        engine.train_batch(data)
        report = engine.memory_report()
        assert report.device_peak_bytes <= report.planned_peak_bytes
    engine.destroy()
    assert report.planned_peak_bytes <= 1.25 * report.device_peak_bytes


def test_gradients_summed_in_bf16_are_cast_within_the_plan() -> None:
    engine, _ = engine_with(torch.optim.AdamW, EVERY, data_types={"grad_accum_dtype": "bf16"}, **BF16)
    data = batches()
    for _ in range(2):
        engine.train_batch(data)
    report = engine.memory_report()
    engine.destroy()
    assert report.device_peak_bytes <= report.planned_peak_bytes


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("name", [f.name for f in (*MODULES, *FAMILIES)])
def test_every_family_trains_to_the_plain_bits(name: str, clip: float) -> None:
    one = next(f for f in (*MODULES, *FAMILIES) if f.name == name)
    model, plain = one.build(0.1).train(), one.build(0.1).train()
    if name in ("gpt2", "opt"):
        plain.config.use_cache = False
    groups = [[one.batch(step * 3 + i) for i in range(3)] for step in range(2)]
    train_plainly(
        plain,
        groups,
        optimizer_for(one, plain),
        clip=clip or None,
        seed_of=lambda step, index: harmony_ds.micro_batch_seed(SEED, step, index),
    )
    engine, _ = engine_with(
        lambda _: optimizer_for(one, model), EVERY, model, gradient_clipping=clip, harmony={"pack_layers": 1}
    )
    for group in groups:
        engine.train_batch(iter(group))
    report = engine.memory_report()
    engine.destroy()
    assert_same(model, plain, one.bitwise)
    assert report.device_peak_bytes <= report.planned_peak_bytes


@pytest.mark.parametrize("residency", [3, EVERY])
def test_the_engine_moves_exactly_the_bytes_that_it_reports(residency: int) -> None:
    engine, _ = engine_with(torch.optim.AdamW, residency, gradient_clipping=0.5)
    data = batches()
    engine.train_batch(data)
    engine.module.state_dict()
    before = simdevice.traffic()
    engine.train_batch(data)
    after = simdevice.traffic()
    report = engine.swap_report()
    engine.destroy()
    assert after[0] - before[0] == sum(report.host_to_device.values())
    # The model asks each micro-batch's mask one question (one byte) by itself.
    assert after[1] - before[1] - 3 == sum(report.device_to_host.values())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize(
    ("type_", "params"),
    [
        ("AdamW", {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-5}),
        ("Adam", {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-4, "adam_w_mode": False}),
        ("Adagrad", {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-5}),
        ("Lion", {"lr": 1e-3, "weight_decay": 0.1}),
    ],
)
def test_deepspeeds_optimizers_are_replaced_by_torchs_on_the_device(type_: str, params: Any, clip: float) -> None:
    """Half of the steps here, half there: states go to and fro."""
    models, states = [build(), build()], []
    for model, residency in zip(models, ("off", 4), strict=True):
        optimizer = {"type": type_, "params": params}
        engine, _ = engine_with(None, residency, model, gradient_clipping=clip, optimizer=optimizer)
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
    if type_ == "Lion":  # a sign may flip where the direction is near zero
        for mine, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
            assert ((mine - theirs).abs() > 1e-5).float().mean() < 0.01
    else:
        assert_same(models[1], models[0], bitwise=False, relative=1e-4)
    for mine, theirs in zip(states[1].values(), states[0].values(), strict=True):
        assert mine.keys() == theirs.keys()
        assert mine["step"] == theirs["step"] == 6
        assert {key: type(value) for key, value in mine.items()} == {key: type(value) for key, value in theirs.items()}


def test_out_of_memory_in_a_step_leaves_resident_weights_as_they_were() -> None:
    engine, _ = engine_with(torch.optim.AdamW, 3, gradient_clipping=0.5)
    data = batches()
    engine.train_batch(data)
    weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    engine.train_batch(itertools.chain(data))
    simdevice.set_limit(simdevice.allocated_bytes() + 20_000)
    engine.finish_updates()
    weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    with pytest.raises(torch.OutOfMemoryError):
        engine.train_batch(data)
    simdevice.set_limit(None)
    assert engine.usable
    assert all(torch.equal(p, weights[name]) for name, p in engine.module.named_parameters())
    engine.train_batch(data)
    engine.destroy()


def test_generation_and_evaluation_use_the_weights_on_the_device() -> None:
    engine, _ = engine_with(torch.optim.AdamW, 3)
    data = batches()
    engine.train_batch(data)
    one = next(data)
    with torch.no_grad():
        streamed = engine(**one).loss.item()
    evaluated = engine.eval_batch(itertools.repeat(one)).item()
    engine.destroy()
    assert streamed == evaluated == engine.module(**one).loss.item()
