"""The settings of an engine, read from its ds_config: frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from harmony_ds.config.harmony import HarmonySettings


@dataclass(frozen=True, slots=True)
class Section:
    """A `type` and its `params`: the optimizer or the scheduler block."""

    type: str
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that an engine is told by its ds_config.

    Attributes:
        casts_frozen: whether frozen parameters of floating point are computed with in `compute_dtype`, as with a "bf16" or
            "fp16" block; else each keeps its own dtype, as in plain PyTorch. Quantized ones always do.
        buffer_dtype: that floating-point buffers are cast to; None: they keep theirs.
        master_dtype: of the parameters that the optimizer steps.
        state_dtype: of what it keeps for each of their numbers.
        disk_folder, weights_folder: where masters and optimizer state, and where weights lie in a file; None: in memory.
        autocast_dtype: of torch.autocast around every call of the model; None: of the caller's alone.
        loss_scale: the fp16 block, or what autocast to float16 needs of it; None: losses are not scaled.
        skip_overflow: whether a step whose gradients hold inf or NaN is skipped.
        raw: the JSON as it was given.
        known: what DeepSpeed's own `DeepSpeedConfig` takes of it.
        values: of every key, by its path; defaults where `raw` says nothing.
        without_meaning: keys that were given and mean nothing here.
    """

    micro_batch: int
    gradient_accumulation_steps: int
    train_batch_size: int
    gradient_clipping: float
    optimizer: Section | None
    scheduler: Section | None
    compute_dtype: torch.dtype
    casts_frozen: bool
    accumulation_dtype: torch.dtype
    buffer_dtype: torch.dtype | None
    master_dtype: torch.dtype
    state_dtype: torch.dtype
    disk_folder: str | None
    weights_folder: str | None
    autocast_dtype: torch.dtype | None
    loss_scale: Any
    skip_overflow: bool
    steps_per_print: int | None
    harmony: HarmonySettings
    raw: dict[str, Any]
    known: dict[str, Any]
    values: dict[str, Any]
    without_meaning: tuple[str, ...]

    @property
    def master_bytes(self) -> int:
        """Host bytes of the master beside each weight."""
        if self.compute_dtype == self.master_dtype or self.disk_folder is not None:
            return 0
        return 2 if self.harmony.split_masters else 4

    @property
    def refuses_unused(self) -> bool:
        """Whether a step in which a trained parameter gets no gradient is refused, as DeepSpeed does in these stages."""
        stage = self.values["zero_optimization.stage"]
        return stage in (1, 2) and not self.values["zero_optimization.ignore_unused_parameters"]

    @property
    def deferred_update(self) -> bool:
        """Whether no layer may be updated before all gradients are there, and their norm is known."""
        return self.gradient_clipping > 0 or self.skip_overflow or self.refuses_unused
