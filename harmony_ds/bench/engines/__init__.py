"""The engines that can be compared: adapters by their names, of the modules of this folder."""

from __future__ import annotations

from harmony_ds.bench.engines import deepspeed, fsdp2, harmony, roundpipe, torch
from harmony_ds.bench.engines.adapter import Adapter, Engine
from harmony_ds.config.hints import nearest
from harmony_ds.errors import ConfigError

__all__ = ["Adapter", "Engine", "adapter", "names"]

_ENGINES: dict[str, Adapter] = {
    name: one for room in (deepspeed, fsdp2, harmony, roundpipe, torch) for name, one in room.ENGINES.items()
}


def names() -> tuple[str, ...]:
    """Of all engines, as they are called on the command line."""
    return tuple(sorted(_ENGINES))


def adapter(name: str) -> Adapter:
    """The engine of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in _ENGINES:
        near = nearest(name, _ENGINES)
        hint = f"; did you mean {near}" if near else ""
        raise ConfigError(f'there is no engine "{name}"{hint}. There are {", ".join(names())}.')
    return _ENGINES[name]
