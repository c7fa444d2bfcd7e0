"""The many small methods by which scripts ask DeepSpeed's engine for its settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from harmony_ds.config import Config
from harmony_ds.config.keys import KEYS
from harmony_ds.config.optimizers import named
from harmony_ds.config.settings import SCALER_NAMES


class Settings:
    """Answers from `_settings`. In one process every rank is 0 and every world has one member.

    What a key's value answers alone comes from the table of keys, see below; here is what has to be worked out.
    """

    _settings: Config

    @property
    def config(self) -> dict[str, Any]:
        """The ds_config as it was given."""
        return self._settings.raw

    @property
    def _config(self) -> Any:
        """DeepSpeed's own view of the ds_config, made when somebody asks for it."""
        from deepspeed.runtime.config import DeepSpeedConfig

        sizes = {
            "train_batch_size": self._settings.train_batch_size,
            "train_micro_batch_size_per_gpu": self._settings.micro_batch,
            "gradient_accumulation_steps": self._settings.gradient_accumulation_steps,
        }
        return DeepSpeedConfig({**self._settings.raw, **sizes})

    # ---- batch sizes, optimizer, scheduler

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in a group."""
        return self._settings.gradient_accumulation_steps

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples in a micro-batch."""
        return self._settings.micro_batch

    def train_batch_size(self) -> int:
        """Samples in a group."""
        return self._settings.train_batch_size

    def get_batch_info(self) -> tuple[int, int, int]:
        """Batch size, micro-batch size, accumulation steps."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def gradient_clipping(self) -> float:
        """The largest global norm that gradients keep (0: any)."""
        return self._settings.gradient_clipping

    def optimizer_name(self) -> str | None:
        """The ds_config's optimizer, DeepSpeed's own in small letters."""
        section = self._settings.optimizer
        if section is None:
            return None
        row = named(section.type)
        return section.type.lower() if row is not None and row.of_deepspeed else section.type

    def optimizer_params(self) -> dict[str, Any] | None:
        """The ds_config's `optimizer.params`."""
        section = self._settings.optimizer
        return None if section is None or self._settings.values["optimizer.params"] is None else section.params

    def scheduler_name(self) -> str | None:
        """The ds_config's scheduler."""
        return None if self._settings.scheduler is None else self._settings.scheduler.type

    def scheduler_params(self) -> dict[str, Any] | None:
        """The ds_config's `scheduler.params`."""
        section = self._settings.scheduler
        return None if section is None or self._settings.values["scheduler.params"] is None else section.params

    # ---- precision

    def bfloat16_enabled(self) -> bool:
        """Whether layers compute in bf16."""
        return self._settings.compute_dtype == torch.bfloat16

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows (with fp16)."""
        return bool(self._settings.values["fp16.loss_scale"] == 0)

    def initial_dynamic_scale(self) -> float:
        """Where a dynamic loss scale begins."""
        return float(2 ** self._settings.values["fp16.initial_scale_power"])

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """The dynamic loss scale's settings, under DeepSpeed's names."""
        values = self._settings.values
        rules = {theirs: values[f"fp16.{ours}"] for ours, theirs in SCALER_NAMES.items()}
        return {"init_scale": self.initial_dynamic_scale(), **rules}

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """What layers compute in, and what gradients are added up in."""
        return self._settings.compute_dtype, self._settings.accumulation_dtype

    @property
    def communication_data_type(self) -> torch.dtype:
        """What DeepSpeed's processes would exchange gradients in."""
        named = self._settings.values["communication_data_type"]
        known = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
        return self._settings.compute_dtype if named is None else known[str(named).lower()]

    # ---- ZeRO, as the ds_config says; it steers nothing here

    def zero_optimization(self) -> bool:
        """Whether the ds_config names a ZeRO stage above 0."""
        return bool(self._settings.values["zero_optimization.stage"] > 0)

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether the ds_config names stage 2 or 3."""
        return bool(self._settings.values["zero_optimization.stage"] >= 2)

    def zero_optimization_partition_weights(self) -> bool:
        """Whether the ds_config names stage 3."""
        return bool(self._settings.values["zero_optimization.stage"] == 3)

    def zero_offload_optimizer(self) -> Any:
        """DeepSpeed's model of `offload_optimizer`, or None."""
        return self._config.zero_config.offload_optimizer

    def zero_offload_param(self) -> Any:
        """DeepSpeed's model of `offload_param`, or None."""
        return self._config.zero_config.offload_param

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether the ds_config has the optimizer offloaded."""
        return bool(self._settings.values["zero_optimization.offload_optimizer.device"] != "none")

    zero_cpu_offload = zero_use_cpu_optimizer

    # ---- the rest

    def postscale_gradients(self) -> bool:
        """The opposite of `prescale_gradients`."""
        return not self._settings.values["prescale_gradients"]

    def aio_config(self) -> Any:
        """DeepSpeed's reading of the `aio` block."""
        return self._config.aio_config

    def autotp_size(self) -> int:
        """No tensor parallelism."""
        return int(self._settings.raw.get("tensor_parallel", {}).get("autotp_size", 0))


_FIXED = {
    "bf16_master_weights_and_gradients": False,  # masters are fp32, and so is the optimizer's state
    "bf16_optimizer_states": False,
    "zero_nvme_offload_optimizer": False,
    "autotuning_enabled": False,
    "zenflow_config": None,
    "get_data_parallel_rank": 0,
    "get_model_parallel_rank": 0,
    "get_tensor_parallel_rank": 0,
    "get_sequence_parallel_group": None,
}
"""What this engine answers whatever the ds_config says: values that are refused, and one process."""


def _answering(value: object) -> Callable[[Settings], Any]:
    return lambda _: value


def _reading(path: str) -> Callable[[Settings], Any]:
    def read(self: Settings) -> Any:
        return self._settings.values[path]

    read.__doc__ = f"The ds_config's `{path}`."
    return read


for _name, _value in _FIXED.items():
    setattr(Settings, _name, _answering(_value))
for _key in KEYS:
    if _key.getter:
        setattr(Settings, _key.getter, _reading(_key.path))
