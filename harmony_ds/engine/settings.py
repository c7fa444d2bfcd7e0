"""The many small methods by which scripts ask DeepSpeed's engine for its settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from harmony_ds.config import Config

_ZERO = "zero_optimization."


def _value(path: str) -> Callable[[Any], Any]:
    """A method that returns the value of the key at `path`."""

    def read(self: Settings) -> Any:
        return self._settings.values[path]

    read.__doc__ = f"The ds_config's `{path}`."
    return read


class Settings:
    """Answers from `_settings`. In one process every rank is 0 and every world has one member."""

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
        return section.type.lower() if section.type.lower() in _DEEPSPEEDS else section.type

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

    optimizer_legacy_fusion = _value("optimizer.legacy_fusion")
    managed_gradient_accumulation = _value("managed_gradient_accumulation")
    dataloader_drop_last = _value("dataloader_drop_last")

    # ---- precision

    fp16_enabled = _value("fp16.enabled")
    fp16_auto_cast = _value("fp16.auto_cast")
    fp16_master_weights_and_gradients = _value("fp16.fp16_master_weights_and_grads")
    loss_scale = _value("fp16.loss_scale")
    torch_autocast_enabled = _value("torch_autocast.enabled")

    def bfloat16_enabled(self) -> bool:
        """Whether layers compute in bf16."""
        return self._settings.compute_dtype == torch.bfloat16

    def bf16_master_weights_and_gradients(self) -> bool:
        """Masters are fp32."""
        return False

    def bf16_optimizer_states(self) -> bool:
        """The optimizer's state is fp32."""
        return False

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows (with fp16)."""
        return bool(self.loss_scale() == 0)

    def initial_dynamic_scale(self) -> float:
        """Where a dynamic loss scale begins."""
        return float(2 ** self._settings.values["fp16.initial_scale_power"])

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """The dynamic loss scale's settings, under DeepSpeed's names."""
        values = self._settings.values
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": values["fp16.loss_scale_window"],
            "delayed_shift": values["fp16.hysteresis"],
            "consecutive_hysteresis": values["fp16.consecutive_hysteresis"],
            "min_scale": values["fp16.min_loss_scale"],
        }

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
        return bool(self._settings.values[_ZERO + "stage"] > 0)

    zero_optimization_stage = _value(_ZERO + "stage")
    zero_allow_untested_optimizer = _value("zero_allow_untested_optimizer")
    zero_force_ds_cpu_optimizer = _value("zero_force_ds_cpu_optimizer")
    zero_reduce_scatter = _value(_ZERO + "reduce_scatter")
    zero_overlap_comm = _value(_ZERO + "overlap_comm")
    zero_sub_group_size = _value(_ZERO + "sub_group_size")
    zero_reduce_bucket_size = _value(_ZERO + "reduce_bucket_size")
    zero_multi_rank_bucket_allreduce = _value(_ZERO + "use_multi_rank_bucket_allreduce")
    zero_allgather_bucket_size = _value(_ZERO + "allgather_bucket_size")
    zero_allgather_partitions = _value(_ZERO + "allgather_partitions")
    zero_allgather_sequential = _value(_ZERO + "allgather_sequential")
    zero_compute_grad_norm = _value(_ZERO + "compute_grad_norm")
    zero_contiguous_gradients = _value(_ZERO + "contiguous_gradients")
    zero_load_from_fp32_weights = _value(_ZERO + "load_from_fp32_weights")
    zero_elastic_checkpoint = _value(_ZERO + "elastic_checkpoint")
    zero_max_live_parameters = _value(_ZERO + "max_live_parameters")
    zero_max_reuse_distance = _value(_ZERO + "max_reuse_distance")
    zero_prefetch_bucket_size = _value(_ZERO + "prefetch_bucket_size")
    zero_module_granularity_threshold = _value(_ZERO + "module_granularity_threshold")
    zero_param_persistence_threshold = _value(_ZERO + "param_persistence_threshold")
    zero_model_persistence_threshold = _value(_ZERO + "model_persistence_threshold")
    zero_gather_16bit_weights_on_model_save = _value(_ZERO + "gather_16bit_weights_on_model_save")
    zero_ignore_unused_parameters = _value(_ZERO + "ignore_unused_parameters")
    zero_legacy_stage1 = _value(_ZERO + "legacy_stage1")
    zero_round_robin_gradients = _value(_ZERO + "round_robin_gradients")
    zero_parameter_alignment = _value(_ZERO + "parameter_alignment")
    zero_hpz_partition_size = _value(_ZERO + "zero_hpz_partition_size")
    zero_quantized_weights = _value(_ZERO + "zero_quantized_weights")
    zero_quantized_gradients = _value(_ZERO + "zero_quantized_gradients")
    zero_quantized_nontrainable_weights = _value(_ZERO + "zero_quantized_nontrainable_weights")
    zero_log_trace_cache_warnings = _value(_ZERO + "log_trace_cache_warnings")
    is_sanity_checks_enabled = _value(_ZERO + "enable_sanity_checks")
    super_offload = _value(_ZERO + "offload_optimizer.super_offload")
    cpuadam_cores_perc = _value(_ZERO + "offload_optimizer.cpuadam_cores_perc")
    zero_partial_offload = _value(_ZERO + "offload_optimizer.ratio")

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether the ds_config names stage 2 or 3."""
        return bool(self._settings.values[_ZERO + "stage"] >= 2)

    def zero_optimization_partition_weights(self) -> bool:
        """Whether the ds_config names stage 3."""
        return bool(self._settings.values[_ZERO + "stage"] == 3)

    def zero_offload_optimizer(self) -> Any:
        """DeepSpeed's model of `offload_optimizer`, or None."""
        return self._config.zero_config.offload_optimizer

    def zero_offload_param(self) -> Any:
        """DeepSpeed's model of `offload_param`, or None."""
        return self._config.zero_config.offload_param

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether the ds_config has the optimizer offloaded."""
        return bool(self._settings.values[_ZERO + "offload_optimizer.device"] != "none")

    zero_cpu_offload = zero_use_cpu_optimizer

    def zero_nvme_offload_optimizer(self) -> bool:
        """No: it is refused."""
        return False

    def zenflow_config(self) -> None:
        """None: it is refused."""

    # ---- the rest

    steps_per_print = _value("steps_per_print")
    wall_clock_breakdown = _value("wall_clock_breakdown")
    memory_breakdown = _value("memory_breakdown")
    dump_state = _value("dump_state")
    log_level = _value("log_level")
    gradient_predivide_factor = _value("gradient_predivide_factor")
    load_universal_checkpoint = _value("checkpoint.load_universal")
    use_node_local_storage = _value("checkpoint.use_node_local_storage")
    flops_profiler_enabled = _value("flops_profiler.enabled")

    def postscale_gradients(self) -> bool:
        """The opposite of `prescale_gradients`."""
        return not self._settings.values["prescale_gradients"]

    def aio_config(self) -> Any:
        """DeepSpeed's reading of the `aio` block."""
        return self._config.aio_config

    def autotuning_enabled(self) -> bool:
        """No: it is refused."""
        return False

    def autotp_size(self) -> int:
        """No tensor parallelism."""
        return int(self._settings.raw.get("tensor_parallel", {}).get("autotp_size", 0))

    # ---- one process

    def get_data_parallel_rank(self) -> int:
        """This process is the only one."""
        return 0

    get_model_parallel_rank = get_tensor_parallel_rank = get_data_parallel_rank

    def get_sequence_parallel_group(self) -> None:
        """There is none."""


_DEEPSPEEDS = frozenset("adagrad adam adamw lamb muadam muadamw musgd lion muon".split())
