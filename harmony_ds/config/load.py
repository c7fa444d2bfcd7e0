"""The ds_config: DeepSpeed's JSON in, frozen dataclasses out. The only reader of JSON and of defaults.

Keys that DeepSpeed knows keep their spelling, meaning and default; ours live under "harmony", which DeepSpeed ignores.
A key that nobody knows is an error that names the nearest one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from harmony_ds.config.harmony_block import harmony_settings
from harmony_ds.config.read import read_config
from harmony_ds.config.settings import Config, LossScale, Section
from harmony_ds.config.unknown import unknown_key
from harmony_ds.errors import ConfigError

_HONOURED = frozenset(
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping optimizer scheduler "
    "fp16 bf16 bfloat16 data_types steps_per_print harmony zero_optimization zero_allow_untested_optimizer "
    "zero_force_ds_cpu_optimizer".split()
)
_WITHOUT_MEANING = frozenset(
    "wall_clock_breakdown memory_breakdown prescale_gradients gradient_predivide_factor gradient_allreduce_op "
    "communication_data_type managed_gradient_accumulation dataloader_drop_last log_level sparse_gradients "
    "disable_allgather dump_state checkpoint timers activation_checkpointing aio comms_logger tensorboard wandb "
    "csv_monitor comet flops_profiler autotuning elasticity compile zero_gather_16bit_weights_on_model_save "
    "data_efficiency curriculum_learning hybrid_engine seed use_data_before_expert_parallelism load_universal "
    "disable_python_gc check_overflow weight_quantization seq_parallel_communication_data_type "
    "vocabulary_size expert_parallel".split()
)
_REFUSED = {
    "amp": 'Apex AMP is not supported: use "bf16" or "fp16", or torch.autocast around the call',
    "torch_autocast": "torch_autocast is not supported here: put torch.autocast around the engine's call",
    "pipeline": "pipeline parallelism is not supported",
    "tensor_parallel": "tensor parallelism is not supported",
    "compression_training": "compression training is not supported",
    "sparse_attention": "sparse attention is not supported",
}
_ZERO = frozenset(
    "stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions "
    "allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint offload_param offload_optimizer "
    "sub_group_size cpu_offload_param cpu_offload_use_pin_memory cpu_offload prefetch_bucket_size "
    "param_persistence_threshold model_persistence_threshold max_live_parameters max_reuse_distance "
    "gather_16bit_weights_on_model_save stage3_prefetch_bucket_size stage3_param_persistence_threshold "
    "stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance "
    "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save module_granularity_threshold "
    "stage3_module_granularity_threshold use_all_reduce_for_fetch_params stage3_use_all_reduce_for_fetch_params "
    "ignore_unused_parameters legacy_stage1 round_robin_gradients zero_hpz_partition_size zero_quantized_weights "
    "zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param mics_shard_size "
    "mics_hierarchical_params_gather memory_efficient_linear pipeline_loading_checkpoint override_module_apply "
    "log_trace_cache_warnings leaf_module zenflow enable_sanity_checks use_cpu_offload".split()
)
_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


def load_config(
    source: Mapping[str, Any] | str | Path, world_size: int = 1, sizes: Mapping[str, int] | None = None
) -> Config:
    """Reads a ds_config from a dict or a JSON file.

    Args:
        sizes: micro-batch and accumulation steps, by DeepSpeed's keys, in the place of those in `source`.

    Raises:
        ConfigError: a key is unknown, a value cannot be meant, or the batch sizes contradict each other.
    """
    raw = read_config(source)
    if sizes:
        raw = _resized(raw, sizes)
    _check_keys(raw)
    compute, loss_scale = _precision(raw)
    micro_batch, steps, batch = _batch_triple(raw, world_size)
    return Config(
        micro_batch=micro_batch,
        gradient_accumulation_steps=steps,
        train_batch_size=batch,
        gradient_clipping=_number(raw, "gradient_clipping", 1.0),
        optimizer=_section(raw, "optimizer"),
        scheduler=_section(raw, "scheduler"),
        compute_dtype=compute,
        accumulation_dtype=_accumulation_dtype(raw, compute),
        loss_scale=loss_scale,
        steps_per_print=_steps_per_print(raw.get("steps_per_print")),
        harmony=harmony_settings(raw.get("harmony", {})),
        raw=raw,
        without_meaning=tuple(sorted(raw.keys() & _WITHOUT_MEANING)),
    )


def _resized(raw: dict[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    changed = {**raw, **sizes}
    if {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps"} <= changed.keys():
        changed.pop("train_batch_size", None)
    return changed


def _check_keys(raw: dict[str, Any]) -> None:
    known = _HONOURED | _WITHOUT_MEANING | _REFUSED.keys()
    for key, value in raw.items():
        if key not in known:
            raise ConfigError(unknown_key(str(key), "the ds_config", known))
        enabled = value.get("enabled", True) if isinstance(value, dict) else value
        if key in _REFUSED and enabled:
            raise ConfigError(f'"{key}": {_REFUSED[key]}.')
    zero = raw.get("zero_optimization")
    if zero is None or isinstance(zero, bool):  # DeepSpeed's old way of saying stage 1
        return
    zero = _block(raw, "zero_optimization")
    for key in zero:
        if key not in _ZERO:
            raise ConfigError(unknown_key(str(key), "zero_optimization", _ZERO))
    for block in ("offload_optimizer", "offload_param"):
        offload = zero.get(block)
        if isinstance(offload, dict) and offload.get("device") == "nvme":
            raise ConfigError(
                f'zero_optimization.{block}.device is "nvme": training state lives in host memory here; use "cpu".'
            )


def _block(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f'"{key}" must be an object, not {value!r}.')
    return value


def _flag(block: Mapping[str, Any], name: str) -> bool:
    value = block.get("enabled", False)
    if not isinstance(value, bool):
        raise ConfigError(f'"{name}.enabled" must be true or false, not {value!r}.')
    return value


def _number(raw: Mapping[str, Any], key: str, default: float) -> float:
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ConfigError(f'"{key}" must be a number that is not negative, not {value!r}.')
    return float(value)


def _section(raw: Mapping[str, Any], key: str) -> Section | None:
    value = raw.get(key)
    if value is None:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise ConfigError(f'"{key}" must be an object with a "type", such as {{"type": "AdamW", "params": {{...}}}}.')
    params = _block(value, "params")
    if key == "optimizer" and "max_grad_norm" in params:
        raise ConfigError(
            "'max_grad_norm' is not supported as an optimizer parameter, please switch to using the deepspeed "
            "parameter 'gradient_clipping' see: https://www.deepspeed.ai/docs/config-json/#gradient-clipping for more "
            "details"
        )
    automatic = sorted(name for name, v in params.items() if v == "auto")
    if automatic:
        raise ConfigError(f'"{key}.params" still says "auto" for {automatic}: give numbers.')
    return Section(value["type"], dict(params))


def _precision(raw: Mapping[str, Any]) -> tuple[torch.dtype, LossScale | None]:
    name = "bf16" if "bf16" in raw else "bfloat16"
    fp16 = _block(raw, "fp16")
    bf16_on, fp16_on = _flag(_block(raw, name), name), _flag(fp16, "fp16")
    if bf16_on and fp16_on:
        raise ConfigError("bfloat16 and fp16 modes cannot be simultaneously enabled")
    if not fp16_on:
        return (torch.bfloat16 if bf16_on else torch.float32), None
    scale = fp16.get("loss_scale", 0)
    if isinstance(scale, bool):
        raise ConfigError("fp16.loss_scale must be a number, not bool")
    if not isinstance(scale, (int, float)):
        raise ConfigError(f"fp16.loss_scale must be a number, not {scale!r}")
    if not math.isfinite(scale):
        raise ConfigError("fp16.loss_scale must be a finite number (0 enables dynamic loss scaling)")
    if scale < 0:
        raise ConfigError("fp16.loss_scale must be >= 0 (0 enables dynamic loss scaling)")
    window = _number(fp16, "loss_scale_window", 1000)
    if scale == 0 and window <= 0:
        raise ConfigError("fp16.loss_scale_window must be > 0 when dynamic loss scaling is enabled")
    return torch.float16, LossScale(
        static=float(scale),
        initial_scale_power=int(_number(fp16, "initial_scale_power", 16)),
        loss_scale_window=int(window),
        hysteresis=int(_number(fp16, "hysteresis", 2)),
        consecutive_hysteresis=bool(fp16.get("consecutive_hysteresis", False)),
        min_loss_scale=_number(fp16, "min_loss_scale", 1),
    )


def _accumulation_dtype(raw: Mapping[str, Any], compute: torch.dtype) -> torch.dtype:
    name = _block(raw, "data_types").get("grad_accum_dtype")
    if name is None:
        return torch.float32
    if name not in _DTYPES:
        raise ConfigError(f'data_types.grad_accum_dtype is "{name}": it must be one of {sorted(_DTYPES)}.')
    dtype = _DTYPES[name]
    if dtype not in (torch.float32, compute):
        raise ConfigError(
            f'data_types.grad_accum_dtype is "{name}" but the model computes in {compute}: use "fp32" or that.'
        )
    return dtype


def _batch_triple(raw: Mapping[str, Any], world_size: int) -> tuple[int, int, int]:
    """Micro-batch, accumulation steps and batch, by DeepSpeed's rules: batch = micro-batch * steps * world size."""
    batch = _count(raw, "train_batch_size")
    micro = _count(raw, "train_micro_batch_size_per_gpu")
    steps = _count(raw, "gradient_accumulation_steps")
    if batch is None and micro is None:
        raise ConfigError("Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided")
    if micro is None:
        assert batch is not None
        steps = steps or 1
        micro = batch // (steps * world_size)
    if steps is None:
        steps = 1 if batch is None else batch // (micro * world_size)
    if batch is None:
        batch = micro * steps * world_size
    if batch != micro * steps * world_size:
        raise ConfigError(
            "Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step "
            f"* world_size {batch} != {micro} * {steps} * {world_size}. Correct one of the three, or leave one out."
        )
    return micro, steps, batch


def _steps_per_print(value: object) -> int | None:
    if value is None or value == math.inf:  # accelerate writes infinity for "never"
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f'"steps_per_print" must be a whole number, not {value!r}.')
    return value


def _count(raw: Mapping[str, Any], key: str) -> int | None:
    value = raw.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f'"{key}" must be a whole number, not {value!r}.')
    if value <= 0:
        raise ConfigError(f'"{key}": {value} has to be greater than 0')
    return value
