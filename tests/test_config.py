"""What a ds_config may say, what it means, and what is said about one that cannot be meant."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harmony_ds import ConfigError
from harmony_ds.config import HarmonySettings, LossScale, Section, load_config

MICRO = {"train_micro_batch_size_per_gpu": 2}
DS_CONFIGS = sorted((Path(__file__).parent.parent / "ds_configs").glob("*.json"))


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


def test_defaults_of_the_harmony_block() -> None:
    assert load().harmony == HarmonySettings(
        device="auto",
        device_memory_gib=None,
        pack_layers=None,
        layers=(),
        stash="auto",
        prefetch=True,
        pin_memory=True,
        seed=None,
        gradient_slabs=3,
    )


def test_no_clipping_means_immediate_updates() -> None:
    config = load(gradient_clipping=0)

    assert config.gradient_clipping == 0.0
    assert not config.deferred_update


def test_loss_scaling_defers_updates_even_without_clipping() -> None:
    assert load(gradient_clipping=0.0, fp16={"enabled": True}).deferred_update


def test_fp16_defaults_are_deepspeeds() -> None:
    config = load(fp16={"enabled": True})

    assert config.compute_dtype == torch.float16
    assert config.loss_scale == LossScale(0.0, 16, 1000, 2, False, 1)


def test_fp16_block() -> None:
    block = {
        "enabled": True,
        "loss_scale": 128,
        "initial_scale_power": 8,
        "loss_scale_window": 10,
        "hysteresis": 3,
        "consecutive_hysteresis": True,
        "min_loss_scale": 0.5,
    }
    assert load(fp16=block).loss_scale == LossScale(128.0, 8, 10, 3, True, 0.5)


@pytest.mark.parametrize("key", ["bf16", "bfloat16"])
def test_bf16_under_both_names(key: str) -> None:
    config = load(**{key: {"enabled": True}})

    assert config.compute_dtype == torch.bfloat16
    assert config.loss_scale is None


@pytest.mark.parametrize("key", ["bf16", "fp16"])
def test_a_precision_that_is_not_enabled_is_off(key: str) -> None:
    assert load(**{key: {"enabled": False}}).compute_dtype == torch.float32
    assert load(**{key: {}}).compute_dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), (None, torch.float32)],
)
def test_gradients_accumulate_in_fp32_or_the_compute_dtype(name: str | None, dtype: torch.dtype) -> None:
    config = load(bf16={"enabled": True}, data_types={"grad_accum_dtype": name})

    assert config.accumulation_dtype == dtype


def test_the_harmony_block_is_read() -> None:
    block = {
        "device": "cpu",
        "device_memory_gib": 0.5,
        "pack_layers": 3,
        "layers": ["h.*", "head"],
        "stash": "host",
        "prefetch": False,
        "pin_memory": False,
        "seed": 0,
        "gradient_slabs": 1,
        "residency": 3,
    }
    settings = load(harmony=block).harmony

    assert dataclasses.asdict(settings) == {**block, "layers": ("h.*", "head")}
    assert settings.budget_bytes == 2**29
    assert HarmonySettings().budget_bytes is None


def test_optimizer_and_scheduler_are_handed_on() -> None:
    config = load(optimizer={"type": "AdamW", "params": {"lr": 0.1}}, scheduler={"type": "WarmupLR"})

    assert config.optimizer == Section("AdamW", {"lr": 0.1})
    assert config.scheduler == Section("WarmupLR", {})


def test_keys_without_meaning_are_listed_sorted() -> None:
    config = load(
        wall_clock_breakdown=True, aio={"block_size": 1}, tensorboard={"enabled": True}, gradient_clipping=1.0
    )

    assert config.without_meaning == ("aio", "tensorboard", "wall_clock_breakdown")


def test_what_is_refused_may_be_there_switched_off() -> None:
    assert load(amp={"enabled": False}, torch_autocast={"enabled": False}).without_meaning == ()


def test_the_json_is_kept_as_it_was_given() -> None:
    source = {**MICRO, "aio": {"block_size": 1}}
    config = load_config(source)

    assert config.raw == source
    assert config.raw is not source


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load().micro_batch = 3


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
    given = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }
    config = load_config({key: value for key, value in given.items() if value is not None}, world_size)

    assert (config.micro_batch, config.gradient_accumulation_steps, config.train_batch_size) == expected


@pytest.mark.parametrize(
    ("batch", "micro", "steps", "world_size", "numbers"),
    [
        (12, 2, 5, 1, r"12 != 2 \* 5 \* 1"),
        (12, 2, 6, 2, r"12 != 2 \* 6 \* 2"),
        (7, 2, None, 1, r"7 != 2 \* 3 \* 1"),
        (7, None, 2, 1, r"7 != 3 \* 2 \* 1"),
        (1, 2, None, 1, r"1 != 2 \* 0 \* 1"),
        (2, None, 4, 1, r"2 != 0 \* 4 \* 1"),
    ],
)
def test_batch_sizes_that_contradict_each_other_are_an_error_with_all_numbers(
    batch: int, micro: int | None, steps: int | None, world_size: int, numbers: str
) -> None:
    source = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    with pytest.raises(ConfigError, match=f"Check batch related parameters.*{numbers}"):
        load_config(source, world_size)


# ---- malformed configs

OPTIMIZER = {"type": "AdamW", "params": {"lr": 0.1}}
MALFORMED: list[tuple[dict[str, Any], str]] = [
    # keys
    ({"gradient_cliping": 1.0}, r'unknown key "gradient_cliping" in the ds_config. Did you mean "gradient_clipping"\?'),
    ({"optimiser": OPTIMIZER}, r'unknown key "optimiser" in the ds_config. Did you mean "optimizer"\?'),
    ({"qqqqq": 1}, r'unknown key "qqqqq" in the ds_config. Known keys: .*train_batch_size'),
    ({"harmony": {"pack_layer": 2}}, r'unknown key "pack_layer" in "harmony". Did you mean "pack_layers"\?'),
    ({"harmony": {"zzz": 2}}, r'unknown key "zzz" in "harmony". Known keys: device, device_memory_gib'),
    # batch sizes
    ({"train_micro_batch_size_per_gpu": None}, "Either train_batch_size or train_micro_batch_size_per_gpu needs"),
    ({"train_micro_batch_size_per_gpu": 0}, '"train_micro_batch_size_per_gpu": 0 has to be greater than 0'),
    ({"train_micro_batch_size_per_gpu": -2}, '"train_micro_batch_size_per_gpu": -2 has to be greater than 0'),
    ({"train_micro_batch_size_per_gpu": 2.0}, '"train_micro_batch_size_per_gpu" must be a whole number, not 2.0'),
    ({"train_micro_batch_size_per_gpu": "auto"}, "must be a whole number, not 'auto'"),
    ({"train_micro_batch_size_per_gpu": True}, "must be a whole number, not True"),
    ({"train_batch_size": 0}, '"train_batch_size": 0 has to be greater than 0'),
    ({"train_batch_size": "8"}, "\"train_batch_size\" must be a whole number, not '8'"),
    ({"gradient_accumulation_steps": 0}, '"gradient_accumulation_steps": 0 has to be greater than 0'),
    ({"gradient_accumulation_steps": [4]}, r'"gradient_accumulation_steps" must be a whole number, not \[4\]'),
    # clipping
    ({"gradient_clipping": -1.0}, '"gradient_clipping" must be a number that is not negative, not -1.0'),
    ({"gradient_clipping": "1.0"}, "must be a number that is not negative, not '1.0'"),
    ({"gradient_clipping": True}, "must be a number that is not negative, not True"),
    ({"gradient_clipping": None}, "must be a number that is not negative, not None"),
    ({"gradient_clipping": float("nan")}, "must be a number that is not negative, not nan"),
    ({"gradient_clipping": float("inf")}, "must be a number that is not negative, not inf"),
    # optimizer and scheduler
    ({"optimizer": "AdamW"}, '"optimizer" must be an object with a "type"'),
    ({"optimizer": {}}, '"optimizer" must be an object with a "type"'),
    ({"optimizer": {"type": 3}}, '"optimizer" must be an object with a "type"'),
    ({"scheduler": {"params": {}}}, '"scheduler" must be an object with a "type"'),
    ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, "please switch to .* 'gradient_clipping'"),
    (
        {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}},
        r"\"optimizer.params\" still says \"auto\" for \['lr'\]",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"b": "auto", "a": "auto", "c": 1}}},
        r"\"scheduler.params\" still says \"auto\" for \['a', 'b'\]: give numbers",
    ),
    # precision
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bfloat16 and fp16 modes cannot be simultaneously"),
    ({"fp16": {"enabled": True, "loss_scale": -1}}, "loss_scale must be >= 0"),
    ({"fp16": {"enabled": True, "loss_scale": True}}, "loss_scale must be a number, not bool"),
    ({"fp16": {"enabled": True, "loss_scale": float("inf")}}, "loss_scale must be a finite number"),
    ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "loss_scale_window must be > 0 when dynamic"),
    ({"data_types": {"grad_accum_dtype": "fp64"}}, 'grad_accum_dtype is "fp64": it must be one of'),
    (
        {"data_types": {"grad_accum_dtype": "fp16"}},
        'grad_accum_dtype is "fp16" but the model computes in torch.float32',
    ),
    (
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp16"}},
        'grad_accum_dtype is "fp16" but the model computes in torch.bfloat16: use "fp32" or that',
    ),
    # what is not supported
    ({"amp": {"enabled": True}}, '"amp": Apex AMP is not supported: use "bf16" or "fp16"'),
    ({"torch_autocast": {"enabled": True}}, '"torch_autocast": .* put torch.autocast around'),
    ({"tensor_parallel": {"autotp_size": 2}}, '"tensor_parallel": tensor parallelism is not supported'),
    ({"pipeline": {"stages": 2}}, '"pipeline": pipeline parallelism is not supported'),
    ({"sparse_attention": {"mode": "fixed"}}, '"sparse_attention": sparse attention is not supported'),
    ({"compression_training": {"weight_quantization": {}}}, "compression training is not supported"),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
        'zero_optimization.offload_optimizer.device is "nvme": .* use "cpu"',
    ),
    ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, 'offload_param.device is "nvme"'),
    # our own block
    ({"harmony": 3}, '"harmony" must be an object, not 3'),
    ({"harmony": None}, '"harmony" must be an object, not None'),
    ({"harmony": {"stash": "disk"}}, 'harmony.stash is \'disk\': it must be "auto", "device" or "host"'),
    ({"harmony": {"stash": None}}, "harmony.stash is None"),
    ({"harmony": {"pack_layers": 0}}, "harmony.pack_layers must be a whole number of at least 1, not 0"),
    ({"harmony": {"pack_layers": 1.5}}, "harmony.pack_layers must be a whole number of at least 1, not 1.5"),
    ({"harmony": {"pack_layers": True}}, "harmony.pack_layers must be a whole number of at least 1, not True"),
    ({"harmony": {"gradient_slabs": 0}}, "harmony.gradient_slabs must be a whole number of at least 1, not 0"),
    ({"harmony": {"gradient_slabs": "3"}}, "harmony.gradient_slabs must be a whole number of at least 1, not '3'"),
    ({"harmony": {"device_memory_gib": 0}}, "harmony.device_memory_gib must be a number above 0, not 0"),
    ({"harmony": {"device_memory_gib": -1.5}}, "harmony.device_memory_gib must be a number above 0, not -1.5"),
    ({"harmony": {"device_memory_gib": "4"}}, "harmony.device_memory_gib must be a number above 0, not '4'"),
    ({"harmony": {"device_memory_gib": float("nan")}}, "harmony.device_memory_gib must be a number above 0, not nan"),
    ({"harmony": {"layers": "h.*"}}, r"harmony.layers must be a list of patterns such as .*, not 'h.\*'"),
    ({"harmony": {"layers": ["h.*", 3]}}, r"harmony.layers must be a list of patterns .*, not \['h.\*', 3\]"),
    ({"harmony": {"prefetch": 1}}, "harmony.prefetch must be true or false, not 1"),
    ({"harmony": {"pin_memory": "yes"}}, "harmony.pin_memory must be true or false, not 'yes'"),
]


@pytest.mark.parametrize(("more", "message"), MALFORMED, ids=lambda value: str(value)[:60])
def test_a_malformed_config_is_an_error_that_names_the_key(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(**more)


@pytest.mark.parametrize(
    "more",
    [
        {"fp16": True},
        {"bf16": True},
        {"bf16": {"enabled": "false"}},
        {"bf16": {"enabled": "auto"}},
        {"fp16": {"enabled": True, "loss_scale": "128"}},
        {"fp16": {"enabled": True, "loss_scale_window": "1000"}},
        {"fp16": {"enabled": True, "initial_scale_power": "16"}},
        {"fp16": {"enabled": True, "hysteresis": -1}},
        {"data_types": "fp32"},
        {"optimizer": {"type": "AdamW", "params": [0.1]}},
        {"steps_per_print": "often"},
        {"zero_optimization": {"stge": 2}},
        {"harmony": {"device": 0}},
        {"harmony": {"seed": "x"}},
        {"harmony": {"layers": None}},
        {"harmony": {"device_memory_gib": float("inf")}},
        {3: 1},
    ],
    ids=str,
)
def test_more_malformed_configs_are_errors(more: dict[Any, Any]) -> None:
    with pytest.raises(ConfigError):
        load_config({**MICRO, **more})


# ---- files


def test_a_file_gives_what_its_dict_gives(tmp_path: Path) -> None:
    source = {**MICRO, "optimizer": OPTIMIZER, "harmony": {"device": "cpu"}}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(source), encoding="utf-8")

    assert load_config(path) == load_config(str(path)) == load_config(source)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"train_batch_size": 8,}', "ds_config.json is not JSON: .*line 1 column"),
        ("", "ds_config.json is not JSON"),
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
    with pytest.raises(ConfigError, match=r"existing deepspeed config, or a dictionary. Received: '.*none.json'"):
        load_config(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="existing deepspeed config"):
        load_config(tmp_path)


@pytest.mark.parametrize("path", DS_CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_loads(path: Path) -> None:
    config = load_config(path)

    assert config.without_meaning == ()
    assert config.optimizer is not None
    assert config.harmony.budget_bytes is not None


def test_there_are_shipped_configs() -> None:
    assert len(DS_CONFIGS) >= 4


# ---- the examples of DeepSpeed's documentation

DOCUMENTED: dict[str, dict[str, Any]] = {
    "getting started": {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
        "fp16": {"enabled": True},
        "zero_optimization": True,
    },
    "CIFAR-10": {
        "train_batch_size": 4,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
        },
        "wall_clock_breakdown": False,
    },
    "BERT pre-training": {
        "train_batch_size": 4096,
        "train_micro_batch_size_per_gpu": 32,
        "steps_per_print": 1000,
        "prescale_gradients": False,
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 4e-4, "freeze_step": 23000, "cuda_aware": False}},
        "gradient_clipping": 1.0,
        "wall_clock_breakdown": False,
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
    },
    "ZeRO-Offload": {
        "train_batch_size": 16,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "contiguous_gradients": True,
            "overlap_comm": True,
        },
    },
    "ZeRO-3 with offload": {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "contiguous_gradients": True,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_prefetch_bucket_size": 1e7,
            "stage3_param_persistence_threshold": 1e5,
            "reduce_bucket_size": 1e7,
            "sub_group_size": 1e9,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
        },
        "zero_allow_untested_optimizer": True,
    },
    "the blocks of the reference": {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_predivide_factor": 1.0,
        "communication_data_type": "fp16",
        "sparse_gradients": False,
        "dump_state": False,
        "memory_breakdown": False,
        "dataloader_drop_last": False,
        "aio": {"block_size": 1048576, "queue_depth": 8, "single_submit": False, "overlap_events": True},
        "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1, "top_modules": 3, "detailed": True},
        "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False, "profile": False},
        "tensorboard": {"enabled": True, "output_path": "output/ds_logs/", "job_name": "train_bert"},
        "wandb": {"enabled": True, "group": "my_group", "team": "my_team", "project": "my_project"},
        "csv_monitor": {"enabled": True, "output_path": "output/ds_logs/", "job_name": "train_bert"},
        "comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False},
        "autotuning": {"enabled": False, "arg_mappings": None},
        "elasticity": {"enabled": False, "max_train_batch_size": 2000},
        "data_types": {"grad_accum_dtype": "fp32"},
        "checkpoint": {"tag_validation": "Warn", "load_universal": False},
        "data_efficiency": {"enabled": False, "seed": 1234},
        "curriculum_learning": {"enabled": False},
    },
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_examples_of_deepspeed_load(name: str) -> None:
    config = load_config(DOCUMENTED[name])

    assert config.train_batch_size >= 1


@pytest.mark.parametrize(
    "key", ["disable_python_gc", "check_overflow", "seq_parallel_communication_data_type", "weight_quantization"]
)
def test_more_keys_of_deepspeed_are_known(key: str) -> None:
    assert load(**{key: {"enabled": False}}).without_meaning == (key,)
