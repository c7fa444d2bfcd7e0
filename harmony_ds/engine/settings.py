"""The many small methods by which scripts ask DeepSpeed's engine for its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import MethodType
from typing import Any

import torch

from harmony_ds.config import Config
from harmony_ds.config.key import Getter, Key
from harmony_ds.config.keys import KEYS
from harmony_ds.config.optimizers import named
from harmony_ds.errors import ConfigError
from harmony_ds.parallel import SingleProcess


class Settings:
    """Answers from a ds_config whose batch sizes may change.

    What the value of one key answers comes from the table of keys, see `table_getters`; here is what has to be worked out.
    """

    def __init__(self, config: Config, world: SingleProcess) -> None:
        self.now = config
        self._world = world

    def of_deepspeed(self) -> Any:
        """DeepSpeed's own view of the ds_config, made when somebody asks for it."""
        from deepspeed.runtime.config import DeepSpeedConfig

        batch, micro_batch, steps = self.get_batch_info()
        sizes = {
            "train_batch_size": batch,
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": steps,
        }
        return DeepSpeedConfig({**self.now.raw, **sizes})

    # ---- batch sizes

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in a group."""
        return self.now.gradient_accumulation_steps

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples in a micro-batch."""
        return self.now.micro_batch

    def train_batch_size(self) -> int:
        """Samples in a group."""
        return self.now.train_batch_size

    def get_batch_info(self) -> tuple[int, int, int]:
        """Batch size, micro-batch size, accumulation steps."""
        return self.now.train_batch_size, self.now.micro_batch, self.now.gradient_accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the number of micro-batches in a group.

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
        """Changes the size of micro-batches, and of batches with it."""
        if micro_batch_size <= 0:
            raise ConfigError(f"Micro batch size per gpu: {micro_batch_size} has to be greater than 0")
        self._resize(micro_batch_size, self.now.gradient_accumulation_steps)

    def _resize(self, micro_batch: int, steps: int) -> None:
        self.now = replace(
            self.now,
            micro_batch=micro_batch,
            gradient_accumulation_steps=steps,
            train_batch_size=micro_batch * steps * self._world.size,
        )

    # ---- processes

    def get_data_parallel_rank(self) -> int:
        """Return this process's rank among all that train the model, by which loaders share out their data."""
        return self._world.rank

    # ---- optimizer and precision

    def optimizer_name(self) -> str | None:
        """The ds_config's optimizer, DeepSpeed's own in small letters."""
        section = self.now.optimizer
        if section is None:
            return None
        row = named(section.type)
        return section.type.lower() if row is not None and row.of_deepspeed else section.type

    def bfloat16_enabled(self) -> bool:
        """Whether layers compute in bf16."""
        return self.now.compute_dtype == torch.bfloat16

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """What layers compute in, and what gradients are added up in."""
        return self.now.compute_dtype, self.now.accumulation_dtype

    def communication_data_type(self) -> torch.dtype:
        """What DeepSpeed's processes would exchange gradients in."""
        asked = self.now.values["communication_data_type"]
        known = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
        return self.now.compute_dtype if asked is None else known[str(asked).lower()]


_DEEPSPEEDS = """
    aio_config autotp_size autotuning_metric autotuning_metric_path autotuning_model_info_path
    autotuning_profile_model_info checkpoint_serialization_enabled checkpoint_tag_validation_enabled
    checkpoint_tag_validation_fail checkpoint_writer_enabled compile_autosp compile_autotp
    compile_zero_optimization_stage curriculum_learning_config curriculum_learning_enabled data_efficiency_config
    data_efficiency_enabled data_sampling_config data_sampling_enabled dynamic_loss_scale_args flops_profiler_detailed
    flops_profiler_module_depth flops_profiler_output_file flops_profiler_profile_step
    flops_profiler_recompute_fwd_factor flops_profiler_top_modules initial_dynamic_scale random_ltd_config
    random_ltd_enabled swap_tensor_config tensor_parallel_config torch_autocast_dtype
    torch_autocast_lower_precision_safe_modules uses_parallelization_pass_only zero_offload_optimizer
    zero_offload_param zero_save_muon_momentum_buffer_in_memory
""".split()
"""What DeepSpeed's engine answers from its view of the ds_config alone: asked of its own methods."""
FIXED_ATTRIBUTES: dict[str, Any] = {
    **dict.fromkeys(
        """
        all_to_all_group local_all_to_all_group loaded_checkpoint_dp_world_size loaded_checkpoint_mp_world_size losses
        mesh_device mpu scale_wrt_gas torch_autocast_z0_gradscaler
        """.split()
    ),
    **dict.fromkeys("gate_modules moe_layers num_experts".split(), ()),
    **dict.fromkeys(
        """
        enable_backward_allreduce gradient_average save_zero_checkpoint save_non_zero_checkpoint warn_unscaled_loss
        """.split(),
        True,
    ),
    **dict.fromkeys(
        """
        dont_change_device has_moe_layers optimized_linear_base_weight_sharding optimized_linear_lora_enabled
        pipeline_parallelism use_ds_comm zenflow
        """.split(),
        False,
    ),
    "checkpoint_mp_rank": 0,
    "dist_backend": "gloo",
    "mp_world_size": 1,
    "sequence_parallel_size": 1,
}
"""Attributes of DeepSpeed's engine that are the same in every training of one process."""
_FIXED = {
    "autotuning_enabled": False,
    "zenflow_config": None,
    "get_model_parallel_rank": 0,
    "get_tensor_parallel_rank": 0,
    "get_sequence_parallel_group": None,
    "is_deepcompile_enabled": False,
    "is_deepcompile_active": False,
    "clip_fp32_gradients": None,  # `step()` clips
}
"""What is answered whatever the ds_config says: blocks that are refused, and no parallelism but that of data."""


def table_getters() -> Iterator[tuple[str, Callable[[Settings], Any]]]:
    """Names and methods: one for each row of these tables, and of the table of keys."""
    for key in KEYS:
        yield from ((getter.name, _reading(key, getter)) for getter in key.getters)
    yield from ((name, _asking_deepspeed(name)) for name in _DEEPSPEEDS)
    yield from ((name, _answering(answer)) for name, answer in _FIXED.items())


def _reading(key: Key, getter: Getter) -> Callable[[Settings], Any]:
    def read(settings: Settings) -> Any:
        return getter.answer(settings.now.values[key.path])

    asked = f" {getter.relation} {getter.operand!r}" if getter.relation else ""
    read.__doc__ = f"The ds_config's `{key.path}`{asked}."
    return read


class _OnlyConfig:
    """A DeepSpeed engine that has nothing but its view of the ds_config."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        from deepspeed.runtime.engine import DeepSpeedEngine

        return MethodType(getattr(DeepSpeedEngine, name), self)


def _asking_deepspeed(name: str) -> Callable[[Settings], Any]:
    def ask(settings: Settings) -> Any:
        return getattr(_OnlyConfig(settings.of_deepspeed()), name)()

    ask.__doc__ = f"`{name}` of DeepSpeed's engine, from its own view of the ds_config."
    return ask


def _answering(answer: object) -> Callable[[Settings], Any]:
    return lambda _: answer
