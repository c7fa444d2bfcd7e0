"""The "harmony" block: our own keys."""

from __future__ import annotations

import math
from collections.abc import Mapping

from harmony_ds.config.settings import HarmonySettings
from harmony_ds.config.unknown import unknown_key
from harmony_ds.errors import ConfigError

_HARMONY = frozenset(
    "device device_memory_gib pack_layers layers stash prefetch pin_memory seed gradient_slabs plan profile "
    "residency micro_batch grouping just_in_time_update overlap_update fuse_last_pack".split()
)
_FLAGS = ("grouping", "prefetch", "just_in_time_update", "overlap_update", "fuse_last_pack", "pin_memory")


def harmony_settings(block: object, pin_memory: bool = True, micro_batch: str = "config") -> HarmonySettings:
    """The settings in `block`; `pin_memory` is what DeepSpeed's offload blocks say, `micro_batch` what its sizes do.

    Raises:
        ConfigError: a key is unknown, or a value cannot be meant.
    """
    if not isinstance(block, Mapping):
        raise ConfigError(f'"harmony" must be an object, not {block!r}.')
    for key in block:
        if key not in _HARMONY:
            raise ConfigError(unknown_key(str(key), '"harmony"', _HARMONY))
    values = {"pin_memory": pin_memory, "micro_batch": micro_batch, **block}
    values["micro_batch"] = _sizes(values["micro_batch"])
    if "layers" in values:
        layers = values["layers"]
        if not isinstance(layers, (list, tuple)) or not all(isinstance(pattern, str) for pattern in layers):
            raise ConfigError(f'harmony.layers must be a list of patterns such as ["model.layers.*"], not {layers!r}.')
        values["layers"] = tuple(layers)
    settings = HarmonySettings(**values)
    _check_harmony(settings)
    return settings


def _sizes(value: object) -> str | tuple[int, int]:
    """Rows of a layer call, forward and backward, or a word."""
    if value in ("config", "auto"):
        return str(value)
    both = (value, value)
    if isinstance(value, Mapping) and set(value) == {"forward", "backward"}:
        both = (value["forward"], value["backward"])
    forward, backward = both
    if not _is_count(forward) or not _is_count(backward):
        raise ConfigError(
            f'harmony.micro_batch is {value!r}: it must be "config", "auto", a whole number of rows of at least 1, or '
            'two such numbers, as {"forward": 8, "backward": 4}.'
        )
    assert isinstance(forward, int) and isinstance(backward, int)
    return forward, backward


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_harmony(settings: HarmonySettings) -> None:
    if settings.stash not in ("auto", "device", "host"):
        raise ConfigError(f'harmony.stash is {settings.stash!r}: it must be "auto", "device" or "host".')
    resident = settings.residency
    counted = isinstance(resident, int) and not isinstance(resident, bool) and resident >= 0
    if resident not in ("auto", "off") and not counted:
        raise ConfigError(f'harmony.residency is {resident!r}: it must be "auto", "off" or a number of packs.')
    for key in ("pack_layers", "gradient_slabs"):
        value = getattr(settings, key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"harmony.{key} must be a whole number of at least 1, not {value!r}.")
    gib = settings.device_memory_gib
    if gib is not None and (isinstance(gib, bool) or not isinstance(gib, (int, float)) or not 0 < gib < math.inf):
        raise ConfigError(f"harmony.device_memory_gib must be a number above 0, not {gib!r}.")
    if not isinstance(settings.device, str):
        raise ConfigError(f'harmony.device must be a name such as "cpu" or "cuda:0", not {settings.device!r}.')
    _check_files(settings)
    seed = settings.seed
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ConfigError(f"harmony.seed must be a whole number, not {seed!r}.")
    for key in _FLAGS:
        if not isinstance(getattr(settings, key), bool):
            raise ConfigError(f"harmony.{key} must be true or false, not {getattr(settings, key)!r}.")


def _check_files(settings: HarmonySettings) -> None:
    for key in ("plan", "profile"):
        value = getattr(settings, key)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"harmony.{key} must be the path of a JSON file, not {value!r}.")
    if settings.plan is not None and settings.pack_layers is not None:
        raise ConfigError("harmony.plan and harmony.pack_layers are two ways to say which packs to run: leave one out.")
    if settings.plan is not None and settings.micro_batch != "config":
        raise ConfigError("harmony.plan says how layer calls are cut: leave harmony.micro_batch out.")
