"""Values of a ds_config and the settings they become."""

from __future__ import annotations

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.precision_config import DeepSpeedFP16Config

from harmony_ds import ConfigError
from harmony_ds.config import HarmonySettings, Section, load_config

MICRO = {"train_micro_batch_size_per_gpu": 2}
OPTIMIZER = {"type": "AdamW", "params": {"lr": 0.1}}


def load(**more: Any) -> Any:
    return load_config({**MICRO, **more})


# ---- defaults


def test_defaults_are_deepspeeds() -> None:
    config = load()

    assert (config.micro_batch, config.gradient_accumulation_steps, config.train_batch_size) == (2, 1, 2)
    assert config.gradient_clipping == 1.0
    assert config.deferred_update
    assert (config.compute_dtype, config.accumulation_dtype) == (torch.float32, torch.float32)
    assert config.optimizer is config.scheduler is config.loss_scale is config.steps_per_print is None
    assert config.without_meaning == ()
    assert config.harmony == HarmonySettings()


def test_fp16() -> None:
    config = load(gradient_clipping=0.0, fp16={"enabled": True})
    block = {"loss_scale": 128, "initial_scale_power": 8, "loss_scale_window": 10, "hysteresis": 3, "min_loss_scale": 4}
    read = load(fp16={"enabled": True, "consecutive_hysteresis": True, **block})

    assert config.compute_dtype == torch.float16
    assert config.loss_scale == DeepSpeedFP16Config(enabled=True)
    assert config.deferred_update
    assert read.loss_scale == DeepSpeedFP16Config(enabled=True, consecutive_hysteresis=True, **block)


@pytest.mark.parametrize("key", ["bf16", "bfloat16"])
def test_bf16_under_both_names(key: str) -> None:
    config = load(**{key: {"enabled": True}})

    assert config.compute_dtype == torch.bfloat16
    assert config.loss_scale is None
    assert load(**{key: {"enabled": False}}, fp16={}).compute_dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("half", torch.float16), (None, torch.float32)],
)
def test_gradients_accumulate_in_fp32_or_the_dtype_that_is_named(name: str | None, dtype: torch.dtype) -> None:
    config = load(bf16={"enabled": True}, data_types={"grad_accum_dtype": name})

    assert config.accumulation_dtype == dtype


def test_the_harmony_block_is_read() -> None:
    block = {
        "device": "cpu",
        "devices": 2,
        "parallel": "auto",
        "device_memory_gib": 0.5,
        "pack_layers": 3,
        "layers": ["h.*", "head"],
        "stash": "host",
        "prefetch": False,
        "pin_memory": False,
        "seed": 0,
        "weights": "share",
        "gradient_slabs": 1,
        "residency": 3,
        "micro_batch": {"forward": 8, "backward": 4},
        "grouping": False,
        "keep_graphs": False,
        "split_masters": True,
        "reduce": "host",
        "tokens": 512,
        "progress": False,
    }
    settings = load(harmony=block, bf16={"enabled": True}).harmony

    assert dataclasses.asdict(settings) == {
        **block,
        "layers": ("h.*", "head"),
        "micro_batch": (8, 4),
        "plan": None,
        "reproducible": True,
        "profile": None,
        "unknown_keys": "error",
    }
    assert settings.budget_bytes == 2**29
    assert HarmonySettings().budget_bytes is None


def test_keys_without_meaning_are_listed_sorted() -> None:
    config = load(
        zero_optimization={"stage": 3, "reduce_bucket_size": 5e8, "offload_param": {"buffer_count": 4}},
        aio={"block_size": 1},
        activation_checkpointing={"profile": False},
        wall_clock_breakdown=True,
    )

    assert config.without_meaning == (
        "activation_checkpointing",
        "aio",
        "zero_optimization.offload_param.buffer_count",
        "zero_optimization.reduce_bucket_size",
    )


@pytest.mark.parametrize(
    "block",
    [
        {"amp": {"enabled": False}},
        {"torch_autocast": {"enabled": False}},
        {"tensor_parallel": {"autotp_size": 1}},
        {"compile": {"debug_log": True}},
        {"hybrid_engine": {"max_out_tokens": 8}},
        {"weight_quantization": {"enabled": False}},
        {"sparse_gradients": False},
        {"elasticity": {"enabled": False, "max_train_batch_size": 2000}},
        {"datastates_ckpt": False},
        {"sequence_parallel_size": 1, "data_parallel_size": 1},
        {"zero_optimization": {"zenflow": None}},
    ],
    ids=str,
)
def test_a_refused_block_may_be_switched_off(block: dict[str, Any]) -> None:
    assert load(**block).without_meaning == ()


@pytest.mark.parametrize(
    ("bf16", "clip", "skips", "deferred"),
    [
        ({"enabled": True}, 1.0, True, True),
        ({"enabled": True}, 0.0, False, False),
        ({"enabled": True, "check_grad_overflow": True}, 0.0, True, True),
        ({"enabled": True, "check_grad_overflow": False}, 1.0, False, True),
        ({"enabled": False, "check_grad_overflow": True}, 0.0, False, False),
    ],
)
def test_steps_that_overflow_in_bf16(bf16: dict[str, Any], clip: float, skips: bool, deferred: bool) -> None:
    config = load(bf16=bf16, gradient_clipping=clip)

    assert (config.skip_overflow, config.deferred_update) == (skips, deferred)


@pytest.mark.parametrize(
    ("given", "expected"), [("true", True), (1, True), ("off", False), (0.0, False), ("No", False)]
)
def test_flags_are_read_as_pydantic_reads_them(given: object, expected: bool) -> None:
    assert load(fp16={"enabled": given}).values["fp16.enabled"] is expected


def test_keys_of_zero3_have_two_names() -> None:
    for name in ("prefetch_bucket_size", "stage3_prefetch_bucket_size"):
        assert load(zero_optimization={name: 7}).values["zero_optimization.prefetch_bucket_size"] == 7
    both = load(zero_optimization={"max_live_parameters": 1, "stage3_max_live_parameters": 2}).values
    assert both["zero_optimization.max_live_parameters"] == 2
    old = load(zero_optimization={"stage3_gather_fp16_weights_on_model_save": True}).values
    assert old["zero_optimization.gather_16bit_weights_on_model_save"] is True


def test_deprecated_offload_flags() -> None:
    values = load(zero_optimization={"stage": 2, "cpu_offload": True, "cpu_offload_param": False}).values

    assert values["zero_optimization.offload_optimizer.device"] == "cpu"
    assert values["zero_optimization.offload_param"] is None
    assert load(zero_optimization=True).values["zero_optimization.stage"] == 1
    assert load(zero_optimization=False).values["zero_optimization.stage"] == 0


@pytest.mark.parametrize("block", ["offload_optimizer", "offload_param"])
def test_pinning_follows_the_offload_blocks_unless_ours_says_otherwise(block: str) -> None:
    pageable = {"stage": 3, block: {"device": "cpu", "pin_memory": False}}

    assert load(zero_optimization=pageable).harmony.pin_memory is False
    assert load(zero_optimization=pageable, harmony={"pin_memory": True}).harmony.pin_memory is True
    assert load(zero_optimization={"stage": 3, block: {"device": "cpu"}}).harmony.pin_memory is True


def test_auto_in_a_key_without_meaning_is_deepspeeds_default() -> None:
    values = load(zero_optimization={"stage3_prefetch_bucket_size": "auto", "overlap_comm": "auto"}).values

    assert values["zero_optimization.prefetch_bucket_size"] == 50_000_000
    assert values["zero_optimization.overlap_comm"] is False


# ---- batch sizes: batch = micro-batch * steps * world size


@pytest.mark.parametrize(
    ("batch", "micro", "steps", "world_size", "expected"),
    [
        (None, 2, None, 1, (2, 1, 2)),
        (None, 2, 3, 1, (2, 3, 6)),
        (None, 2, 3, 4, (2, 3, 24)),
        (12, None, None, 1, (12, 1, 12)),
        (12, None, 3, 1, (4, 3, 12)),
        (12, None, 3, 2, (2, 3, 12)),
        (12, 2, None, 1, (2, 6, 12)),
        (12, 2, None, 3, (2, 2, 12)),
        (12, 2, 6, 1, (2, 6, 12)),
    ],
)
def test_the_third_of_the_batch_sizes_follows(
    batch: int | None, micro: int | None, steps: int | None, world_size: int, expected: tuple[int, int, int]
) -> None:
    given = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    config = load_config({key: value for key, value in given.items() if value is not None}, world_size)

    assert (config.micro_batch, config.gradient_accumulation_steps, config.train_batch_size) == expected


@pytest.mark.parametrize(
    ("batch", "micro", "steps", "world_size", "numbers"),
    [
        (12, 2, 5, 1, r"12 != 2 \* 5 \* 1"),
        (12, 2, 6, 2, r"12 != 2 \* 6 \* 2"),
        (7, 2, None, 1, r"7 != 2 \* 3 \* 1"),
        (7, None, 2, 1, r"7 != 3 \* 2 \* 1"),
        (1, 2, None, 1, "batch_size 1, .*per_gpu 2, .*steps 0"),
        (2, None, 4, 1, "batch_size 2, .*per_gpu 0, .*steps 4"),
    ],
)
def test_batch_sizes_that_contradict_each_other_are_an_error_with_all_numbers(
    batch: int, micro: int | None, steps: int | None, world_size: int, numbers: str
) -> None:
    source = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    with pytest.raises(ConfigError, match=f"(Check batch related parameters|greater than 0|by zero).*{numbers}"):
        load_config(source, world_size)


def test_null_is_a_block_that_is_left_out() -> None:
    source = {"optimizer": {"type": "SGD", "params": None}, "scheduler": None, "fp16": None, "zero_optimization": None}
    assert load(**source).optimizer == Section("SGD", {})
    assert load(**source).values["zero_optimization.stage"] == 0


# ---- files


def test_a_file_gives_what_its_dict_gives(tmp_path: Path) -> None:
    source = {**MICRO, "optimizer": OPTIMIZER, "scheduler": {"type": "WarmupLR"}, "harmony": {"device": "cpu"}}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(source), encoding="utf-8")

    config = load_config(path)
    assert config == load_config(str(path)) == load_config(source)
    assert (config.raw, config.optimizer) == (source, Section("AdamW", {"lr": 0.1}))
    assert config.scheduler == Section("WarmupLR", {})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"train_batch_size": [8}', "ds_config.json is not JSON: .*line 1 column"),
        ("[1, 2]", "ds_config.json must hold a JSON object, not list"),
        ('"text"', "ds_config.json must hold a JSON object, not str"),
        (
            '{"train_batch_size": 8, "train_batch_size": 9}',
            r"Duplicate keys in DeepSpeed config: \['train_batch_size'\]",
        ),
        ('{"train_batch_size": 8, "bf16": {"a": 1, "a": 2}}', r"Duplicate keys in DeepSpeed config: \['a'\]"),
    ],
)
def test_a_malformed_file_is_an_error_that_names_it(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_a_file_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"existing deepspeed config, or a dictionary or .* base64. Received: .*none"):
        load_config(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="existing deepspeed config"):
        load_config(tmp_path)


def test_comments_and_trailing_commas_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{\n  // two\n  "train_batch_size": 8, # a comment\n  /* none */ "bf16": {"enabled": true,},\n}')

    assert load_config(path) == load_config({"train_batch_size": 8, "bf16": {"enabled": True}})


def test_base64_of_json() -> None:
    source = {"train_batch_size": 8, "optimizer": OPTIMIZER}
    encoded = base64.urlsafe_b64encode(json.dumps(source).encode()).decode()

    assert load_config(encoded) == load_config(source)
    with pytest.raises(ConfigError, match="Duplicate keys"):
        load_config(base64.urlsafe_b64encode(b'{"train_batch_size": 8, "train_batch_size": 9}').decode())
    with pytest.raises(ConfigError, match="valid base64"):
        load_config("bm90IGpzb24=" * 50)


@pytest.mark.parametrize(("value", "sizes"), [("config", "config"), ("auto", "auto"), (3, (3, 3))])
def test_sizes_of_slices_are_a_word_or_a_number(value: object, sizes: object) -> None:
    assert load(harmony={"micro_batch": value}).harmony.micro_batch == sizes


@pytest.mark.parametrize(("value", "sizes"), [("off", "off"), (512, 512), ({"head": 512, "layers": 64}, (512, 64))])
def test_tokens_of_tiles_are_a_word_a_number_or_two(value: object, sizes: object) -> None:
    assert load(harmony={"tokens": value}).harmony.tokens == sizes


@pytest.mark.parametrize("value", ["all", 0, {"head": 512}, {"head": 0, "layers": 64}, [512, 64, 8]])
def test_other_tokens_are_an_error(value: object) -> None:
    with pytest.raises(ConfigError, match="tokens"):
        load(harmony={"tokens": value})


def test_a_micro_batch_of_auto_is_a_share_of_the_batch_and_leaves_the_slices_to_the_search() -> None:
    config = load_config(
        {"train_batch_size": 24, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2}
    )
    assert (config.micro_batch, config.gradient_accumulation_steps) == (12, 2)
    assert config.harmony.micro_batch == "auto"
