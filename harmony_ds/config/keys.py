"""Every key of a ds_config, once: what it does here, the values it takes, its default.

The names and defaults are those of DeepSpeed 0.19.8 (a test compares them with its models). Dots lead into blocks.
`docs/config.md` is generated from this table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from harmony_ds.config.kinds import (
    ANYTHING,
    BLOCK,
    FLAG,
    INTEGER,
    LOSS_SCALE,
    NUMBER,
    TEXT,
    Kind,
    choice,
    optional,
    scale_integer,
    within,
)


class Effect(Enum):
    """What becomes of a key's value."""

    SAME = "same"
    DIFFERENT = "differently"
    NONE = "no meaning"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Key:
    """One key.

    Attributes:
        path: its names from the top, joined by dots.
        default: DeepSpeed's.
        note: how it is honoured; for REFUSED, the reason and what to do instead.
        open: a block whose inside is not listed here.
        switch: for an open block that is refused: the key in it that turns it on, and what leaving it out means.
        older: a name of older versions, which DeepSpeed 0.19.8 does not read or refuses.
    """

    path: str
    effect: Effect
    kind: Kind = ANYTHING
    default: object = None
    note: str = ""
    open: bool = False
    switch: tuple[str, object] = ("enabled", True)
    older: bool = False


SAME, DIFFERENT, NONE, REFUSED = Effect.SAME, Effect.DIFFERENT, Effect.NONE, Effect.REFUSED
_SIZE = within(INTEGER, least=0)
_SHARE = within(NUMBER, least=0, most=1)
DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
}
"""DeepSpeed's names of dtypes."""
_DTYPE = choice(*DTYPES)
_OFFLOAD = choice("none", "cpu", "nvme")
_ALONE = "several processes"
_SPEED = "DeepSpeed's own buffers and communication"
_OLD = "an older DeepSpeed's; 0.19.8 refuses it"


def _top() -> Iterator[Key]:
    yield Key("train_batch_size", SAME, note="micro-batch * accumulation steps * processes; the third follows")
    yield Key("train_micro_batch_size_per_gpu", SAME)
    yield Key("gradient_accumulation_steps", SAME, note="micro-batches in a group")
    yield Key("gradient_clipping", SAME, NUMBER, 1.0, "above 0, updates run under the next forward pass")
    yield Key("managed_gradient_accumulation", SAME, FLAG, True, "off: every step() ends a group")
    yield Key("steps_per_print", SAME, note="lines as DeepSpeed's, through logging")
    yield Key("wall_clock_breakdown", DIFFERENT, FLAG, False, "`time (ms)` lines, with swap_in and swap_out")
    yield Key("memory_breakdown", DIFFERENT, FLAG, False, "the memory report after each step")
    yield Key("dump_state", SAME, FLAG, False, "logs the settings at initialize")
    yield Key(
        "log_level", SAME, optional(choice("debug", "info", "warning", "error", "critical")), None, "of our logger"
    )
    yield Key("dataloader_drop_last", SAME, FLAG, False)
    yield Key("zero_allow_untested_optimizer", DIFFERENT, FLAG, False, "any elementwise optimizer runs")
    yield Key("zero_force_ds_cpu_optimizer", DIFFERENT, FLAG, True, "any elementwise optimizer runs")
    yield Key("prescale_gradients", NONE, FLAG, False, _ALONE)
    yield Key("gradient_predivide_factor", NONE, NUMBER, 1.0, _ALONE)
    yield Key("gradient_allreduce_op", NONE, choice("mean", "sum"), "mean", _ALONE)
    yield Key("communication_data_type", NONE, ANYTHING, None, _ALONE)
    yield Key("seq_parallel_communication_data_type", NONE, ANYTHING, "fp32", _ALONE)
    yield Key("disable_allgather", NONE, FLAG, False, _ALONE)
    yield Key("disable_python_gc", NONE, FLAG, False, "the engine leaves Python's garbage collector alone")
    yield Key("use_data_before_expert_parallelism", NONE, FLAG, False, _ALONE)
    yield Key("vocabulary_size", NONE, ANYTHING, None, "DeepSpeed warns unless it is a multiple of 8")
    yield Key("pipeline", NONE, BLOCK, {}, "DeepSpeed reads it for a PipelineModule only", open=True)
    yield Key("harmony", SAME, BLOCK, {}, "our own, see above", open=True)


def _sections() -> Iterator[Key]:
    yield Key("optimizer.type", SAME, TEXT, None, "see below")
    yield Key("optimizer.params", SAME, BLOCK, None, "handed to the optimizer", open=True)
    yield Key("optimizer.legacy_fusion", NONE, FLAG, False, "of FusedLamb")
    yield Key("scheduler.type", SAME, TEXT, None, "DeepSpeed's lr_schedules, then torch.optim.lr_scheduler")
    yield Key("scheduler.params", SAME, BLOCK, None, "handed to the scheduler", open=True)


def _precision() -> Iterator[Key]:
    yield Key("fp16.enabled", SAME, FLAG, False)
    yield Key("fp16.loss_scale", SAME, LOSS_SCALE, 0.0, "0 is dynamic")
    yield Key("fp16.initial_scale_power", SAME, INTEGER, 16)
    yield Key("fp16.loss_scale_window", SAME, scale_integer("fp16.loss_scale_window"), 1000)
    yield Key("fp16.hysteresis", SAME, INTEGER, 2)
    yield Key("fp16.consecutive_hysteresis", SAME, FLAG, False)
    yield Key("fp16.min_loss_scale", SAME, scale_integer("fp16.min_loss_scale"), 1)
    yield Key("fp16.auto_cast", REFUSED, FLAG, False, "cast the inputs to half where they are made")
    yield Key("fp16.fp16_master_weights_and_grads", REFUSED, FLAG, False, "masters are fp32 here; leave it out")
    for block in ("bf16", "bfloat16"):
        yield Key(f"{block}.enabled", SAME, FLAG, False)
        yield Key(
            f"{block}.check_grad_overflow",
            DIFFERENT,
            FLAG,
            True,
            "a step with inf or NaN is skipped; with gradient_clipping 0 only if the key is given, since updates then "
            "have to wait for all gradients",
        )
        yield Key(f"{block}.immediate_grad_update", NONE, FLAG, False, _SPEED)
        yield Key(f"{block}.bf16_master_weights_and_grads", REFUSED, FLAG, False, "masters are fp32 here; leave it out")
        yield Key(f"{block}.bf16_optimizer_states", REFUSED, FLAG, False, "masters are fp32 here; leave it out")
    yield Key(
        "data_types.grad_accum_dtype",
        DIFFERENT,
        optional(_DTYPE),
        None,
        "fp32 by default; the compute dtype on request",
    )
    yield Key("data_types.param_dtype", SAME, optional(_DTYPE), None, "must be the one that fp16 and bf16 say")
    yield Key(
        "data_types.buffer_dtype",
        REFUSED,
        optional(_DTYPE),
        None,
        "buffers keep the dtype they have; cast them yourself",
    )
    yield Key("data_types.keep_in_fp32_modules", NONE, ANYTHING, "auto", "buffers keep the dtype they have")
    yield Key("torch_autocast.enabled", REFUSED, FLAG, False, "put torch.autocast around the engine's call")
    yield Key("torch_autocast.dtype", NONE, ANYTHING, None, "with torch_autocast.enabled")
    yield Key("torch_autocast.lower_precision_safe_modules", NONE, ANYTHING, None, "with torch_autocast.enabled")


def _zero() -> Iterator[Key]:
    zero = "zero_optimization."
    yield Key(zero + "stage", DIFFERENT, choice(0, 1, 2, 3), 0, "what the engine reports; weights are swapped anyway")
    for name in ("contiguous_gradients", "reduce_scatter", "use_multi_rank_bucket_allreduce", "allgather_partitions"):
        yield Key(zero + name, NONE, FLAG, True, _SPEED)
    yield Key(zero + "reduce_bucket_size", NONE, within(INTEGER, above=0), 500_000_000, _SPEED)
    yield Key(zero + "allgather_bucket_size", NONE, _SIZE, 500_000_000, _SPEED)
    yield Key(zero + "overlap_comm", NONE, optional(FLAG), None, _SPEED)
    yield Key(zero + "compute_grad_norm", NONE, FLAG, True, "the norm is known anyway")
    yield Key(zero + "load_from_fp32_weights", NONE, FLAG, True, "masters are saved and loaded")
    yield Key(zero + "elastic_checkpoint", NONE, FLAG, False, _ALONE)
    yield Key(zero + "sub_group_size", NONE, _SIZE, 1_000_000_000, "updates go layer by layer")
    for name, default in (
        ("prefetch_bucket_size", 50_000_000),
        ("param_persistence_threshold", 100_000),
        ("model_persistence_threshold", 2**63 - 1),
        ("max_live_parameters", 1_000_000_000),
        ("max_reuse_distance", 1_000_000_000),
    ):
        for prefix in ("stage3_", ""):
            yield Key(zero + prefix + name, NONE, _SIZE, default, "the plan decides, under harmony.device_memory_gib")
    for prefix in ("stage3_", ""):
        yield Key(zero + prefix + "gather_16bit_weights_on_model_save", SAME, FLAG, False, "of save_16bit_model")
        yield Key(zero + prefix + "module_granularity_threshold", NONE, INTEGER, 0, "see harmony.layers")
        yield Key(zero + prefix + "use_all_reduce_for_fetch_params", NONE, FLAG, False, _ALONE)
        yield Key(zero + prefix + "allgather_sequential", NONE, FLAG, False, _ALONE)
    yield Key(zero + "stage3_gather_fp16_weights_on_model_save", SAME, FLAG, False, "an older name")
    yield Key(zero + "ignore_unused_parameters", NONE, FLAG, True, "parameters without a gradient are left as they are")
    for name in ("legacy_stage1", "round_robin_gradients", "parameter_alignment", "log_trace_cache_warnings"):
        yield Key(zero + name, NONE, FLAG, False, _SPEED)
    yield Key(zero + "zero_hpz_partition_size", NONE, _SIZE, 1, _ALONE)
    yield Key(zero + "zero_quantized_weights", NONE, FLAG, False, _ALONE)
    yield Key(zero + "zero_quantized_gradients", NONE, FLAG, False, _ALONE)
    yield Key(
        zero + "zero_quantized_nontrainable_weights", REFUSED, FLAG, False, "weights are not quantized; leave it out"
    )
    yield Key(zero + "memory_efficient_linear", NONE, FLAG, True, "layers are recomputed anyway")
    yield Key(zero + "pipeline_loading_checkpoint", NONE, FLAG, False, _ALONE)
    yield Key(zero + "override_module_apply", NONE, FLAG, True, "parameters are never partitioned")
    yield Key(zero + "enable_sanity_checks", NONE, FLAG, False, "they are always on")
    yield Key(zero + "save_muon_momentum_buffer_in_memory", NONE, FLAG, False, "of Muon with NVMe")
    yield Key(zero + "leaf_module", NONE, BLOCK, {}, "see harmony.layers", open=True)
    yield Key(zero + "zenflow", REFUSED, optional(BLOCK), None, "its updates are stale; leave it out", True)
    yield Key(zero + "cpu_offload", DIFFERENT, optional(FLAG), None, "an older name of offload_optimizer")
    yield Key(zero + "cpu_offload_param", DIFFERENT, optional(FLAG), None, "an older name of offload_param")
    yield Key(zero + "cpu_offload_use_pin_memory", NONE, optional(FLAG), None, "DeepSpeed only warns of it")
    for name in ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"):
        yield Key(zero + name, REFUSED, ANYTHING, None, f"{_OLD}; leave it out", open=True, older=True)


def _offload() -> Iterator[Key]:
    for block in ("offload_param", "offload_optimizer"):
        path = f"zero_optimization.{block}."
        yield Key(path + "device", DIFFERENT, _OFFLOAD, "none", "training state starts from the host; nvme is refused")
        yield Key(path + "nvme_path", NONE, optional(TEXT), None, "with nvme")
        yield Key(path + "pin_memory", SAME, FLAG, True, "unless harmony.pin_memory says so")
        yield Key(path + "buffer_count", NONE, _SIZE, 5 if block == "offload_param" else 4, "with nvme")
    path = "zero_optimization.offload_param."
    yield Key(path + "buffer_size", NONE, _SIZE, 100_000_000, "with nvme")
    yield Key(path + "max_in_cpu", NONE, _SIZE, 1_000_000_000, "with nvme")
    path = "zero_optimization.offload_optimizer."
    for name in ("pipeline_read", "pipeline_write", "fast_init"):
        yield Key(path + name, NONE, FLAG, False, "with nvme")
    yield Key(path + "ratio", NONE, _SHARE, 1.0, "the plan decides what is updated on the device: harmony.residency")
    yield Key(path + "super_offload", NONE, FLAG, False, "updates run beside the layers anyway")
    yield Key(path + "cpuadam_cores_perc", NONE, _SHARE, 0.8, "of super_offload")


def _monitors() -> Iterator[Key]:
    for block in ("tensorboard", "csv_monitor"):
        yield Key(f"{block}.enabled", SAME, FLAG, False, "through DeepSpeed's monitor package")
        yield Key(f"{block}.output_path", SAME, TEXT, "")
        yield Key(f"{block}.job_name", SAME, TEXT, "DeepSpeedJobName")
    yield Key("wandb.enabled", SAME, FLAG, False, "through DeepSpeed's monitor package")
    yield Key("wandb.group", SAME, optional(TEXT))
    yield Key("wandb.team", SAME, optional(TEXT))
    yield Key("wandb.project", SAME, TEXT, "deepspeed")
    yield Key("comet.enabled", SAME, FLAG, False, "through DeepSpeed's monitor package")
    yield Key("comet.samples_log_interval", SAME, INTEGER, 100)
    for name in ("project", "workspace", "api_key", "experiment_name", "experiment_key", "mode"):
        yield Key(f"comet.{name}", SAME, optional(TEXT))
    yield Key("comet.online", SAME, optional(FLAG))
    yield Key("timers.throughput.enabled", SAME, FLAG, True, "samples per second, with steps_per_print")
    yield Key("timers.throughput.synchronized", NONE, FLAG, True, "the host's clock, from step to step")
    yield Key("comms_logger", NONE, BLOCK, {}, _ALONE, open=True)
    yield Key("flops_profiler.enabled", REFUSED, FLAG, False, "use harmony-ds profile or torch.utils.flop_counter")
    for name, default in (
        ("recompute_fwd_factor", 0.0),
        ("profile_step", 1),
        ("module_depth", -1),
        ("top_modules", 1),
        ("detailed", True),
        ("output_file", None),
    ):
        yield Key(f"flops_profiler.{name}", NONE, ANYTHING, default, "with flops_profiler.enabled")


def _files() -> Iterator[Key]:
    modes = choice("WARN", "IGNORE", "FAIL", upper=True)
    yield Key("checkpoint.tag_validation", NONE, modes, "WARN", "one process has one tag")
    yield Key("checkpoint.load_universal", SAME, FLAG, False)
    yield Key("checkpoint.use_node_local_storage", NONE, FLAG, False, _ALONE)
    yield Key("checkpoint.parallel_write.pipeline_stage", NONE, FLAG, False, _ALONE)
    yield Key("checkpoint.checkpoint_serialization", NONE, FLAG, True, "checkpoints are safetensors")
    yield Key("checkpoint.writer", NONE, optional(BLOCK), None, "checkpoints are safetensors", open=True)
    checkpointing = "layers are always recomputed; harmony.stash says where inputs wait"
    for name in (
        "partition_activations",
        "contiguous_memory_optimization",
        "synchronize_checkpoint_boundary",
        "profile",
        "cpu_checkpointing",
    ):
        yield Key(f"activation_checkpointing.{name}", NONE, FLAG, False, checkpointing)
    yield Key("activation_checkpointing.number_checkpoints", NONE, ANYTHING, None, checkpointing)
    yield Key("aio", NONE, optional(BLOCK), {}, "with nvme", open=True)


def _not_here() -> Iterator[Key]:
    for name, reason, switch in (
        ("hybrid_engine", "generation and training share one model here: call engine.generate", ("enabled", False)),
        ("data_efficiency", "sample the data yourself", ("enabled", False)),
        ("expert_parallel", "experts are layers like others; leave it out", ("enabled", False)),
        ("autotuning", "use harmony-ds plan", ("enabled", False)),
        ("weight_quantization", "weights are not quantized; leave it out", ("enabled", True)),
        ("tensor_parallel", "tensor parallelism is not supported", ("autotp_size", 0)),
        ("compile", "torch.compile the layers of the model yourself", ("deepcompile", False)),
    ):
        yield Key(name, REFUSED, BLOCK, {}, reason, open=True, switch=switch)
    yield Key("sequence_parallel_size", REFUSED, ANYTHING, 1, "sequence parallelism is not supported")
    yield Key("data_parallel_size", REFUSED, ANYTHING, 1, "one process is used")
    yield Key("datastates_ckpt", REFUSED, ANYTHING, False, "checkpoints are written by the engine itself", open=True)
    for name, reason in (
        ("amp", 'Apex AMP is not supported: use "bf16" or "fp16", or torch.autocast around the call'),
        ("compression_training", "compression training is not supported"),
        ("sparse_attention", "sparse attention is not supported"),
        ("nebula", "Nebula is not supported"),
        ("quantize_training", "quantized training is not supported"),
        ("sparse_gradients", "gradients of embeddings are dense here"),
        ("eigenvalue", "quantized training is not supported"),
        ("elasticity", "elastic training is not supported: set the batch sizes"),
        ("graph_harvesting", "graphs are not captured"),
        ("curriculum_learning", "order the data yourself"),
        ("progressive_layer_drop", "drop layers in the model itself"),
    ):
        yield Key(name, REFUSED, ANYTHING, None, reason, open=True, older=True)


KEYS: tuple[Key, ...] = (
    *_top(),
    *_sections(),
    *_precision(),
    *_zero(),
    *_offload(),
    *_monitors(),
    *_files(),
    *_not_here(),
)
BY_PATH: dict[str, Key] = {key.path: key for key in KEYS}
BLOCKS: frozenset[str] = frozenset(
    ".".join(parts[:depth]) for key in KEYS for parts in [key.path.split(".")] for depth in range(1, len(parts))
)
"""Paths of blocks whose keys are listed."""


def names_in(block: str) -> frozenset[str]:
    """The keys that `block` may hold ("": the top)."""
    prefix = f"{block}." if block else ""
    return frozenset(path[len(prefix) :].split(".")[0] for path in BY_PATH if path.startswith(prefix))
