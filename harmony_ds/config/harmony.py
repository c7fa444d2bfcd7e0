"""The "harmony" block: our own keys, their types and defaults. What each is for, and which values it takes: `keys.json`."""

from __future__ import annotations

from dataclasses import dataclass

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonySettings:
    """The "harmony" block, and all that a plan is asked for beside the model and the machine."""

    device: str = "auto"
    devices: int | str | tuple[str, ...] = 1
    parallel: str = "pipeline"
    device_memory_gib: float | None = None
    pack_layers: int | None = None
    layers: tuple[str, ...] = ()
    stash: str = "auto"
    residency: str | int = "auto"
    keep_graphs: bool = True
    micro_batch: str | tuple[int, int] = "config"
    pin_memory: bool = True
    seed: int | None = None
    reproducible: bool = True
    split_masters: bool = False
    weights: str = "auto"
    reduce: str = "auto"
    plan: str | None = None
    profile: str | None = None
    unknown_keys: str = "error"
    grouping: bool = True
    prefetch: bool = True
    gradient_slabs: int = 3

    @property
    def budget_bytes(self) -> int | None:
        return None if self.device_memory_gib is None else int(self.device_memory_gib * _GIB)
