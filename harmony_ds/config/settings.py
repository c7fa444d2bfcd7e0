"""What the engine knows about its ds_config: frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Section:
    """A `type` and its `params`: the optimizer or the scheduler block."""

    type: str
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LossScale:
    """The fp16 block. `static` is 0 for dynamic scaling; the rest is DeepSpeed's, under its names."""

    static: float = 0.0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class HarmonySettings:
    """The "harmony" block.

    Attributes:
        device: "auto" (CUDA if there is one), "cpu", "cuda" or "cuda:N".
        device_memory_gib: device memory budget in GiB (None: on CUDA nine tenths of what is free, on the CPU
            unlimited).
        pack_layers: layer calls in a pack (None: what the search finds fastest).
        layers: shell patterns over module names that override the repeated blocks found otherwise.
        stash: where stashed inputs wait: "auto" (on the device if they fit), "device" or "host".
        prefetch: swap the next pack in while this one computes.
        pin_memory: page-lock host memory (CUDA).
        seed: of the micro-batches' random numbers (None: torch.initial_seed() at initialize).
        gradient_slabs: host buffers for gradients on their way to an update that is not deferred.
        plan: a file with a plan to run, in the place of a search.
        profile: a file that times and rates are kept in, and taken from where it was measured on the same.
        residency: packs that stay on the device from step to step: "off", "auto", or how many of the last ones.
        grouping: a pack that is on the device runs all micro-batches; else each micro-batch passes all packs on its own.
        just_in_time_update: a pack is updated as soon as its gradients have arrived, where nothing is to be known first
            of all gradients; else when the whole backward pass is over.
        overlap_update: the host updates weights while the device computes; else everything waits for it.
        fuse_last_pack: the last pack's forward, the loss and its backward run together for each micro-batch; else it
            runs forward with the others and is recomputed.
        micro_batch: how many rows of a micro-batch go through a layer at a time: "config" (all of them), "auto" (what
            the search finds fastest), or numbers for the forward and the backward pass. Losses are over the
            ds_config's micro-batches in any case.
    """

    device: str = "auto"
    device_memory_gib: float | None = None
    pack_layers: int | None = None
    layers: tuple[str, ...] = ()
    stash: str = "auto"
    prefetch: bool = True
    pin_memory: bool = True
    seed: int | None = None
    gradient_slabs: int = 3
    plan: str | None = None
    profile: str | None = None
    residency: str | int = "auto"
    micro_batch: str | tuple[int, int] = "config"
    grouping: bool = True
    just_in_time_update: bool = True
    overlap_update: bool = True
    fuse_last_pack: bool = True

    @property
    def budget_bytes(self) -> int | None:
        return None if self.device_memory_gib is None else int(self.device_memory_gib * _GIB)


@dataclass(frozen=True, slots=True)
class Config:
    """Everything the engine wants to know.

    Attributes:
        skip_overflow: whether a step whose gradients hold inf or NaN is skipped.
        raw: the JSON as it was given.
        values: of every key in `harmony_ds.config.keys`, by its path; defaults where `raw` says nothing.
        without_meaning: keys that DeepSpeed knows and that mean nothing here.
    """

    micro_batch: int
    gradient_accumulation_steps: int
    train_batch_size: int
    gradient_clipping: float
    optimizer: Section | None
    scheduler: Section | None
    compute_dtype: torch.dtype
    accumulation_dtype: torch.dtype
    loss_scale: LossScale | None
    skip_overflow: bool
    steps_per_print: int | None
    harmony: HarmonySettings
    raw: dict[str, Any]
    values: dict[str, Any]
    without_meaning: tuple[str, ...]

    @property
    def deferred_update(self) -> bool:
        """Whether no layer may be updated before the norm of all gradients is known."""
        return self.gradient_clipping > 0 or self.skip_overflow
