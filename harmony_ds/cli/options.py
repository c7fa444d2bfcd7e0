"""The ds_config of a command, with the values of its options in it."""

from __future__ import annotations

import argparse

from harmony_ds.config import Config, load_config
from harmony_ds.config.check import MICRO_BATCH, STEPS
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
    source = DEFAULT if args.ds_config is None else args.ds_config
    config = load_config(source, world_size, instead)
    if getattr(args, "nvme_gb_per_s", None) and not (config.disk_folder or config.weights_folder):
        config = load_config(source, world_size, {**instead, **ON_DISK})
    return config
