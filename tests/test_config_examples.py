"""The ds_configs of the project, and the examples of DeepSpeed's documentation, under both engines' parsers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

from harmony_ds import ConfigError
from harmony_ds.config import Config, Section, load_config
from tests.wild import ZERO3

FOLDER = Path(__file__).parent.parent / "ds_configs"
AUTO = FOLDER / "huggingface_auto.json"
SHIPPED = sorted(set(FOLDER.glob("*.json")) - {AUTO})
DOCUMENTED: dict[str, dict[str, Any]] = {
    # https://www.deepspeed.ai/getting-started/#deepspeed-configuration
    "getting started": {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
        "fp16": {"enabled": True},
        "zero_optimization": True,
    },
    # https://www.deepspeed.ai/tutorials/cifar-10/
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
    # https://www.deepspeed.ai/tutorials/bert-pretraining/
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
    # https://www.deepspeed.ai/tutorials/zero-offload/
    "ZeRO-Offload": {
        "train_batch_size": 16,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "contiguous_gradients": True,
            "overlap_comm": True,
        },
    },
    # https://www.deepspeed.ai/tutorials/zero/
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
    # https://www.deepspeed.ai/docs/config-json/
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
    # https://www.deepspeed.ai/tutorials/1Cycle/
    "1Cycle": {
        "train_batch_size": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
        "scheduler": {
            "type": "OneCycle",
            "params": {
                "cycle_first_step_size": 1000,
                "cycle_first_stair_count": 500,
                "cycle_second_step_size": 1000,
                "cycle_second_stair_count": 500,
                "decay_step_size": 1000,
                "cycle_min_lr": 0.0001,
                "cycle_max_lr": 0.0010,
                "decay_lr_rate": 0.001,
                "cycle_min_mom": 0.85,
                "cycle_max_mom": 0.99,
                "decay_mom_rate": 0.0,
            },
        },
    },
    # https://www.deepspeed.ai/tutorials/lrrt/
    "learning rate range test": {
        "train_batch_size": 65536,
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "scheduler": {
            "type": "LRRangeTest",
            "params": {
                "lr_range_test_min_lr": 0.0001,
                "lr_range_test_step_size": 200,
                "lr_range_test_step_rate": 5,
                "lr_range_test_staircase": False,
            },
        },
    },
    # https://www.deepspeed.ai/tutorials/megatron/
    "Megatron": {
        "train_batch_size": 64,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 1,
        "zero_optimization": True,
        "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
        "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    },
    # https://www.deepspeed.ai/tutorials/monitor/
    "monitor": {
        "train_batch_size": 8,
        "tensorboard": {"enabled": True, "output_path": "output/ds_logs/", "job_name": "train_bert"},
        "wandb": {"enabled": True, "team": "my_team", "group": "my_group", "project": "my_project"},
        "comet": {"enabled": True, "project": "my_project", "experiment_name": "my_experiment"},
        "csv_monitor": {"enabled": True, "output_path": "output/ds_logs/", "job_name": "train_bert"},
    },
    # https://www.deepspeed.ai/docs/config-json/#optimizer-parameters and the sections after it
    "the reference, from the top": {
        "train_batch_size": 32,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": True, "buffer_count": 5, "buffer_size": 1e8},
            "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.3, "buffer_count": 4},
            "stage3_gather_16bit_weights_on_model_save": True,
            "round_robin_gradients": False,
            "ignore_unused_parameters": True,
        },
    },
    # https://huggingface.co/docs/transformers/deepspeed, as Trainer fills the "auto" in
    "Trainer's ZeRO-3": {
        "fp16": {"enabled": False, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
        "bf16": {"enabled": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 5e-5, "warmup_num_steps": 0, "total_num_steps": 100},
        },
        "zero_optimization": ZERO3,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": 2000,
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 8,
        "wall_clock_breakdown": False,
    },
}


REMOVED = {"the blocks of the reference"}
"""Examples with blocks, switched off, that DeepSpeed 0.19.8 does not take any more."""


def assert_same_settings(ours: Config, theirs: Any) -> None:
    assert ours.train_batch_size == theirs.train_batch_size
    assert ours.micro_batch == theirs.train_micro_batch_size_per_gpu
    assert ours.gradient_accumulation_steps == theirs.gradient_accumulation_steps
    assert ours.gradient_clipping == theirs.gradient_clipping
    assert ours.values["zero_optimization.stage"] == theirs.zero_optimization_stage
    assert ours.values["fp16.enabled"] == theirs.float16_config.enabled
    assert (ours.optimizer and ours.optimizer.params) == theirs.optimizer_params
    assert (ours.scheduler and ours.scheduler.type) == theirs.scheduler_name


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_examples_of_deepspeed_load(name: str) -> None:
    config = load_config(DOCUMENTED[name])

    if name in REMOVED:
        with pytest.raises(DeepSpeedConfigError, match="has been removed"):
            DeepSpeedConfig(dict(DOCUMENTED[name]))
    else:
        assert_same_settings(config, DeepSpeedConfig(dict(DOCUMENTED[name])))


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

    with pytest.raises(ConfigError, match='still says "auto"'):
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


def test_there_is_a_config_for_each_use() -> None:
    configs = [load_config(path) for path in SHIPPED]

    assert len(configs) >= 16
    assert {config.compute_dtype for config in configs} == {torch.float32, torch.bfloat16, torch.float16}
    assert {config.scheduler.type for config in configs if config.scheduler} >= {
        "WarmupDecayLR",
        "WarmupCosineLR",
        "OneCycle",
        "LRRangeTest",
    }
    assert {config.deferred_update for config in configs} == {True, False}
    assert {config.skip_overflow for config in configs} == {True, False}
    assert {config.optimizer.type for config in configs if config.optimizer} >= {"AdamW", "Adagrad", "Lion", "SGD"}
