"""The ds_config of a command, with the values of its options in it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from harmony_ds.cli.progress import tell
from harmony_ds.config import Config, load_config
from harmony_ds.config.check import MICRO_BATCH, STEPS, automatic_paths
from harmony_ds.config.read import read_config, with_values, without
from harmony_ds.errors import ConfigError

DEFAULT = {
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {}},
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 16,
}
ON_DISK = {"zero_optimization.offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}
WEIGHTS_ON_DISK = {"zero_optimization.offload_param": {"device": "nvme", "nvme_path": "/nvme"}}
_KEYS = {
    "micro_batch": MICRO_BATCH,
    "accumulation": STEPS,
    "devices": "harmony.devices",
    "device_memory_gib": "harmony.device_memory_gib",
}


def config_of(args: argparse.Namespace, world_size: int = 1) -> Config:
    """Read the ds_config for so many processes, with the options' values in it.

    Raises:
        ConfigError: the ds_config is wrong, or not there.
    """
    if args.ds_config is not None and not args.ds_config.is_file():
        raise ConfigError(f"there is no ds_config {args.ds_config}.")
    given = {path: getattr(args, name, None) for name, path in _KEYS.items()}
    instead = {path: value for path, value in given.items() if value is not None}
    source = DEFAULT if args.ds_config is None else _filled(read_config(args.ds_config), instead)
    config = load_config(source, world_size, instead)
    if getattr(args, "nvme_gb_per_s", None) and not (config.disk_folder or config.weights_folder):
        config = load_config(source, world_size, {**instead, **ON_DISK})
    return config


def _filled(raw: Mapping[str, Any], instead: Mapping[str, object]) -> dict[str, Any]:
    """Return a ds_config with values where a Trainer fills them in, those of `instead` apart; tell which."""
    automatic = [path for path in automatic_paths(raw) if path not in instead]
    has_batch = isinstance(raw.get("train_batch_size"), int)
    if raw.get(MICRO_BATCH) == "auto" and not has_batch and MICRO_BATCH not in instead:
        automatic.append(MICRO_BATCH)
    defaults: dict[str, object] = {MICRO_BATCH: DEFAULT[MICRO_BATCH]}
    if not has_batch:
        defaults[STEPS] = DEFAULT[STEPS]
    if (raw.get("fp16") or {}).get("enabled") is not True:
        defaults["bf16.enabled"] = True
    values = {path: defaults[path] for path in automatic if path in defaults}
    if automatic:
        sizes = json.dumps(with_values({}, values))[1:-1] or "the defaults"
        others = "; the rest is left out" if values and len(values) < len(automatic) else ""
        tell(f'where the ds_config says "auto", which a Trainer fills in: {sizes}{others}')
    kept = dict(raw)
    if any(path.startswith("scheduler.") for path in automatic):
        del kept["scheduler"]  # which needs its numbers, and changes no size and no time
    return with_values(without(kept, automatic), values)
