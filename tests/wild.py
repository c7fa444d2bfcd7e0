"""ds_configs as they are found in other projects' documentation and repositories, and what becomes of each."""

from __future__ import annotations

from typing import Any

_AUTO_FP16 = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
_AUTO_OPTIMIZER = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
_AUTO_BATCH = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
ZERO3 = {
    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
    "offload_param": {"device": "cpu", "pin_memory": True},
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
_FP16 = {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1}
_OFF = {"enabled": False}

LOADED: dict[str, dict[str, Any]] = {
    # transformers' documentation, ZeRO-3, as Trainer has filled it in
    "transformers zero3": {
        "fp16": {**_AUTO_FP16, "enabled": False},
        "bf16": {"enabled": True},
        "amp": {"enabled": "auto", "opt_level": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"last_batch_iteration": -1, "total_num_steps": 100, "warmup_min_lr": 0, "warmup_max_lr": 3e-5},
        },
        "zero_optimization": {**ZERO3, "reduce_bucket_size": 4194304},
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 8,
        "steps_per_print": float("inf"),
        "wall_clock_breakdown": False,
    },
    # DeepSpeedExamples, applications/DeepSpeed-Chat/dschat/utils/ds_utils.py
    "DeepSpeed-Chat": {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu"},
            "stage3_param_persistence_threshold": 1e4,
            "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7,
            "memory_efficient_linear": False,
        },
        "fp16": {"enabled": True, "loss_scale_window": 100},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "hybrid_engine": {
            "enabled": False,
            "max_out_tokens": 512,
            "inference_tp_size": 1,
            "release_inference_cache": False,
            "pin_parameters": True,
            "tp_gather_partition_size": 8,
        },
        "tensorboard": {"enabled": False, "output_path": "out/ds_tensorboard_logs/", "job_name": "step1_tensorboard"},
    },
    # Megatron-DeepSpeed, examples_deepspeed/rebase/ds_config_gpt_TEMPLATE.json, and its neighbours
    "Megatron-DeepSpeed": {
        "train_batch_size": 256,
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10,
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "fp16": {**_FP16, "initial_scale_power": 11},
        "curriculum_learning": {
            "enabled": False,
            "curriculum_type": "seqlen",
            "min_difficulty": 64,
            "schedule_type": "fixed_linear",
        },
        "data_efficiency": {"enabled": False, "seed": 1234, "data_routing": _OFF, "data_sampling": _OFF},
        "compression_training": _OFF,
        "autotuning": _OFF,
        "comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False},
        "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": True},
        "wall_clock_breakdown": True,
    },
    # DeepSpeed's documentation, activation checkpointing and asynchronous I/O
    "activation checkpointing": {
        "train_micro_batch_size_per_gpu": 1,
        "activation_checkpointing": {
            "partition_activations": True,
            "cpu_checkpointing": True,
            "contiguous_memory_optimization": False,
            "number_checkpoints": None,
            "synchronize_checkpoint_boundary": False,
            "profile": False,
        },
        "aio": {
            "block_size": 262144,
            "queue_depth": 32,
            "thread_count": 1,
            "single_submit": False,
            "overlap_events": True,
        },
        "zero_force_ds_cpu_optimizer": False,
        "elasticity": _OFF,
        "sparse_gradients": False,
    },
    # axolotl, deepspeed_configs/zero3_bf16_cpuoffload_all.json, filled in
    "axolotl": {
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {**ZERO3, "sub_group_size": 0, "max_live_parameters": 0, "max_reuse_distance": 0},
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "auto_cast": False, "loss_scale": 0, "initial_scale_power": 32},
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 2,
        "wall_clock_breakdown": False,
    },
    # DeepSpeed's documentation, torch_autocast
    "torch_autocast": {
        "train_micro_batch_size_per_gpu": 1,
        "torch_autocast": {
            "enabled": True,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": ["torch.nn.Linear", "torch.nn.Conv2d"],
        },
        "zero_optimization": {"stage": 3},
    },
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    # transformers' documentation, as it stands in the file
    "transformers zero2 with auto": (
        {
            "fp16": _AUTO_FP16,
            "optimizer": _AUTO_OPTIMIZER,
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
            },
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
            **_AUTO_BATCH,
        },
        '"optimizer.params" still says "auto" .*Trainer',
    ),
    # LLaMA-Factory, examples/deepspeed/ds_z3_offload_config.json
    "LLaMA-Factory": (
        {
            **_AUTO_BATCH,
            "zero_allow_untested_optimizer": True,
            "fp16": _AUTO_FP16,
            "bf16": {"enabled": "auto"},
            "zero_optimization": ZERO3,
        },
        'still says "auto": Hugging Face\'s Trainer',
    ),
    # trl, examples/accelerate_configs/deepspeed_zero3.yaml, given as the ds_config
    "accelerate yaml": (
        {
            "compute_environment": "LOCAL_MACHINE",
            "debug": False,
            "deepspeed_config": {
                "deepspeed_multinode_launcher": "standard",
                "offload_optimizer_device": "none",
                "offload_param_device": "none",
                "zero3_init_flag": True,
                "zero3_save_16bit_model": True,
                "zero_stage": 3,
            },
            "distributed_type": "DEEPSPEED",
            "mixed_precision": "bf16",
            "num_machines": 1,
            "num_processes": 8,
        },
        "accelerate's file, not a ds_config: .*accelerate launch --config_file",
    ),
    "ZeRO-Infinity": (
        {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 5},
            },
        },
        'offload_param.device" is "nvme": .* use "cpu"',
    ),
    "curriculum": (
        {"train_micro_batch_size_per_gpu": 1, "curriculum_learning": {"enabled": True, "curriculum_type": "seqlen"}},
        '"curriculum_learning": order the data yourself, and leave it out',
    ),
    "autotuning": (
        {"train_micro_batch_size_per_gpu": 1, "autotuning": {"enabled": True, "fast": False}},
        '"autotuning": use harmony-ds plan',
    ),
    "axolotl deepcompile": (
        {"train_micro_batch_size_per_gpu": 1, "compile": {"deepcompile": True}},
        '"compile": DeepCompile is not there',
    ),
    # what older documentation calls it
    "monitor": (
        {"train_micro_batch_size_per_gpu": 1, "monitor_config": {"tensorboard": {"enabled": True}}},
        'unknown key "monitor_config" in the ds_config. Did you mean "tensorboard"',
    ),
}
