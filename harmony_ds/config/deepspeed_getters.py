"""The getters of DeepSpeed's engine that this engine answers, too: by name, and what answers each."""

from __future__ import annotations

from typing import Any

ANSWERED_BY_DEEPSPEED = frozenset(
    """
    aio_config autotp_size autotuning_enabled autotuning_end_profile_step autotuning_metric autotuning_metric_path
    autotuning_model_info_path autotuning_profile_model_info autotuning_start_profile_step
    bf16_master_weights_and_gradients bf16_optimizer_states bfloat16_enabled
    checkpoint_serialization_enabled checkpoint_tag_validation_enabled checkpoint_tag_validation_fail
    checkpoint_writer_enabled communication_data_type compile_autosp compile_autotp compile_zero_optimization_stage
    cpuadam_cores_perc curriculum_learning_config curriculum_learning_enabled
    data_efficiency_config data_efficiency_enabled data_sampling_config data_sampling_enabled dataloader_drop_last
    dump_state dynamic_loss_scale dynamic_loss_scale_args
    flops_profiler_detailed flops_profiler_enabled flops_profiler_module_depth flops_profiler_output_file
    flops_profiler_profile_step flops_profiler_recompute_fwd_factor flops_profiler_top_modules
    fp16_auto_cast fp16_enabled fp16_master_weights_and_gradients
    gradient_clipping gradient_predivide_factor initial_dynamic_scale is_deepcompile_enabled
    is_first_weights_partition_group is_sanity_checks_enabled load_universal_checkpoint log_level loss_scale
    managed_gradient_accumulation memory_breakdown optimizer_legacy_fusion optimizer_name optimizer_params
    postscale_gradients random_ltd_config random_ltd_enabled scheduler_name scheduler_params steps_per_print
    super_offload swap_tensor_config tensor_parallel_config
    torch_autocast_dtype torch_autocast_enabled torch_autocast_lower_precision_safe_modules
    use_node_local_storage uses_parallelization_pass_only wall_clock_breakdown zenflow_config
    zero_allgather_bucket_size zero_allgather_partitions zero_allgather_sequential zero_allow_untested_optimizer
    zero_compute_grad_norm zero_contiguous_gradients zero_cpu_offload zero_elastic_checkpoint
    zero_force_ds_cpu_optimizer zero_gather_16bit_weights_on_model_save zero_hpz_partition_size
    zero_ignore_unused_parameters zero_legacy_stage1 zero_load_from_fp32_weights zero_log_trace_cache_warnings
    zero_max_live_parameters zero_max_reuse_distance zero_model_persistence_threshold
    zero_module_granularity_threshold zero_multi_rank_bucket_allreduce zero_offload_optimizer zero_offload_param
    zero_optimization zero_optimization_partition_gradients zero_optimization_partition_weights
    zero_optimization_stage zero_overlap_comm zero_param_persistence_threshold zero_parameter_alignment
    zero_partial_offload zero_prefetch_bucket_size zero_quantized_gradients zero_quantized_nontrainable_weights
    zero_quantized_weights zero_reduce_bucket_size zero_reduce_scatter zero_round_robin_gradients
    zero_save_muon_momentum_buffer_in_memory zero_sub_group_size zero_use_cpu_optimizer
    """.split()
)
"""Getters whose code in `DeepSpeedEngine` reads the ds_config and nothing else, so that it runs here as it is."""

CONSTANT_ATTRIBUTES: dict[str, Any] = {
    "all_to_all_group": None,
    "local_all_to_all_group": None,
    "loaded_checkpoint_dp_world_size": None,
    "loaded_checkpoint_mp_world_size": None,
    "losses": None,
    "mesh_device": None,
    "mpu": None,
    "scale_wrt_gas": None,
    "torch_autocast_z0_gradscaler": None,
    "enable_backward_allreduce": True,
    "gradient_average": True,
    "save_zero_checkpoint": True,
    "save_non_zero_checkpoint": True,
    "warn_unscaled_loss": True,
    "dont_change_device": False,
    "has_moe_layers": False,
    "optimized_linear_base_weight_sharding": False,
    "optimized_linear_lora_enabled": False,
    "pipeline_parallelism": False,
    "use_ds_comm": False,
    "zenflow": False,
    "gate_modules": (),
    "moe_layers": (),
    "num_experts": (),
    "mp_world_size": 1,
    "sequence_parallel_size": 1,
    "checkpoint_mp_rank": 0,
    "dist_backend": "gloo",
}
"""Attributes of DeepSpeed's engine that have one value in every training without parallelism but that of data."""

CONSTANT_METHODS: dict[str, Any] = {
    "get_model_parallel_rank": 0,
    "get_tensor_parallel_rank": 0,
    "get_sequence_parallel_group": None,
    "clip_fp32_gradients": None,  # `step()` clips
    "is_deepcompile_active": False,
}
"""Methods without arguments of DeepSpeed's engine, each with what it returns in every such training."""

DEEPSPEED_NAMES = ANSWERED_BY_DEEPSPEED | CONSTANT_ATTRIBUTES.keys() | CONSTANT_METHODS.keys()
