"""What is tried of `TrainingArguments`: every option that a training on one CPU can tell from its default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from benchmarks.trainer.compare import Case
from benchmarks.trainer.tiny import llama, padded, token_rows

_EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
_SAVED = {**_EVALUATED, "save_strategy": "steps", "save_steps": 2}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "steps and batches": [
        {"per_device_train_batch_size": 3},
        {"gradient_accumulation_steps": 1},
        {"gradient_accumulation_steps": 3},
        {"num_train_epochs": 1.5},
        {"max_steps": 5},
        {"average_tokens_across_devices": False},
        {"auto_find_batch_size": True},
        {"seed": 7},
        {"data_seed": 7},
        {"full_determinism": True},
    ],
    "optimizer": [
        {"learning_rate": 1e-3},
        {"weight_decay": 0.1},
        {"adam_beta1": 0.8},
        {"adam_beta2": 0.95},
        {"adam_epsilon": 1e-6},
        {"max_grad_norm": 0.0},
        {"max_grad_norm": 1e9},
        {"label_smoothing_factor": 0.1},
        *({"optim": name} for name in ("adamw_torch", "adafactor", "sgd", "adagrad", "rmsprop", "adamw_bnb_8bit")),
        {"optim_args": "scale_parameter=False,relative_step=False", "optim": "adafactor"},
        {"optim_args": "amsgrad=True"},
        {"neftune_noise_alpha": 5.0},
    ],
    "schedule": [
        {"warmup_steps": 3},
        {"warmup_steps": 0.5},
        *({"lr_scheduler_type": name} for name in (
            "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
        )),
        {"lr_scheduler_type": "reduce_lr_on_plateau", **_EVALUATED},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-3}},
        {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 2}, "warmup_steps": 2},
        {"lr_scheduler_kwargs": {"last_epoch": -1}},
    ],
    "precision and memory": [
        {"bf16": True},
        {"bf16_full_eval": True, **_EVALUATED},
        {"fp16_full_eval": True, **_EVALUATED},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing_kwargs": {"use_reentrant": False}, "gradient_checkpointing": True},
        {"activation_checkpointing": True},
        {"activation_checkpointing_kwargs": {"use_reentrant": False}, "activation_checkpointing": True},
        {"torch_compile_backend": "eager"},
        {"use_cache": True},
        {"torch_empty_cache_steps": 1},
        {"skip_memory_metrics": False},
    ],
    "logs": [
        {"logging_strategy": "epoch"},
        {"logging_steps": 2},
        {"logging_first_step": True, "logging_steps": 3},
        {"logging_nan_inf_filter": False},
        {"include_num_input_tokens_seen": "all"},
        {"include_num_input_tokens_seen": "non_padding"},
        {"log_level": "error"},
        {"log_level_replica": "error"},
        {"log_on_each_node": False},
        {"disable_tqdm": True},
        {"run_name": "a run"},
        {"debug": "underflow_overflow"},
    ],
    "evaluation": [
        _EVALUATED,
        {"eval_strategy": "epoch"},
        {"eval_delay": 3, **_EVALUATED},
        {"eval_on_start": True, **_EVALUATED},
        {"per_device_eval_batch_size": 3, **_EVALUATED},
        {"prediction_loss_only": True, **_EVALUATED},
        {"eval_accumulation_steps": 1, **_EVALUATED},
        {"eval_do_concat_batches": False, **_EVALUATED},
        {"eval_use_gather_object": True, **_EVALUATED},
        {"include_for_metrics": ["inputs", "loss"], **_EVALUATED},
        {"batch_eval_metrics": True, **_EVALUATED},
        {"label_names": ["labels"], **_EVALUATED},
        {"do_train": True},
        {"do_eval": True, **_EVALUATED},
        {"do_predict": True},
    ],
    "saving": [
        {"save_strategy": "epoch"},
        {"save_steps": 2, "save_strategy": "steps"},
        {"save_only_model": True, **_SAVED},
        {"save_total_limit": 1, **_SAVED},
        {"save_on_each_node": True, **_SAVED},
        {"load_best_model_at_end": True, **_SAVED},
        {"metric_for_best_model": "loss", "load_best_model_at_end": True, **_SAVED},
        {"greater_is_better": True, "metric_for_best_model": "accuracy", "load_best_model_at_end": True, **_SAVED},
        {"enable_jit_checkpoint": True},
        {"restore_callback_states_from_checkpoint": True},
        {"ignore_data_skip": True},
    ],
    "data": [
        {"dataloader_drop_last": True},
        {"dataloader_num_workers": 1},
        {"dataloader_persistent_workers": True, "dataloader_num_workers": 1},
        {"dataloader_prefetch_factor": 4, "dataloader_num_workers": 1},
        {"dataloader_multiprocessing_context": "fork", "dataloader_num_workers": 1},
        {"dataloader_in_order": False, "dataloader_num_workers": 1},
        {"dataloader_pin_memory": False},
        {"remove_unused_columns": False},
        {"train_sampling_strategy": "sequential"},
        {"train_sampling_strategy": "group_by_length"},
        {"length_column_name": "length", "train_sampling_strategy": "group_by_length"},
        {"accelerator_config": {"split_batches": True}},
        {"accelerator_config": {"dispatch_batches": True}},
        {"accelerator_config": {"even_batches": False}},
        {"accelerator_config": {"use_seedable_sampler": False}},
        {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
    ],
    "processes": [
        {"ddp_find_unused_parameters": True},
        {"ddp_bucket_cap_mb": 1},
        {"ddp_broadcast_buffers": False},
        {"ddp_static_graph": True},
        {"ddp_timeout": 60},
    ],
}  # fmt: skip
UNTRIED = {
    "a service on the network": "hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token project "
    "push_to_hub report_to trackio_bucket_id trackio_space_id trackio_static_space_id",
    "a GPU": "fp16 tf32 torch_compile torch_compile_mode",
    "a library that is not installed": "use_liger_kernel liger_kernel_config optim_target_modules",
    "another engine, or another parallelism": "deepspeed fsdp fsdp_config parallelism_config local_rank",
    "a command line of its own": "resume_from_checkpoint",
    "several processes": "ddp_backend",
    "every case sets it": "output_dir use_cpu",
}
"""Options that no case tries, by what they need."""


def cases() -> Iterator[Case]:
    """Yield a case for each setting, in the order of the table."""
    for kind, settings in OPTIONS.items():
        for one in settings:
            option, value = next(iter(one.items()))
            yield Case(kind, f"{option}={value}", Trainer, TrainingArguments, one, model_and_data)


def tried() -> set[str]:
    """Return the options that a case sets."""
    return {option for settings in OPTIONS.values() for one in settings for option in one}


def every_option() -> set[str]:
    """Return the options of this version's TrainingArguments."""
    return {field.name for field in fields(TrainingArguments)}


def model_and_data() -> dict[str, Any]:
    """Return a new model, and data to train and evaluate with."""
    rows = token_rows()
    return {
        "model": llama(),
        "train_dataset": rows,
        "eval_dataset": rows[:10],
        "data_collator": padded,
        "compute_metrics": Accuracy(),
    }


class Accuracy:
    """The share of tokens that are predicted, of all batches or (`batch_eval_metrics`) batch by batch."""

    def __init__(self) -> None:
        self.hits: list[torch.Tensor] = []

    def __call__(self, evaluated: Any, compute_result: bool = True) -> dict[str, float]:
        logits, labels = evaluated.predictions, evaluated.label_ids
        pairs = zip(logits, labels, strict=True) if isinstance(logits, list) else [(logits, labels)]
        for some, theirs in pairs:
            real = torch.as_tensor(theirs)[:, 1:]
            said = torch.as_tensor(some)[:, :-1].argmax(-1)
            self.hits.append((said == real)[real != -100])
        if not compute_result:
            return {}
        found = torch.cat(self.hits).float().mean().item()
        self.hits.clear()
        return {"accuracy": found}
