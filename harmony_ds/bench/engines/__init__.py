"""The engines that can be compared: every module of this folder whose name does not begin with "_" is one.

An adapter has

    def unavailable(task: Task) -> str | None     why it cannot run this task here, or None
    def build(task: Task) -> Engine

and, where its arithmetic is not that of plain accumulation by design, `EXACT = False`.
"""

from __future__ import annotations

import difflib
import pkgutil
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor

from harmony_ds.bench.task import Batch, Task
from harmony_ds.errors import ConfigError


class Engine(Protocol):
    """One model under one engine."""

    def step(self, batches: list[Batch]) -> Tensor:
        """One optimizer step; the mean loss over its micro-batches, 0-dim."""
        ...

    def drain(self) -> None:
        """Returns when nothing is under way any longer."""
        ...

    def report(self) -> dict[str, Any]:
        """What it was told and what it did: `settings`, and as far as it knows them `traffic`, `device_peak_bytes`."""
        ...


class Adapter(Protocol):
    """A module of this folder."""

    def unavailable(self, task: Task) -> str | None: ...

    def build(self, task: Task) -> Engine: ...


def names() -> tuple[str, ...]:
    """Of all engines, as they are called on the command line."""
    return tuple(
        module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")
    )


def adapter(name: str) -> Adapter:
    """The engine's module.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"; did you mean {near[0]}" if near else ""
        raise ConfigError(f'there is no engine "{name}"{hint}. There are {", ".join(names())}.')
    module: Any = import_module(f"{__name__}.{name.replace('-', '_')}")
    adapter: Adapter = module
    return adapter


def is_exact(name: str) -> bool:
    """Whether its losses must be those of plain accumulation."""
    return bool(getattr(adapter(name), "EXACT", True))
