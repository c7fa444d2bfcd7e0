"""Models that were loaded in 16 bits, and a ds_config without "bf16" or "fp16": they train as DeepSpeed trains them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harmony_ds.errors import ModelError
from tests.checkpoint.runs import Setup, assert_equal, state_of, train_and_resume
from tests.engine.drive import adamw, config_of, engine_for, family, groups_of, seed_of, sgd, train_groups
from tests.engine.test_bf16_masters import ADAM, clip_in_fp32, plain_adam
from tests.oracle import assert_same, train_plainly, train_plainly_half

pytestmark = pytest.mark.fixed_times

LLAMA = family("llama")


def stage(number: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": number}}


def loaded(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    model = LLAMA.build(0.1)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("make", [adamw, sgd])
def test_without_zero_all_stays_in_bf16_as_in_plain_pytorch(make: Any, clip: float | None) -> None:
    groups, plain, model = groups_of(LLAMA, 3, 3), loaded(), loaded()
    optimizer = make(plain.parameters())
    if clip is not None:
        optimizer.register_step_pre_hook(lambda *_: clip_in_fp32(plain, clip))
    train_plainly(plain, groups, optimizer, clip=None, seed_of=seed_of)
    with engine_for(model, make, config_of(3, clip, {"pack_layers": 2})) as engine:
        train_groups(engine, groups)
        report, states = engine.memory_report(), engine.optimizer.state.values()
        assert report.host_bytes["masters"] == 0
        assert {v.dtype for state in states for v in state.values() if v.numel() > 1} <= {torch.bfloat16}
    assert_same(model, plain, bitwise=True)


def test_the_optimizer_of_the_ds_config_keeps_its_state_in_bf16_too() -> None:
    groups, plain, model = groups_of(LLAMA, 3, 3), loaded(), loaded()
    train_plainly(plain, groups, plain_adam(plain, states=True), clip=None, seed_of=seed_of)
    with engine_for(model, None, config_of(3, None, {"pack_layers": 2}, optimizer=ADAM)) as engine:
        train_groups(engine, groups)
    assert_same(model, plain, bitwise=True)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_with_zero_masters_and_accumulation_are_fp32(number: int) -> None:
    groups, plain, model = groups_of(LLAMA, 3, 3), loaded().float(), loaded()
    expected = train_plainly_half(plain, groups, adamw, clip=0.05, seed_of=seed_of)
    with engine_for(model, adamw, config_of(3, 0.05, {"pack_layers": 2}, **stage(number))) as engine:
        train_groups(engine, groups)
        engine.finish_updates()
        masters = [p for group in engine.optimizer.param_groups for p in group["params"]]
        for master, wanted in zip(masters, expected.masters.values(), strict=True):
            assert master.dtype == torch.float32 and torch.equal(master, wanted)
    assert_same(model, plain, bitwise=True)


@pytest.mark.parametrize("number", [0, 2])
def test_a_model_in_fp16_trains_as_with_the_fp16_block(number: int) -> None:
    groups, model, same = groups_of(LLAMA, 4, 2), loaded(torch.float16), loaded(torch.float16)
    with engine_for(same, adamw, config_of(2, 1.0, fp16={"enabled": True}, **stage(number))) as engine:
        expected, skipped = train_groups(engine, groups), engine.skipped_steps
    with engine_for(model, adamw, config_of(2, 1.0, **stage(number))) as engine:
        assert train_groups(engine, groups) == expected
        assert engine.skipped_steps == skipped
    assert_same(model, same, bitwise=True)


@pytest.mark.parametrize("number", [0, 2])
def test_a_model_of_two_dtypes_trains_as_with_the_bf16_block(number: int, caplog: pytest.LogCaptureFixture) -> None:
    def mixed() -> nn.Module:
        model = loaded()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data = parameter.data.float() + 1e-4  # which bf16 cannot hold: masters do
        return model

    groups, model, same = groups_of(LLAMA, 3, 2), mixed(), mixed()
    with engine_for(same, adamw, config_of(2, 1.0, bf16={"enabled": True}, **stage(number))) as engine:
        expected = train_groups(engine, groups)
    with (
        caplog.at_level(logging.WARNING, "harmony_ds"),
        engine_for(model, adamw, config_of(2, 1.0, **stage(number))) as engine,
    ):
        assert train_groups(engine, groups) == expected
    assert_same(model, same, bitwise=True)
    assert "its fp32 parameters are computed with in it, too" in caplog.text


@pytest.mark.parametrize(
    ("number", "said", "other"),
    [(0, "as in plain PyTorch", '"bf16": {"enabled": true}'), (2, "fp32 masters", "dtype=torch.float32")],
)
def test_one_line_says_what_is_done_and_how_to_get_the_other(
    number: int, said: str, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "harmony_ds"), engine_for(loaded(), adamw, config_of(2, **stage(number))):
        lines = [record.getMessage() for record in caplog.records if "loaded in torch.bfloat16" in record.getMessage()]
    assert len(lines) == 1 and said in lines[0] and other in lines[0]


def test_nothing_is_said_where_the_ds_config_names_the_dtype(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "harmony_ds"),
        engine_for(loaded(), adamw, config_of(2, bf16={"enabled": True})),
        engine_for(LLAMA.build(0.0), adamw, config_of(2)),
    ):
        assert "loaded in" not in caplog.text


def test_both_16_bit_dtypes_in_one_model_are_refused_by_name() -> None:
    model = loaded()
    first, parameter = next(iter(model.named_parameters()))
    parameter.data = parameter.data.half()
    with (
        pytest.raises(ModelError, match=rf"{first} is of torch.float16.*one dtype"),
        engine_for(model, adamw, config_of(2)),
    ):
        pass


def test_bf16_under_autocast_to_bf16_trains_as_plain_pytorch_does() -> None:
    groups, plain, model = groups_of(LLAMA, 2, 2), loaded(), loaded()
    train_plainly(plain, groups, adamw(plain.parameters()), clip=None, seed_of=seed_of, autocast=torch.bfloat16)
    config = config_of(2, None, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    with engine_for(model, adamw, config) as engine:
        train_groups(engine, groups)
    assert_same(model, plain, bitwise=True)


def test_a_resumed_run_in_bf16_alone_goes_on_bit_for_bit(tmp_path: Path) -> None:
    setup = Setup(dtype=torch.bfloat16)
    assert_equal(*train_and_resume(setup, setup, tmp_path, state_of))
