"""Arguments and options that commands share, and what they make of a ds_config.

A command takes them as one object: `flat` spreads a dataclass out into its fields, which is what typer reads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from harmony_ds.config import Config, load_config
from harmony_ds.config.keys import BY_PATH, KEYS
from harmony_ds.errors import ConfigError
from harmony_ds.subject import BatchShape

_DEFAULT = {
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {}},
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 16,
}
_GIB = 2**30


def of_key(path: str) -> Any:
    """The option that the table of keys has for the key at `path`."""
    option = BY_PATH[path].option
    assert option is not None, path
    return typer.Option(option.name, min=option.least, help=option.help)


Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, for scripts.")]
HostMemory = Annotated[
    float | None, typer.Option("--host-memory-gib", min=0.001, help="Host memory that may be used, in GiB.")
]


@dataclass(frozen=True)
class Wanted:
    """A model, and the ds_config that it is to be trained with; of what is None, the ds_config says it."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face config.json or its directory, or module:function that returns a module or "
            "(module, inputs).",
        ),
    ]
    ds_config: Annotated[
        Path | None,
        typer.Option("--ds-config", metavar="FILE", help="The ds_config. Without one: bf16, AdamW, clipping at 1.0."),
    ] = None
    micro_batch: Annotated[int | None, of_key("train_micro_batch_size_per_gpu")] = None
    sequence: Annotated[
        int | None, typer.Option("--sequence", min=1, help="Tokens in a row (the model's longest, at most 2048).")
    ] = None

    def config(self) -> Config:
        """The ds_config with the options' values in it.

        Raises:
            ConfigError: it cannot be meant.
        """
        if self.ds_config is not None and not self.ds_config.is_file():
            raise ConfigError(f"there is no ds_config {self.ds_config}.")
        options = {key.path: key.option.name[2:].replace("-", "_") for key in KEYS if key.option is not None}
        given = {path: getattr(self, name, None) for path, name in options.items()}
        instead = {path: value for path, value in given.items() if value is not None}
        return load_config(_DEFAULT if self.ds_config is None else self.ds_config, instead=instead)

    def shape(self, config: Config) -> BatchShape:
        return BatchShape(config.micro_batch, self.sequence)


@dataclass(frozen=True)
class Planned(Wanted):
    """And how many micro-batches a step has, and what it may take."""

    accumulation: Annotated[int | None, of_key("gradient_accumulation_steps")] = None
    device_memory_gib: Annotated[float | None, of_key("harmony.device_memory_gib")] = None


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with each parameter that is a dataclass spread out into parameters for its fields."""
    hints = get_type_hints(command, include_extras=True)
    parameters: dict[str, inspect.Parameter] = {}
    owners: dict[str, type] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if not (isinstance(kind, type) and is_dataclass(kind)):
            parameters[name] = parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY)
            continue
        owners[name] = kind
        for inner, one in inspect.signature(kind).parameters.items():
            annotation = get_type_hints(kind, include_extras=True)[inner]
            parameters[inner] = one.replace(annotation=annotation, kind=inspect.Parameter.KEYWORD_ONLY)

    @wraps(command)
    def spread(**given: Any) -> None:
        made = {name: kind(**{f.name: given.pop(f.name) for f in fields(kind)}) for name, kind in owners.items()}
        command(**made, **given)

    spread.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    spread.__annotations__ = {name: one.annotation for name, one in parameters.items()}
    return spread


def host_bytes(gib: float | None) -> int | None:
    """An option in GiB, in bytes."""
    return None if gib is None else int(gib * _GIB)
