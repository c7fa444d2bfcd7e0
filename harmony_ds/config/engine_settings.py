"""The settings of an engine while it trains: batch sizes, which may change, and DeepSpeed's getters of the ds_config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from harmony_ds.config.deepspeed_getters import CONSTANT_ATTRIBUTES, CONSTANT_METHODS, DEEPSPEED_NAMES
from harmony_ds.config.settings import Config
from harmony_ds.errors import ConfigError


class EngineSettings:
    """A ds_config whose batch sizes may change. It has every name of DeepSpeed's engine in `DEEPSPEED_NAMES`, too.

    Attributes:
        now: the ds_config with the batch sizes of now.
    """

    client_optimizer: Any = None
    """The program's own optimizer, which DeepSpeed's `optimizer_name` names."""

    def __init__(self, config: Config, rank: int = 0, world_size: int = 1) -> None:
        """Take the rank of this process among the `world_size` that train the model."""
        self.now = config
        self._rank = rank
        self._world_size = world_size
        self._parsed_from: Config | None = None
        self._parsed: Any = None

    @property
    def _config(self) -> Any:
        """DeepSpeed's own `DeepSpeedConfig`, made when it is first read; its getters read it by this name."""
        if self._parsed_from is not self.now:
            from deepspeed.runtime.config import DeepSpeedConfig

            batch, micro_batch, steps = self.get_batch_info()
            sizes = {
                "train_batch_size": batch,
                "train_micro_batch_size_per_gpu": micro_batch,
                "gradient_accumulation_steps": steps,
            }
            self._parsed = DeepSpeedConfig({**self.now.known, **sizes})
            self._parsed_from = self.now
        return self._parsed

    def __getattr__(self, name: str) -> Any:
        if name in CONSTANT_ATTRIBUTES:
            return CONSTANT_ATTRIBUTES[name]
        if name in CONSTANT_METHODS:
            return lambda: CONSTANT_METHODS[name]
        if name not in DEEPSPEED_NAMES:
            raise AttributeError(name)
        from deepspeed.runtime.engine import DeepSpeedEngine

        # A property's value, or a method that is bound to these settings:
        return vars(DeepSpeedEngine)[name].__get__(self)

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches in a group."""
        return self.now.gradient_accumulation_steps

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples in a micro-batch."""
        return self.now.micro_batch

    def train_batch_size(self) -> int:
        """Return the samples in a group, of all processes."""
        return self.now.train_batch_size

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return batch size, micro-batch size, accumulation steps."""
        return self.now.train_batch_size, self.now.micro_batch, self.now.gradient_accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches in a group.

        Raises:
            ConfigError: `train_batch_size` is no multiple of the micro-batch size.
        """
        micro_batch, size = self.now.micro_batch, self._world_size
        if train_batch_size <= 0 or train_batch_size % (micro_batch * size):
            raise ConfigError(
                "Train batch size must be divisible by micro-batch data parallelism: "
                f"{train_batch_size} is no multiple of {micro_batch} * {size}"
            )
        self._resize(micro_batch, train_batch_size // (micro_batch * size))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the size of micro-batches, and of batches with it."""
        if micro_batch_size <= 0:
            raise ConfigError(f"Micro batch size per gpu: {micro_batch_size} has to be greater than 0")
        self._resize(micro_batch_size, self.now.gradient_accumulation_steps)

    def _resize(self, micro_batch: int, steps: int) -> None:
        batch = micro_batch * steps * self._world_size
        self.now = replace(self.now, micro_batch=micro_batch, gradient_accumulation_steps=steps, train_batch_size=batch)

    def get_data_parallel_rank(self) -> int:
        """Return this process's rank among all that train the model; loaders share out their data by it."""
        return self._rank

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtype that layers compute in, and the one that gradients are added up in."""
        return self.now.compute_dtype, self.now.accumulation_dtype
