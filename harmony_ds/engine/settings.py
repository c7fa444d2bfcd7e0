"""The settings of an engine: its batch sizes, and DeepSpeed's getters, which DeepSpeed's config answers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from inspect import isfunction
from typing import Any

import torch

from harmony_ds.config import Config
from harmony_ds.distributed import SingleProcess
from harmony_ds.errors import ConfigError


class Settings:
    """A ds_config whose batch sizes may change. It answers to every name in `deepspeed_names`."""

    client_optimizer: Any = None
    """The program's own optimizer, which DeepSpeed's `optimizer_name` names."""

    def __init__(self, config: Config, world: SingleProcess) -> None:
        self.now = config
        self._world = world
        self._parsed: tuple[Config | None, Any] = (None, None)

    @property
    def _config(self) -> Any:
        """DeepSpeed's `DeepSpeedConfig`, made when it is first read."""
        if self._parsed[0] is not self.now:
            from deepspeed.runtime.config import DeepSpeedConfig

            batch, micro_batch, steps = self.get_batch_info()
            sizes = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": micro_batch}
            known = {**self.now.known, **sizes, "gradient_accumulation_steps": steps}
            self._parsed = (self.now, DeepSpeedConfig(known))
        return self._parsed[1]

    def __getattr__(self, name: str) -> Any:
        if name not in deepspeed_names():
            raise AttributeError(name)
        answer = deepspeed_names()[name]
        return answer.__get__(self) if isfunction(answer) or isinstance(answer, property) else answer

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
        micro_batch, size = self.now.micro_batch, self._world.size
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
        batch = micro_batch * steps * self._world.size
        self.now = replace(self.now, micro_batch=micro_batch, gradient_accumulation_steps=steps, train_batch_size=batch)

    def get_data_parallel_rank(self) -> int:
        """Return this process's rank among all that train the model, by which loaders share out their data."""
        return self._world.rank

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtype that layers compute in, and the one that gradients are added up in."""
        return self.now.compute_dtype, self.now.accumulation_dtype


_INDIRECT = """
    communication_data_type is_first_weights_partition_group uses_parallelization_pass_only
    zero_optimization_partition_gradients zero_optimization_partition_weights
""".split()
"""Getters of DeepSpeed's engine that read its config through other getters."""
_NONE = """
    all_to_all_group local_all_to_all_group loaded_checkpoint_dp_world_size loaded_checkpoint_mp_world_size losses
    mesh_device mpu scale_wrt_gas torch_autocast_z0_gradscaler
"""
_TRUE = "enable_backward_allreduce gradient_average save_zero_checkpoint save_non_zero_checkpoint warn_unscaled_loss"
_FALSE = """
    dont_change_device has_moe_layers optimized_linear_base_weight_sharding optimized_linear_lora_enabled
    pipeline_parallelism use_ds_comm zenflow
"""
_SAME: dict[str, Any] = {
    **dict.fromkeys(_NONE.split()),
    **dict.fromkeys(_TRUE.split(), True),
    **dict.fromkeys(_FALSE.split(), False),
    **dict.fromkeys(("gate_modules", "moe_layers", "num_experts"), ()),
    **dict.fromkeys(("mp_world_size", "sequence_parallel_size"), 1),
    **{"checkpoint_mp_rank": 0, "dist_backend": "gloo"},
    **dict.fromkeys(("get_model_parallel_rank", "get_tensor_parallel_rank"), lambda _: 0),
    **dict.fromkeys(("get_sequence_parallel_group", "clip_fp32_gradients"), lambda _: None),  # `step()` clips
    "is_deepcompile_active": lambda _: False,
}
"""Names of DeepSpeed's engine that answer the same in every training without parallelism but that of data."""


@cache
def deepspeed_names() -> dict[str, Any]:
    """Return the names that DeepSpeed's engine answers from its config alone, each with its method, and `_SAME`."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    def reads_config(one: Any) -> bool:
        return isfunction(one) and one.__code__.co_argcount == 1 and "_config" in one.__code__.co_names

    theirs = vars(DeepSpeedEngine).items()
    return {name: one for name, one in theirs if name in _INDIRECT or (name[0] != "_" and reads_config(one))} | _SAME
