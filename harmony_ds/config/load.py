"""Reading of a ds_config: `load_config` turns DeepSpeed's JSON into a frozen `Config`, with every default filled in.

Keys that DeepSpeed knows keep their spelling, meaning and default; ours are in the block "harmony", which DeepSpeed skips.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from harmony_ds.config.check import MICRO_BATCH, STEPS, Checked, check
from harmony_ds.config.harmony import HarmonySettings
from harmony_ds.config.hints import refuse_text_numbers
from harmony_ds.config.read import read_config, with_values
from harmony_ds.config.settings import Config, Section
from harmony_ds.errors import ConfigError

_AS_GRAD_SCALER = {"loss_scale_window": 2000, "hysteresis": 1, "min_loss_scale": sys.float_info.min}
"""The rules of torch.amp.GradScaler, which DeepSpeed takes under autocast to float16."""
_16_BIT = (torch.bfloat16, torch.float16)


def load_config(
    source: Mapping[str, Any] | str | Path, world_size: int = 1, instead: Mapping[str, object] | None = None
) -> Config:
    """Read a ds_config from a dict, a JSON file or base64.

    Args:
        world_size: of the processes that train together, among which a batch is divided.
        instead: values that replace those of `source`, by the paths of their keys.

    Raises:
        ConfigError: a key is unknown, a value cannot be meant, or the batch sizes contradict each other.
    """
    raw = with_values(read_config(source), instead or {})
    if instead and {MICRO_BATCH, STEPS} <= raw.keys():
        raw.pop("train_batch_size", None)
    return _make_config(raw, check(raw), world_size)


def trained_dtypes(model: nn.Module) -> set[torch.dtype]:
    """Return the dtypes of the parameters that are trained; of all, if none is."""
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return {parameter.dtype for parameter in trained or parameters}


def dtype_of_checkpoint(parameter_dtypes: Collection[torch.dtype]) -> torch.dtype | None:
    """Return the one 16-bit dtype among those of a model's parameters; None: there is none, or there are two."""
    found = [dtype for dtype in _16_BIT if dtype in parameter_dtypes]
    return found[0] if len(found) == 1 else None


def for_loaded_model(config: Config, parameter_dtypes: Collection[torch.dtype]) -> Config:
    """Return the config for a model whose trained parameters have these dtypes.

    A model that was loaded in 16 bits, without a "bf16" or "fp16" block, is trained as DeepSpeed 0.19.8 trains it:

        bf16, ZeRO stage 0      weights, gradients and optimizer state in bf16, without masters: plain PyTorch
        bf16, ZeRO stage 1 to 3 fp32 masters, gradients and optimizer state; no step is skipped
        fp16                    as with the block "fp16" (DeepSpeed does so from stage 1 on; plain PyTorch gives NaN)

    A model of bf16 and fp32 parameters, which DeepSpeed can train in stage 0 alone, has fp32 masters in each.
    """
    loaded = dtype_of_checkpoint(parameter_dtypes)
    if loaded is None or config.compute_dtype != torch.float32 or config.autocast_dtype not in (None, loaded):
        return config
    if loaded == torch.float16 and config.autocast_dtype is not None:
        return config
    is_pure = set(parameter_dtypes) == {torch.bfloat16} and not config.values["zero_optimization.stage"]
    has_masters = not is_pure or config.disk_folder is not None
    master = torch.float32 if has_masters else torch.bfloat16
    config = replace(
        config,
        compute_dtype=loaded,
        accumulation_dtype=_accumulation_dtype(config.values["data_types.grad_accum_dtype"], master),
        master_dtype=master,
        state_dtype=master,
    )
    if loaded == torch.float16:
        config = replace(config, loss_scale=check(config.raw).model.fp16, skip_overflow=True)
    return config


def _make_config(raw: dict[str, Any], checked: Checked, world_size: int) -> Config:
    """Return the ds_config `raw`, of which `checked` are the values, unless two of them contradict each other."""
    model = checked.model
    if model.gradient_allreduce_op == "sum" and model.zero_optimization.stage == 3:
        raise ConfigError("gradient_allreduce_op='sum' is not supported with ZeRO stage 3")
    compute_dtype = _compute_dtype(model)
    master_dtype, state_dtype = _optimizer_dtypes(model)
    autocast_dtype = _autocast_dtype(model.torch_autocast, compute_dtype)
    loss_scale = None
    if autocast_dtype == torch.float16:
        loss_scale = type(model.fp16).model_construct(**_AS_GRAD_SCALER)
    elif model.fp16.enabled:
        loss_scale = model.fp16
    micro_batch, accumulation_steps, batch = _batch_triple(model, world_size)
    harmony = _harmony_settings(raw, checked)
    _check_split_masters(harmony, compute_dtype, master_dtype)
    return Config(
        micro_batch=micro_batch,
        gradient_accumulation_steps=accumulation_steps,
        train_batch_size=batch,
        gradient_clipping=model.gradient_clipping,
        optimizer=_section("optimizer", model.optimizer),
        scheduler=_section("scheduler", model.scheduler),
        compute_dtype=compute_dtype,
        casts_frozen=compute_dtype != torch.float32,
        accumulation_dtype=_accumulation_dtype(model.data_types.grad_accum_dtype, master_dtype),
        master_dtype=master_dtype,
        state_dtype=state_dtype,
        buffer_dtype=None if model.data_types.buffer_dtype is None else _dtype(model.data_types.buffer_dtype),
        disk_folder=_optimizer_folder(model.zero_optimization.offload_optimizer, harmony, master_dtype),
        weights_folder=_weights_folder(model.zero_optimization.offload_param, harmony),
        autocast_dtype=autocast_dtype,
        loss_scale=loss_scale,
        skip_overflow=loss_scale is not None or _skips_overflow_in_bf16(model),
        steps_per_print=model.steps_per_print,
        harmony=harmony,
        raw=raw,
        known=checked.known,
        values=checked.values,
        without_meaning=checked.without_meaning,
    )


def _check_split_masters(harmony: HarmonySettings, compute: torch.dtype, master: torch.dtype) -> None:
    """Raise ConfigError for split masters of other weights than bf16 ones."""
    if harmony.split_masters and (compute, master) != (torch.bfloat16, torch.float32):
        raise ConfigError(
            f"harmony.split_masters is for fp32 masters of bf16 weights, and here weights are {compute} and masters "
            f"{master}: leave it out."
        )


def _harmony_settings(raw: Mapping[str, Any], checked: Checked) -> HarmonySettings:
    """Return our own keys; two of them follow DeepSpeed's where they are not given."""
    settings: HarmonySettings = checked.model.harmony
    given = raw.get("harmony") or {}
    zero = checked.model.zero_optimization
    if "pin_memory" not in given:
        blocks = (zero.offload_optimizer, zero.offload_param)
        settings = replace(settings, pin_memory=all(block.pin_memory for block in blocks if block is not None))
    if "micro_batch" not in given and raw.get(MICRO_BATCH) == "auto":
        # A micro-batch that is left to the engine is a whole batch, taken through layers as the search finds best.
        settings = replace(settings, micro_batch="auto")
    if settings.plan is not None and settings.pack_layers is not None:
        raise ConfigError("harmony.plan and harmony.pack_layers are two ways to say which packs to run: leave one out.")
    if settings.plan is not None and settings.micro_batch != "config":
        raise ConfigError("harmony.plan says how layer calls are cut: leave harmony.micro_batch out.")
    return settings


def _section(key: str, block: Any) -> Section | None:
    """Return the optimizer or scheduler block `key`, if there is one, unless a value in its params cannot be meant."""
    if block is None:
        return None
    params = block.params or {}
    if key == "optimizer" and "max_grad_norm" in params:
        raise ConfigError(
            "'max_grad_norm' is not supported as an optimizer parameter, please switch to using the deepspeed "
            "parameter 'gradient_clipping' see: https://www.deepspeed.ai/docs/config-json/#gradient-clipping for more "
            "details"
        )
    refuse_text_numbers(f"{key}.params", params)
    return Section(block.type, dict(params))


def _skips_overflow_in_bf16(model: Any) -> bool:
    """Return whether optimizer steps whose gradients hold inf or NaN are skipped in bf16.

    Skipping makes every update wait for all gradients. Clipping does so anyway; without it, the key has to be given.
    """
    is_wanted = model.gradient_clipping > 0 or "check_grad_overflow" in model.bf16.model_fields_set
    return bool(is_wanted and model.bf16.enabled and model.bf16.check_grad_overflow)


def _dtype(name: str) -> torch.dtype:
    """Return the dtype by DeepSpeed's name."""
    from deepspeed.runtime.config import DtypeEnum

    dtype: torch.dtype = DtypeEnum(name).value
    return dtype


def _compute_dtype(model: Any) -> torch.dtype:
    """Return the dtype that layers compute in; ConfigError: keys name two."""
    if model.bf16.enabled and model.fp16.enabled:
        raise ConfigError("bfloat16 and fp16 modes cannot be simultaneously enabled")
    if model.bf16.enabled:
        compute = torch.bfloat16
    elif model.fp16.enabled:
        compute = torch.float16
    else:
        compute = torch.float32
    asked = model.data_types.param_dtype
    if asked is not None and _dtype(asked) != compute:
        raise ConfigError(
            f"data_types.param_dtype='{asked}' conflicts with the enabled precision mode (model dtype {compute}). Set "
            "the matching fp16/bf16 'enabled' flag or omit data_types.param_dtype."
        )
    return compute


def _autocast_dtype(block: Any, compute: torch.dtype) -> torch.dtype | None:
    """Return the dtype of the block "torch_autocast"; None: it is not enabled."""
    if not block.enabled:
        return None
    dtype = None if block.dtype is None else _dtype(block.dtype)
    if dtype in (None, torch.float32):
        raise ConfigError(
            f'"torch_autocast.dtype" is {json.dumps(block.dtype)}: write "bfloat16", or "float16" (which scales losses).'
        )
    if compute not in (torch.float32, dtype) or compute == torch.float16:
        raise ConfigError(
            f'"torch_autocast" to {block.dtype} is for fp32 weights, and these are {compute}: leave it, or "bf16" and '
            '"fp16", out.'
        )
    return dtype


def _optimizer_dtypes(model: Any) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of masters and of the optimizer's state, by DeepSpeed's rules."""
    masters, states = model.bf16.bf16_master_weights_and_grads, model.bf16.bf16_optimizer_states
    if states and not masters:
        raise ConfigError("bf16_optimizer_states requires bf16_master_weights_and_grads to be enabled.")
    if masters and not (model.bf16.enabled and model.zero_optimization.stage):
        raise ConfigError(
            'bf16.bf16_master_weights_and_grads needs "bf16": {"enabled": true} and "zero_optimization": '
            '{"stage": 1, 2 or 3}, as in DeepSpeed.'
        )
    return torch.bfloat16 if masters else torch.float32, torch.bfloat16 if states else torch.float32


def _optimizer_folder(block: Any, harmony: HarmonySettings, master: torch.dtype) -> str | None:
    """Return the folder for masters and optimizer state, by the block "offload_optimizer"; None: they stay in memory."""
    key = "zero_optimization.offload_optimizer"
    folder = _nvme_folder(block, key)
    if folder is not None and (master != torch.float32 or harmony.split_masters):
        raise ConfigError(
            f'{key}.device "nvme" is for whole weights and fp32 masters: leave harmony.split_masters and '
            "bf16.bf16_master_weights_and_grads out."
        )
    return folder


def _weights_folder(block: Any, harmony: HarmonySettings) -> str | None:
    """Return the folder for weights, by the block "offload_param"; None: they stay in memory."""
    key = "zero_optimization.offload_param"
    folder = _nvme_folder(block, key)
    if folder is not None and harmony.split_masters:
        raise ConfigError(
            f'{key}.device "nvme" is for whole weights and fp32 masters: leave harmony.split_masters out.'
        )
    return folder


def _nvme_folder(block: Any, key: str) -> str | None:
    """Return the folder that the offload block `key` names, if its device is "nvme"."""
    if block is None or block.device != "nvme":
        return None
    if block.nvme_path is None:
        raise ConfigError(f'{key}.device is "nvme": name a folder on the disk in {key}.nvme_path.')
    return str(block.nvme_path)


def _accumulation_dtype(name: str | None, master: torch.dtype) -> torch.dtype:
    """Return the dtype that gradients are added up in: the one that is named, or else the masters'."""
    if name is None:
        return master
    dtype = _dtype(name)
    if master != torch.float32 and dtype not in (torch.float32, master):
        raise ConfigError(
            f'data_types.grad_accum_dtype is "{name}" but masters are {master}: leave it out, or use "fp32".'
        )
    return dtype


def _batch_triple(model: Any, world_size: int) -> tuple[int, int, int]:
    """Return micro-batch, accumulation steps and batch, by DeepSpeed's rules: batch = micro-batch * steps * world size."""
    from deepspeed.runtime.config import DeepSpeedConfig

    sizes = SimpleNamespace(**{key: getattr(model, key) for key in ("train_batch_size", MICRO_BATCH, STEPS)})
    for key, number in vars(sizes).items():
        if isinstance(number, int) and number <= 0:
            raise ConfigError(f'"{key}" is {number}, and has to be greater than 0.')
    sizes.world_size = world_size
    if model.train_micro_batch_size_per_gpu == "auto":
        sizes.train_micro_batch_size_per_gpu = None
        if model.train_batch_size is None:
            raise ConfigError(
                f'"{MICRO_BATCH}" is "auto", which leaves it to the engine: give "train_batch_size", the rows of a step.'
            )
    try:
        DeepSpeedConfig._set_batch_related_parameters(sizes)
        DeepSpeedConfig._batch_assertion(sizes)
    except (AssertionError, ZeroDivisionError) as error:
        del sizes.world_size
        given = [f"{name} {number}" for name, number in vars(sizes).items() if number is not None]
        remedy = f"Correct one of these, or leave one out: {', '.join(given)}" if given else "Give one of them"
        raise ConfigError(f"{error}. {remedy} (world_size {world_size}).") from None
    return sizes.train_micro_batch_size_per_gpu, sizes.gradient_accumulation_steps, sizes.train_batch_size
