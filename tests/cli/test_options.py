"""The ds_config of a command: where it says "auto", which a Trainer fills in, it has the defaults of commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harmony_ds.cli.command_line import parse
from harmony_ds.cli.options import config_of
from harmony_ds.config import Config

AUTO: dict[str, Any] = {
    **dict.fromkeys(
        ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping"),
        "auto",
    ),
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.8, 0.9]}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 10}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
}


def read(folder: Path, ds_config: dict[str, Any], *options: str) -> Config:
    file = folder / "ds_config.json"
    file.write_text(json.dumps(ds_config), encoding="utf-8")
    return config_of(parse(["estimate", "config.json", "--ds-config", str(file), *options]))


def test_values_that_a_trainer_fills_in_have_the_defaults_of_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = read(tmp_path, AUTO)
    assert (config.micro_batch, config.gradient_accumulation_steps) == (1, 16)
    assert config.values["bf16.enabled"] is True and config.gradient_clipping == 1.0 and config.scheduler is None
    assert config.optimizer is not None and config.optimizer.params == {"betas": [0.8, 0.9]}
    assert capsys.readouterr().err == (
        'where the ds_config says "auto", which a Trainer fills in: "gradient_accumulation_steps": 16, "bf16": {"enabled": '
        'true}, "train_micro_batch_size_per_gpu": 1; the rest is left out\n'
    )


def test_options_stand_before_the_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = read(tmp_path, AUTO, "--micro-batch", "3", "--accumulation", "5")
    assert (config.micro_batch, config.gradient_accumulation_steps) == (3, 5)
    assert "gradient_accumulation_steps" not in capsys.readouterr().err


def test_a_batch_that_is_given_is_kept(tmp_path: Path) -> None:
    config = read(tmp_path, {**AUTO, "train_batch_size": 12})
    assert (config.micro_batch, config.gradient_accumulation_steps, config.harmony.micro_batch) == (12, 1, "auto")


def test_weights_are_of_the_dtype_that_is_given(tmp_path: Path) -> None:
    config = read(tmp_path, {**AUTO, "fp16": {"enabled": True}})
    assert config.values["bf16.enabled"] is False and config.values["fp16.enabled"] is True


def test_where_nothing_is_left_open_nothing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    config = read(tmp_path, {"train_batch_size": 4, "scheduler": scheduler})
    assert config.scheduler is not None and capsys.readouterr().err == ""
