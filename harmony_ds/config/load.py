"""The ds_config: DeepSpeed's JSON in, frozen dataclasses out. The only reader of JSON and of defaults.

Keys that DeepSpeed knows keep their spelling, meaning and default; ours live under "harmony", which DeepSpeed ignores.
A key that nobody knows is an error that names the nearest one.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from harmony_ds.config.check import Values, read_values
from harmony_ds.config.forms import DTYPES
from harmony_ds.config.harmony import HarmonySettings
from harmony_ds.config.hints import AUTO, refuse_text_numbers
from harmony_ds.config.paths import with_values
from harmony_ds.config.read import read_config
from harmony_ds.config.settings import Config, LossScale, Section
from harmony_ds.errors import ConfigError

_AS_GRAD_SCALER = LossScale(loss_scale_window=2000, hysteresis=1, min_loss_scale=sys.float_info.min)
"""The rules of torch.amp.GradScaler, which DeepSpeed takes under autocast to float16."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_config(
    source: Mapping[str, Any] | str | Path, world_size: int = 1, instead: Mapping[str, object] | None = None
) -> Config:
    """Reads a ds_config from a dict or a JSON file.

    Args:
        instead: values in the place of those in `source`, by the paths of their keys.

    Raises:
        ConfigError: a key is unknown, a value cannot be meant, or the batch sizes contradict each other.
    """
    raw = _with_values_instead(read_config(source), instead or {})
    optimizer, scheduler = _section(raw, "optimizer"), _section(raw, "scheduler")
    values, without_meaning = read_values(raw)
    compute, loss_scale = _precision(raw, values)
    master, state = _optimizer_dtypes(raw, values)
    autocast = _autocast_dtype(values, compute)
    if autocast == torch.float16:
        loss_scale = _AS_GRAD_SCALER
    micro_batch, steps, batch = _batch_triple(values, world_size)
    clipping = _clipping(raw, values)
    return Config(
        micro_batch=micro_batch,
        gradient_accumulation_steps=steps,
        train_batch_size=batch,
        gradient_clipping=clipping,
        optimizer=optimizer,
        scheduler=scheduler,
        compute_dtype=compute,
        accumulation_dtype=_accumulation_dtype(values, compute, master),
        master_dtype=master,
        state_dtype=state,
        autocast_dtype=autocast,
        loss_scale=loss_scale,
        skip_overflow=loss_scale is not None or _checks_bf16(raw, values, clipping),
        steps_per_print=values["steps_per_print"],
        harmony=_harmony(raw, values),
        raw=raw,
        values=values,
        without_meaning=without_meaning,
    )


def _with_values_instead(raw: dict[str, Any], instead: Mapping[str, object]) -> dict[str, Any]:
    changed = with_values(raw, instead)
    if instead and {_MICRO_BATCH, _STEPS} <= changed.keys():
        changed.pop("train_batch_size", None)
    return changed


def _harmony(raw: Mapping[str, Any], values: Values) -> HarmonySettings:
    """Our own keys; two of them follow DeepSpeed's where they are not given."""
    given = _block(raw, "harmony")
    if "pin_memory" not in given:
        blocks = ("offload_optimizer", "offload_param")
        values["harmony.pin_memory"] = all(values[f"zero_optimization.{block}.pin_memory"] for block in blocks)
    if "micro_batch" not in given and raw.get(_MICRO_BATCH) == "auto":
        # A micro-batch that is left to the engine is a whole batch, taken through layers as the search finds best.
        values["harmony.micro_batch"] = "auto"
    settings = HarmonySettings(**{one.name: values[f"harmony.{one.name}"] for one in fields(HarmonySettings)})
    if settings.plan is not None and settings.pack_layers is not None:
        raise ConfigError("harmony.plan and harmony.pack_layers are two ways to say which packs to run: leave one out.")
    if settings.plan is not None and settings.micro_batch != "config":
        raise ConfigError("harmony.plan says how layer calls are cut: leave harmony.micro_batch out.")
    return settings


def _block(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f'"{key}" must be an object, not {value!r}.')
    return value


def _clipping(raw: Mapping[str, Any], values: Values) -> float:
    norm: float = values["gradient_clipping"]
    if isinstance(raw.get("gradient_clipping"), bool) or not math.isfinite(norm) or norm < 0:
        given = raw["gradient_clipping"]
        raise ConfigError(f'"gradient_clipping" must be a number that is not negative, not {given!r}.')
    return norm


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
        raise ConfigError(f'"{key}.params" still says "auto" for {automatic}: {AUTO}')
    refuse_text_numbers(f"{key}.params", params)
    return Section(value["type"], dict(params))


def _bf16_name(raw: Mapping[str, Any]) -> str:
    return "bf16" if raw.get("bf16") is not None else "bfloat16"


def _checks_bf16(raw: Mapping[str, Any], values: Values, clipping: float) -> bool:
    """Whether steps with inf or NaN are skipped in bf16."""
    name = _bf16_name(raw)
    # Without clipping nothing else makes updates wait for all gradients, so that has to be asked for.
    wanted = clipping > 0 or "check_grad_overflow" in _block(raw, name)
    return bool(wanted and values[f"{name}.enabled"] and values[f"{name}.check_grad_overflow"])


def _precision(raw: Mapping[str, Any], values: Values) -> tuple[torch.dtype, LossScale | None]:
    bf16_on, fp16_on = values[f"{_bf16_name(raw)}.enabled"], values["fp16.enabled"]
    if bf16_on and fp16_on:
        raise ConfigError("bfloat16 and fp16 modes cannot be simultaneously enabled")
    compute = torch.bfloat16 if bf16_on else torch.float16 if fp16_on else torch.float32
    asked = values["data_types.param_dtype"]
    if asked is not None and _DTYPES[DTYPES[asked]] != compute:
        raise ConfigError(
            f"data_types.param_dtype='{asked}' conflicts with the enabled precision mode (model dtype {compute}). Set "
            "the matching fp16/bf16 'enabled' flag or omit data_types.param_dtype."
        )
    if not fp16_on:
        return compute, None
    scale = values["fp16.loss_scale"]
    for key in ("loss_scale_window", "min_loss_scale"):
        if scale == 0 and values[f"fp16.{key}"] <= 0:
            raise ConfigError(f"fp16.{key} must be > 0 when dynamic loss scaling is enabled (loss_scale=0)")
    rules = {one.name: values[f"fp16.{one.name}"] for one in fields(LossScale) if one.name != "static"}
    return compute, LossScale(scale, **rules)


def _autocast_dtype(values: Values, compute: torch.dtype) -> torch.dtype | None:
    if not values["torch_autocast.enabled"]:
        return None
    name = values["torch_autocast.dtype"]
    dtype = None if name is None else _DTYPES[DTYPES[name]]
    if dtype in (None, torch.float32):
        raise ConfigError(
            f'"torch_autocast.dtype" is {json.dumps(name)}: write "bfloat16", or "float16" (which scales losses).'
        )
    if compute not in (torch.float32, dtype) or compute == torch.float16:
        raise ConfigError(
            f'"torch_autocast" to {name} is for fp32 weights, and these are {compute}: leave it, or "bf16" and "fp16", out.'
        )
    return dtype


def _optimizer_dtypes(raw: Mapping[str, Any], values: Values) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of masters and of the optimizer's state, by DeepSpeed's rules."""
    block = _bf16_name(raw)
    masters, states = (values[f"{block}.{key}"] for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states"))
    if states and not masters:
        raise ConfigError("bf16_optimizer_states requires bf16_master_weights_and_grads to be enabled.")
    if masters and not (values[f"{block}.enabled"] and values["zero_optimization.stage"]):
        raise ConfigError(
            f'{block}.bf16_master_weights_and_grads needs "{block}": {{"enabled": true}} and "zero_optimization": '
            '{"stage": 1, 2 or 3}, as in DeepSpeed.'
        )
    return torch.bfloat16 if masters else torch.float32, torch.bfloat16 if states else torch.float32


def _accumulation_dtype(values: Values, compute: torch.dtype, master: torch.dtype) -> torch.dtype:
    name = values["data_types.grad_accum_dtype"]
    if name is None:
        return master
    dtype = _DTYPES[DTYPES[name]]
    if dtype not in (torch.float32, compute):
        raise ConfigError(
            f'data_types.grad_accum_dtype is "{name}" but the model computes in {compute}: use "fp32" or that '
            "(gradients are added up as they come, or in fp32; in a third dtype they would be rounded once more)."
        )
    return dtype


def _batch_triple(values: Values, world_size: int) -> tuple[int, int, int]:
    """Micro-batch, accumulation steps and batch, by DeepSpeed's rules: batch = micro-batch * steps * world size."""
    batch = _count(values, "train_batch_size")
    automatic = values[_MICRO_BATCH] == "auto"
    if automatic and batch is None:
        raise ConfigError(
            f'"{_MICRO_BATCH}" is "auto", which leaves it to the engine: give "train_batch_size", the rows of a step.'
        )
    micro = None if automatic else _count(values, _MICRO_BATCH)
    steps = _count(values, "gradient_accumulation_steps")
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


_MICRO_BATCH, _STEPS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_SPOKEN = {
    "train_batch_size": "Train batch size",
    "train_micro_batch_size_per_gpu": "Micro batch size per gpu",
    "gradient_accumulation_steps": "Gradient accumulation steps",
}


def _count(values: Values, key: str) -> int | None:
    value: int | None = values[key]
    if value is None:
        return None
    if value <= 0:
        raise ConfigError(f"{_SPOKEN[key]}: {value} has to be greater than 0")
    return value
