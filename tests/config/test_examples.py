"""The ds_configs of the project, and examples from other projects, under both engines' parsers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from pydantic import ValidationError

from harmony_ds import ConfigError
from harmony_ds.config import Config, Section, load_config

FOLDER = Path(__file__).parents[2] / "ds_configs"
AUTO = FOLDER / "huggingface_auto.json"
SHIPPED = sorted(set(FOLDER.glob("*.json")) - {AUTO})
ZERO3 = {
    "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "cpu",
    "pin_memory": True}, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
    "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}  # fmt: skip
_FP16 = {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1}
_OFF = {"enabled": False}
FOUND: dict[str, dict[str, Any]] = {
    # https://www.deepspeed.ai/docs/config-json/
    "the blocks of the reference": {"train_micro_batch_size_per_gpu": 1, "gradient_predivide_factor": 1.0,
        "communication_data_type": "fp16", "sparse_gradients": False, "dump_state": False, "memory_breakdown": False,
        "dataloader_drop_last": False,
        "aio": {"block_size": 1048576, "queue_depth": 8, "single_submit": False, "overlap_events": True},
        "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1, "top_modules": 3,
        "detailed": True},
        "activation_checkpointing": {"partition_activations": True, "number_checkpoints": None, "profile": False},
        "tensorboard": {"enabled": True, "output_path": "output/ds_logs/", "job_name": "train_bert"},
        "wandb": {"enabled": True, "group": "my_group", "team": "my_team", "project": "my_project"},
        "csv_monitor": {"enabled": True, "output_path": "output/ds_logs/", "job_name": "train_bert"},
        "comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False},
        "autotuning": {"enabled": False, "arg_mappings": None},
        "elasticity": {"enabled": False, "max_train_batch_size": 2000}, "data_types": {"grad_accum_dtype": "fp32"},
        "checkpoint": {"tag_validation": "Warn", "load_universal": False},
        "data_efficiency": {"enabled": False, "seed": 1234}, "curriculum_learning": {"enabled": False}},
    # https://www.deepspeed.ai/docs/config-json/#optimizer-parameters and the sections after it
    "the reference, from the top": {"train_batch_size": 32, "optimizer": {"type": "Adam", "params": {"lr": 0.001,
        "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}, "scheduler": {"type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}}, "gradient_clipping": 1.0,
        "prescale_gradients": False, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": True, "buffer_count": 5, "buffer_size": 1e8},
        "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.3, "buffer_count": 4},
        "stage3_gather_16bit_weights_on_model_save": True, "round_robin_gradients": False,
        "ignore_unused_parameters": True}},
    # transformers' documentation, ZeRO-3, as Trainer has filled it in
    "transformers zero3": {"fp16": {**_FP16, "enabled": False}, "bf16": {"enabled": True},
        "amp": {"enabled": "auto", "opt_level": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr": 3e-5,
        "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}, "scheduler": {"type": "WarmupDecayLR",
        "params": {"last_batch_iteration": -1, "total_num_steps": 100, "warmup_min_lr": 0, "warmup_max_lr": 3e-5}},
        "zero_optimization": {**ZERO3, "reduce_bucket_size": 4194304}, "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0, "train_batch_size": 16, "train_micro_batch_size_per_gpu": 8,
        "steps_per_print": float("inf"), "wall_clock_breakdown": False},
    # DeepSpeedExamples, applications/DeepSpeed-Chat/dschat/utils/ds_utils.py
    "DeepSpeed-Chat": {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10,
        "zero_optimization": {"stage": 3, "overlap_comm": True, "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 1e4,
        "stage3_max_live_parameters": 3e7, "stage3_prefetch_bucket_size": 3e7, "memory_efficient_linear": False},
        "fp16": {"enabled": True, "loss_scale_window": 100}, "gradient_clipping": 1.0, "prescale_gradients": False,
        "wall_clock_breakdown": False, "hybrid_engine": {"enabled": False, "max_out_tokens": 512,
        "inference_tp_size": 1, "release_inference_cache": False, "pin_parameters": True,
        "tp_gather_partition_size": 8},
        "tensorboard": {"enabled": False, "output_path": "out/ds_tensorboard_logs/", "job_name": "step1_tensorboard"}},
    # Megatron-DeepSpeed, examples_deepspeed/rebase/ds_config_gpt_TEMPLATE.json, and its neighbours
    "Megatron-DeepSpeed": {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10,
        "zero_optimization": {"stage": 1}, "gradient_clipping": 1.0, "prescale_gradients": False,
        "fp16": {**_FP16, "initial_scale_power": 11}, "curriculum_learning": {"enabled": False,
        "curriculum_type": "seqlen", "min_difficulty": 64, "schedule_type": "fixed_linear"},
        "data_efficiency": {"enabled": False, "seed": 1234, "data_routing": _OFF, "data_sampling": _OFF},
        "compression_training": _OFF, "autotuning": _OFF,
        "comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False},
        "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1, "top_modules": 1,
        "detailed": True}, "wall_clock_breakdown": True},
    # axolotl, deepspeed_configs/zero3_bf16_cpuoffload_all.json, filled in
    "axolotl": {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True,
        "zero_optimization": {**ZERO3, "sub_group_size": 0, "max_live_parameters": 0, "max_reuse_distance": 0},
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "auto_cast": False, "loss_scale": 0, "initial_scale_power": 32},
        "gradient_accumulation_steps": 1, "gradient_clipping": 1.0, "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 2, "wall_clock_breakdown": False},
    # DeepSpeed's documentation, torch_autocast
    "torch_autocast": {"train_micro_batch_size_per_gpu": 1, "torch_autocast": {"enabled": True, "dtype": "bfloat16",
        "lower_precision_safe_modules": ["torch.nn.Linear", "torch.nn.Conv2d"]}, "zero_optimization": {"stage": 3}},
}  # fmt: skip


OLDER = ("the blocks of the reference", "transformers zero3", "Megatron-DeepSpeed", "axolotl")
"""Examples with keys, switched off or without meaning, that DeepSpeed 0.19.8 does not take any more."""


def assert_same_settings(ours: Config, theirs: Any) -> None:
    assert ours.train_batch_size == theirs.train_batch_size
    assert ours.micro_batch == theirs.train_micro_batch_size_per_gpu
    assert ours.gradient_accumulation_steps == theirs.gradient_accumulation_steps
    assert ours.gradient_clipping == theirs.gradient_clipping
    assert ours.values["zero_optimization.stage"] == theirs.zero_optimization_stage
    assert ours.values["fp16.enabled"] == theirs.float16_config.enabled
    assert (ours.optimizer and ours.optimizer.params) == theirs.optimizer_params
    assert (ours.scheduler and ours.scheduler.type) == theirs.scheduler_name


@pytest.mark.parametrize("name", FOUND)
def test_examples_of_other_projects_load(name: str) -> None:
    config = load_config(FOUND[name])

    if name in OLDER:
        with pytest.raises((DeepSpeedConfigError, ValidationError), match=r"has been removed|not permitted"):
            DeepSpeedConfig(dict(FOUND[name]))
    else:
        assert_same_settings(config, DeepSpeedConfig(dict(FOUND[name])))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_means_the_same_to_both_engines(path: Path) -> None:
    config = load_config(path)

    assert_same_settings(config, DeepSpeedConfig(str(path)))
    assert config.without_meaning == ()
    assert config.optimizer is not None
    assert config.harmony.budget_bytes is not None


def test_the_auto_values_are_filled_as_hugging_face_fills_them(tmp_path: Path) -> None:
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    with pytest.raises(ConfigError, match='still say "auto"'):
        load_config(AUTO)
    # A TrainingArguments of deepspeed=... would ask for a process group.
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=3,
        gradient_accumulation_steps=5,
        learning_rate=2e-4,
        weight_decay=0.25,
        max_grad_norm=0.75,
        warmup_steps=7,
        bf16=True,
        use_cpu=True,
    )
    filled = HfTrainerDeepSpeedConfig(str(AUTO))
    filled.trainer_config_process(arguments)
    filled.trainer_config_finalize(arguments, model=None, num_training_steps=100)
    config = load_config(filled.config)

    assert_same_settings(config, DeepSpeedConfig(filled.config))
    assert (config.micro_batch, config.gradient_accumulation_steps, config.train_batch_size) == (3, 5, 15)
    assert config.gradient_clipping == 0.75
    assert config.compute_dtype == torch.bfloat16
    assert config.optimizer == Section("AdamW", {"lr": 2e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.25})
    assert config.scheduler is not None
    assert (config.scheduler.params["total_num_steps"], config.scheduler.params["warmup_num_steps"]) == (100, 7)
    assert config.scheduler.params["warmup_max_lr"] == 2e-4
