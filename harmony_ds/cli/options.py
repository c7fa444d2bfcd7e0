"""What stands on the command line: one table of all arguments and options, and what they make of a ds_config."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from harmony_ds.config import Config, load_config
from harmony_ds.config.keys import KEYS
from harmony_ds.errors import ConfigError
from harmony_ds.estimate.subject import BatchShape

DEFAULT = {
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {}},
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 16,
}
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Option:
    """One row: what is said of a parameter of a command beside its type and default.

    Attributes:
        least: of a number.
        flag: where it is not the parameter's name.
        off: the option that says the opposite, where it is not "--no-...".
    """

    help: str
    metavar: str | None = None
    least: float | None = None
    flag: str = ""
    off: str = ""
    off_help: str = ""
    is_argument: bool = False

    def read(self, kind: Callable[[str], Any]) -> Callable[[str], Any]:
        """`kind`, which refuses what is too small, and says what there is."""

        def read(text: str) -> Any:
            try:
                value = kind(text)
            except ValueError:
                if not (isinstance(kind, type) and issubclass(kind, Enum)):
                    raise
                known = ", ".join(one.value for one in kind)
                raise argparse.ArgumentTypeError(f'there is no "{text}": {known}') from None
            if self.least is not None and value < self.least:
                raise argparse.ArgumentTypeError(f"{text} is less than {self.least:g}")
            return value

        read.__name__ = kind.__name__  # for argparse's errors
        return read


_OF_KEYS = {key.option.name[2:].replace("-", "_"): key for key in KEYS if key.option is not None}
_ENGINES = "A,B,..."
OPTIONS: dict[str, Option] = {
    "model": Option(
        "A Hugging Face config.json or its folder, or module:function that returns a module or (module, inputs).",
        "MODEL",
        is_argument=True,
    ),
    "ds_config": Option("The ds_config. Without one: bf16, AdamW, clipping at 1.0.", "FILE"),
    "sequence": Option("Tokens in a row (the model's longest, at most 2048).", "N", 1),
    **{
        name: Option(key.option.help, "GIB" if name.endswith("gib") else "N", key.option.least)
        for name, key in _OF_KEYS.items()
        if key.option is not None
    },
    "processes": Option("Replicas on one server, each a process with micro-batches and devices of its own.", "N", 1),
    "host_memory_gib": Option("Host memory that may be used, in GiB.", "GIB", 0.001),
    "machine": Option(
        'GPU, and if not the usual ones its link and host: "rtx4090/pcie4/desktop-ddr5" (without: rtx4090).', "NAME"
    ),
    "advice": Option("Also say what would help most (plans a few times more; default: yes)."),
    "as_json": Option("One JSON object on standard output, for scripts.", flag="--json"),
    "profile": Option("A profile that `harmony-ds profile` saved. Without one: measure now.", "FILE"),
    "profile.output": Option("Where the profile is written, as JSON.", "FILE"),
    "trace.output": Option("Where the trace is written, for https://ui.perfetto.dev.", "FILE"),
    "run": Option("Also execute steps on the ds_config's device, with synthetic data."),
    "trace.steps": Option("Steps that --run records, after two more; the one of median time is shown.", "N", 1),
    # bench
    "engines": Option("Engines, harmony among them (default: all that can run here).", _ENGINES),
    "bench.accumulation": Option("Micro-batches in a step; several give a curve.", "N,M,..."),
    "device": Option('"cpu" or "cuda" (default: CUDA if there is one).', "NAME"),
    "threads": Option("Per process (CPU: 1; CUDA: all cores).", "N", 1),
    "uncapped": Option("Engines that run without the memory cap, beside the others.", _ENGINES),
    "ablate": Option("harmony alone, each of its mechanisms switched off."),
    "rounds": Option("Timed turns of every engine.", "N", 1),
    "bench.steps": Option("Optimizer steps in a turn.", "N", 1),
    "warmup_steps": Option("Steps before the first turn.", "N", 1),
    "one_core": Option("Pin every process to one core."),
    "limit_s": Option("Begin no turn after so many seconds.", "S", 1),
    "sweep": Option(
        "Also run the others at their own best micro-batch (default: where the memory cap holds for all, on CUDA)."
    ),
    "together": Option(
        "All processes live at once (default on the CPU).", off="--apart", off_help="One at a time (default on CUDA)."
    ),
    "bench.output": Option("The results, as JSON; the page is written beside it.", "FILE"),
    "resume": Option("Go on with what --output already holds."),
    # convert
    "source": Option("A checkpoint, or a folder of several (then the latest, or --tag).", "SRC", is_argument=True),
    "target": Option("The folder to write into; made if it is not there.", "DST", is_argument=True),
    "to": Option("harmony, universal (for DeepSpeed) or hf.", "LAYOUT"),
    "tag": Option("Which checkpoint in SRC."),
}
"""By the parameter's name; before it, by the command's and its."""


def option_of(command: str, name: str) -> Option:
    """The row of the parameter `name` of `command`."""
    return OPTIONS.get(f"{command}.{name}") or OPTIONS[name]


@dataclass(frozen=True)
class Wanted:
    """A model, and the ds_config that it is to be trained with; of what is None, the ds_config says it."""

    model: str
    ds_config: Path | None = None
    micro_batch: int | None = None
    sequence: int | None = None
    devices: int | None = None

    def config(self, world_size: int = 1) -> Config:
        """The ds_config with the options' values in it, for so many processes.

        Raises:
            ConfigError: it cannot be meant.
        """
        if self.ds_config is not None and not self.ds_config.is_file():
            raise ConfigError(f"there is no ds_config {self.ds_config}.")
        given = {key.path: getattr(self, name, None) for name, key in _OF_KEYS.items()}
        instead = {path: value for path, value in given.items() if isinstance(value, (int, float))}
        return load_config(DEFAULT if self.ds_config is None else self.ds_config, world_size, instead)

    def shape(self, config: Config) -> BatchShape:
        return BatchShape(config.micro_batch, self.sequence)


@dataclass(frozen=True)
class Planned(Wanted):
    """And how many micro-batches a step has, and what it may take."""

    accumulation: int | None = None
    device_memory_gib: float | None = None


@dataclass(frozen=True)
class Asked(Planned):
    """And in how many processes, what of the host's memory, and how much of an answer is wanted."""

    processes: int = 1
    host_memory_gib: float | None = None
    advice: bool = True
    as_json: bool = False

    @property
    def host_bytes(self) -> int | None:
        return None if self.host_memory_gib is None else int(self.host_memory_gib * _GIB)
