"""From JSON to the value of every key in the table, or to an error that names the key."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from harmony_ds.config.hints import AUTO, meant_by, nearest
from harmony_ds.config.key import Effect, Key
from harmony_ds.config.keys import BLOCKS, BY_PATH, names_in
from harmony_ds.errors import ConfigError

Raw = Mapping[str, Any]
Values = dict[str, Any]

_ZERO = "zero_optimization"
_SPOKEN = {"": "the ds_config", "harmony": '"harmony"'}
_IN_PARAMS = (
    *(f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay", "momentum", "torch_adam")),
    *(f"scheduler.params.warmup_{name}" for name in ("num_steps", "max_lr", "min_lr", "type")),
    "scheduler.params.total_num_steps",
)
_MICRO_BATCH = "train_micro_batch_size_per_gpu"
_OF_ACCELERATE = {"compute_environment", "distributed_type", "deepspeed_config", "deepspeed_plugin"}


def read_values(raw: Raw) -> tuple[Values, tuple[str, ...]]:
    """The value of every key by its path: what `raw` says, else the default. And the keys of it that mean nothing here.

    Raises:
        ConfigError: a key is unknown or refused, or a value is none that the key takes.
    """
    given, unknown = _flattened(_with_old_names_replaced(raw))
    values = {path: key.default for path, key in BY_PATH.items()}
    for path, value in given.items():
        key = BY_PATH[path]
        if value == "auto" and key.effect is not Effect.OURS and path != _MICRO_BATCH:
            _refuse_auto(key)
            continue
        try:
            values[path] = key.form.read(path, value)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        _refuse(key, values[path])
    if unknown and values["harmony.unknown_keys"] == "error":
        theirs = sorted(_OF_ACCELERATE & set(unknown))
        raise ConfigError(_accelerates(theirs[0]) if theirs else _unknown(unknown[0]))
    _follow_aliases(given, values)
    _check_zero(values)
    return values, tuple(sorted({*_without_meaning(given), *unknown}))


def _without_meaning(paths: Iterable[str]) -> set[str]:
    """Those of `paths` that mean nothing here, as high up as possible."""
    idle = {path for path in paths if BY_PATH[path].effect is Effect.NONE}
    whole = {path.split(".")[0] for path in idle} - {path.split(".")[0] for path in paths if path not in idle}
    return whole | {path for path in idle if path.split(".")[0] not in whole}


def _flattened(block: Raw, path: str = "") -> tuple[dict[str, Any], list[str]]:
    """The values in `block` and in the blocks in it by their paths, and the paths that nobody knows."""
    flat: dict[str, Any] = {}
    unknown: list[str] = []
    known = names_in(path)
    for name, value in block.items():
        inner = f"{path}.{name}" if path else str(name)
        if name not in known:
            if path == "harmony":
                raise ConfigError(_unknown(inner))
            unknown.append(inner)
        elif inner not in BLOCKS:
            flat[inner] = value
        elif isinstance(value, Mapping):
            below, not_known = _flattened(value, inner)
            flat |= below
            unknown += not_known
        elif value is not None:
            raise ConfigError(f'"{inner}" must be an object, not {value!r}.')
    return flat, unknown


def _with_old_names_replaced(raw: Raw) -> Raw:
    """DeepSpeed's deprecated forms: zero_optimization as a flag, and cpu_offload."""
    zero = raw.get(_ZERO)
    if isinstance(zero, bool):
        return {**raw, _ZERO: {"stage": int(zero)}}
    if not isinstance(zero, Mapping):
        return raw
    changed = dict(zero)
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if old not in zero or zero[old] is None:
            continue
        if zero.get(new) is not None:
            raise ConfigError(f"Cannot provide deprecated parameter '{old}' and replacing parameter '{new}' together")
        if changed.pop(old) is True:
            changed[new] = {"device": "cpu"}
    return {**raw, _ZERO: changed}


def _unknown(path: str) -> str:
    block, _, name = path.rpartition(".")
    there = names_in(block)
    near = nearest(name, there)
    if near is None:
        near = _nearest_place(name)
    hint = f'Did you mean "{near}"?' if near else f"Known keys: {', '.join(sorted(there))}."
    pardon = "" if block == "harmony" else ' ("harmony": {"unknown_keys": "warn"} lets such keys pass.)'
    return f'unknown key "{name}" in {_SPOKEN.get(block, block)}. {hint}{pardon}'


def _accelerates(name: str) -> str:
    return (
        f'this is accelerate\'s file, not a ds_config: it says "{name}". Give it to `accelerate launch --config_file`; its '
        "deepspeed_config_file names a ds_config."
    )


def _nearest_place(name: str) -> str | None:
    """The path of a key of this name, or of what others call so, in another block."""
    places = {path.rpartition(".")[2]: path for path in (*reversed(BY_PATH), *_IN_PARAMS) if "." in path}
    return places.get(meant_by(name))


def _refuse_auto(key: Key) -> None:
    if key.effect is not Effect.NONE:  # DeepSpeed takes its default
        raise ConfigError(f'"{key.path}" still says "auto": {AUTO}')


def _refuse(key: Key, value: object) -> None:
    if value in key.refuses:
        raise ConfigError(f'"{key.path}" is {json.dumps(value)}: {key.reason}.')
    if key.effect is Effect.REFUSED and _is_on(key, value):
        raise ConfigError(f'"{key.path}": {key.note}.')


def _is_on(key: Key, value: object) -> bool:
    if isinstance(value, Mapping):
        value = value.get(key.switch[0], key.switch[1]) if key.open else value
    if isinstance(value, bool) or value is None:
        return value is True
    return value not in (0, 1, "auto")


def _follow_aliases(given: Mapping[str, Any], values: Values) -> None:
    """ZeRO-3's keys have two names each."""
    for path in [path for path in values if path.startswith(f"{_ZERO}.stage3_")]:
        short = path.replace(".stage3_", ".")
        if short in values:
            source = path if path in given else short
            values[path] = values[short] = values[source]
    if given.get(f"{_ZERO}.stage3_gather_fp16_weights_on_model_save") is True:
        for prefix in ("stage3_", ""):
            values[f"{_ZERO}.{prefix}gather_16bit_weights_on_model_save"] = True


def _check_zero(values: Values) -> None:
    if values[f"{_ZERO}.overlap_comm"] is None:
        values[f"{_ZERO}.overlap_comm"] = values[f"{_ZERO}.stage"] == 3
    if values[f"{_ZERO}.offload_optimizer.ratio"] < 1.0 and values[f"{_ZERO}.stage"] != 3:
        raise ConfigError("Partial offloading only supported for ZeRO Stage 3.")
    if not values[f"{_ZERO}.compute_grad_norm"] and values[f"{_ZERO}.stage"] not in (1, 2):
        raise ConfigError("compute_grad_norm=false is supported only with ZeRO Stage 1 or 2")
    if values["gradient_allreduce_op"] == "sum" and values[f"{_ZERO}.stage"] == 3:
        raise ConfigError("gradient_allreduce_op='sum' is not supported with ZeRO stage 3")
    for key in ("communication_data_type", "seq_parallel_communication_data_type"):
        if values[key] is not None and str(values[key]).lower() not in ("fp16", "bf16", "fp32"):
            raise ConfigError(
                f"Invalid communication_data_type. Supported data types: ['fp16', 'bf16', 'fp32']. Got: {values[key]}"
            )
