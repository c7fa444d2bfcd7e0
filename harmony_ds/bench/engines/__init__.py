"""Engines that can be compared: adapters by their names, of the modules of this folder."""

from __future__ import annotations

from importlib import import_module

from harmony_ds.bench.engines import deepspeed, harmony, torch
from harmony_ds.bench.engines.adapter import Adapter
from harmony_ds.config.hints import did_you_mean
from harmony_ds.errors import ConfigError

ENGINES: dict[str, Adapter] = {**harmony.ENGINES, **deepspeed.ENGINES, **torch.ENGINES}


def adapter(name: str) -> Adapter:
    """Return the engine of this name, or of `module:name` in the `ENGINES` of another module.

    Raises:
        ConfigError: there is none.
    """
    module, _, own = name.rpartition(":")
    try:
        known = import_module(module).ENGINES if module else ENGINES
    except (ImportError, AttributeError) as error:
        raise ConfigError(f'the engine "{name}" cannot be imported: {error}.') from error
    if own not in known:
        raise ConfigError(f'there is no engine "{name}". {did_you_mean(own, known)}')
    found: Adapter = known[own]
    return found
