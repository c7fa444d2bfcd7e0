"""Arguments and options that commands share, and what they make of a ds_config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from harmony_ds.config import Config, load_config
from harmony_ds.errors import ConfigError
from harmony_ds.subject import BatchShape

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face config.json or its directory, or module:function that returns a module or (module, inputs).",
    ),
]
DsConfig = Annotated[
    Path | None,
    typer.Option("--ds-config", metavar="FILE", help="The ds_config. Without one: bf16, AdamW, clipping at 1.0."),
]
MicroBatch = Annotated[
    int | None, typer.Option("--micro-batch", min=1, help="Rows of a micro-batch, instead of the ds_config's (or 1).")
]
Sequence = Annotated[
    int | None, typer.Option("--sequence", min=1, help="Tokens in a row (the model's longest, at most 2048).")
]
Accumulation = Annotated[
    int | None,
    typer.Option("--accumulation", min=1, help="Micro-batches in a step, instead of the ds_config's (or 16)."),
]
DeviceMemory = Annotated[
    float | None, typer.Option("--device-memory-gib", min=0.001, help="Device memory that may be used, in GiB.")
]
HostMemory = Annotated[
    float | None, typer.Option("--host-memory-gib", min=0.001, help="Host memory that may be used, in GiB.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, for scripts.")]

_DEFAULT = {
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {}},
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 16,
}
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the options of one command say.

    Attributes:
        micro_batch, accumulation, device_memory_gib: None: as the ds_config says.
    """

    ds_config: Path | None
    micro_batch: int | None
    sequence: int | None
    accumulation: int | None
    device_memory_gib: float | None

    def config(self) -> Config:
        """The ds_config with the options' values in it.

        Raises:
            ConfigError: it cannot be meant.
        """
        sizes = {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
        }
        given = {key: value for key, value in sizes.items() if value is not None}
        if self.ds_config is not None and not self.ds_config.is_file():
            raise ConfigError(f"there is no ds_config {self.ds_config}.")
        config = load_config(_DEFAULT if self.ds_config is None else self.ds_config, sizes=given)
        if self.device_memory_gib is None:
            return config
        return replace(config, harmony=replace(config.harmony, device_memory_gib=self.device_memory_gib))

    def shape(self, config: Config) -> BatchShape:
        return BatchShape(config.micro_batch, self.sequence)


def host_bytes(gib: float | None) -> int | None:
    """An option in GiB, in bytes."""
    return None if gib is None else int(gib * _GIB)
