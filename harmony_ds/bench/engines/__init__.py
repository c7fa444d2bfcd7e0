"""The engines that can be compared: every module of this folder that has `ENGINES`, adapters by their names."""

from __future__ import annotations

import difflib
import pkgutil
from functools import cache
from importlib import import_module

from harmony_ds.bench.engines.adapter import Adapter, Engine
from harmony_ds.errors import ConfigError

__all__ = ["Adapter", "Engine", "adapter", "names"]


@cache
def _adapters() -> dict[str, Adapter]:
    modules = (import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return dict(sorted(row for module in modules for row in getattr(module, "ENGINES", {}).items()))


def names() -> tuple[str, ...]:
    """Of all engines, as they are called on the command line."""
    return tuple(_adapters())


def adapter(name: str) -> Adapter:
    """The engine of this name.

    Raises:
        ConfigError: there is none.
    """
    found = _adapters().get(name)
    if found is None:
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"; did you mean {near[0]}" if near else ""
        raise ConfigError(f'there is no engine "{name}"{hint}. There are {", ".join(names())}.')
    return found
