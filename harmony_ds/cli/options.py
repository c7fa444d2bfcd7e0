"""Arguments that several commands take, and the ds_config with their values in it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from harmony_ds.config import Config, load_config
from harmony_ds.config.check import MICRO_BATCH, STEPS
from harmony_ds.config.harmony import help_of
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


def at_least(least: float, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    """Return an argparse type that refuses numbers less than `least`."""

    def number(text: str) -> float:
        value = kind(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least:g}")
        return value

    return number


def output_file(text: str) -> Path:
    """Return the path of a file that a command will write, and make its folder: the work before that may take minutes."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path.parent} cannot be made: {error.strerror}") from error
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder: name a file")
    return path


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the model and its ds_config, as every command that reads a model takes them."""
    add, count = parser.add_argument, at_least(1)
    add("model", metavar="MODEL", help="A Hugging Face config.json or its folder, or module:function that returns a "
        "module or (module, inputs).")  # fmt: skip
    add("--ds-config", type=Path, metavar="FILE", help="The ds_config. Without one: bf16, AdamW, clipping at 1.0.")
    add("--micro-batch", type=count, metavar="N", help="Rows of a micro-batch, instead of the ds_config's (or 1).")
    add("--sequence", type=count, metavar="N", help="Tokens in a row (the model's longest, at most 2048).")
    add("--devices", type=count, metavar="N", help="Devices that one process drives as a pipeline, instead of the "
        "ds_config's (or 1).")  # fmt: skip
    gib = at_least(0.001, float)
    add("--device-memory-gib", type=gib, metavar="GIB", help=help_of("device_memory_gib"))


def add_accumulation(parser: argparse.ArgumentParser) -> None:
    """Add the number of micro-batches in a step."""
    text = "Micro-batches in a step, instead of the ds_config's (or 16)."
    parser.add_argument("--accumulation", type=at_least(1), metavar="N", help=text)


def add_answer(parser: argparse.ArgumentParser) -> None:
    """Add everything that `estimate` and `plan` take alike."""
    add_model(parser)
    add_accumulation(parser)
    add, gib = parser.add_argument, at_least(0.001, float)
    add("--processes", type=at_least(1), default=1, metavar="N",
        help="Replicas on one server, each a process with micro-batches and devices of its own.")  # fmt: skip
    add("--host-memory-gib", type=gib, metavar="GIB", help="Host memory that may be used, in GiB.")
    add("--advice", action=argparse.BooleanOptionalAction, default=True,
        help="Also say what would help most (plans a few times more; default: yes).")  # fmt: skip
    add_json(parser)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="One JSON object on standard output, for scripts.")


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
