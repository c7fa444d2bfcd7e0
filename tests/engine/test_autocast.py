"""The ds_config's `torch_autocast`: what plain PyTorch computes with torch.autocast around the model's forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.engine.drive import (
    adamw,
    config_of,
    engine_for,
    family,
    groups_of,
    loop,
    means_of,
    plainly,
    random_rows,
    seed_of,
    sgd,
)
from tests.oracle import assert_same, train_plainly

LLAMA = family("llama")
GROUPS = groups_of(LLAMA, 2, 3)
BFLOAT16: dict[str, Any] = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
FLOAT16: dict[str, Any] = {"torch_autocast": {"enabled": True, "dtype": "float16"}}


@pytest.mark.parametrize("packs", [{"pack_layers": 1}, {"pack_layers": 2, "residency": 1}], ids=str)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_step_equals_plain_autocast(packs: dict[str, Any], clip: float | None) -> None:
    plain = LLAMA.build(0.1)
    losses = train_plainly(
        plain, GROUPS, adamw(plain.parameters()), clip=clip, seed_of=seed_of, autocast=torch.bfloat16
    )
    model = LLAMA.build(0.1)
    with engine_for(model, adamw, config_of(3, clip, packs, **BFLOAT16)) as engine:
        assert [engine.train_batch(iter(group)).item() for group in GROUPS] == means_of(losses)
        assert engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.bfloat16
    assert_same(model, plain, bitwise=True)
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_micro_batches_one_by_one_whose_losses_are_read() -> None:
    plain, losses = plainly(LLAMA, 0.1, GROUPS, adamw, autocast=torch.bfloat16)
    model = LLAMA.build(0.1)
    with pytest.warns(RuntimeWarning), engine_for(model, adamw, config_of(3, None, **BFLOAT16)) as engine:
        assert loop(engine, GROUPS, look=lambda i: i == 1) == losses
    assert_same(model, plain, bitwise=True)


def head() -> nn.Module:
    """Return a model whose loss is a function's."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.ReLU())))


def test_the_loss_function_is_outside_as_it_is_for_deepspeed() -> None:
    def loss_fn(outputs: Tensor) -> Tensor:
        assert outputs.dtype == torch.bfloat16 and not torch.is_autocast_enabled("cpu")
        return (outputs @ outputs.T).float().mean()

    batches = [random_rows(i, 4, 8) for i in range(2)]
    plain, model = head(), head()
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = plain(batch)
        (loss_fn(outputs) / 2).backward()
    sgd(plain.parameters()).step()
    with engine_for(model, sgd, config_of(2, None, {"pack_layers": 1}, **BFLOAT16)) as engine:
        engine.train_batch(iter(batches), loss_fn)
        with torch.no_grad():
            assert engine(batches[0]).dtype == torch.bfloat16
    assert_same(model, plain, bitwise=True)


@pytest.mark.parametrize("overflow", [False, True])
def test_float16_scales_losses_as_torchs_scaler(overflow: bool) -> None:
    factor = 1e4 if overflow else 1.0
    batches = [random_rows(i, 4, 8) for i in range(4)]

    def loss_fn(outputs: Tensor) -> Tensor:
        return F.mse_loss(outputs.float(), torch.ones_like(outputs, dtype=torch.float32)) * factor

    plain, model, scales = head(), head(), []
    optimizer, scaler = sgd(plain.parameters()), torch.amp.GradScaler("cpu")
    for batch in batches:
        with torch.autocast("cpu", torch.float16):
            outputs = plain(batch)
        scaler.scale(loss_fn(outputs)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    with engine_for(model, sgd, config_of(1, None, {"pack_layers": 1}, **FLOAT16)) as engine:
        found = []
        for batch in batches:
            engine.train_batch([batch], loss_fn)
            found.append(engine.cur_scale)
        assert engine.optimizer.dynamic_loss_scale
    assert found == scales
    assert (scales[-1] < 65536) == overflow
    assert_same(model, plain, bitwise=True)


def test_times_in_a_file_are_of_the_same_autocast(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = {"profile": str(tmp_path / "profile.json")}
    for more, replaced in (({}, False), (BFLOAT16, True), (BFLOAT16, False)):
        caplog.clear()
        with engine_for(head(), sgd, config_of(1, None, file, **more)) as engine:
            engine.train_batch([torch.ones(4, 8)], lambda outputs: outputs.float().mean())
        assert ("will be replaced" in caplog.text) == replaced
