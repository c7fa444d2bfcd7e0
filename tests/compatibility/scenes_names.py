"""Rows about the names that scripts read from the engine, its optimizer and its loss scaler."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from tests.compatibility.engines import Api, Net, batches, config, net, train
from tests.compatibility.record import Script

ZERO_3 = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
FP16 = {"enabled": True, "initial_scale_power": 8}
RUNS: dict[str, dict[str, Any]] = {
    "stage 2": {},
    "stage 3": {"zero_optimization": ZERO_3},
    "stage 2, fp16": {"fp16": FP16},
    "stage 2, fp16 with a static scale": {"fp16": {"enabled": True, "loss_scale": 128}},
    "stage 2, bf16": {"bf16": {"enabled": True}},
    "stage 3, fp16, clipped": {"zero_optimization": ZERO_3, "fp16": FP16, "gradient_clipping": 0.5},
}
OF_OPTIMIZER = """
    overflow cur_scale loss_scale dynamic_loss_scale custom_loss_scaler external_loss_scale clip_grad dtype
    communication_data_type gradient_accumulation_steps master_weights_and_grads_dtype torch_autocast_gradscaler
    model_parallel_rank model_parallel_group sequence_parallel_size zenflow bf16_master_weights_and_gradients
    fp16_master_weights_and_gradients bf16_optimizer_states reduce_bucket_size contiguous_gradients reduce_scatter
    elastic_checkpoint
""".split()
OF_STAGE_2 = """
    cpu_offload check_grad_overflow zero_stage_string partition_gradients allgather_bucket_size
    ignore_unused_parameters mpu model_parallel_world_size has_moe_layers ep_process_group expert_dp_process_group
    gradient_average low_precision_master_weights_and_grads
""".split()
OF_STAGE_3 = "offload_optimizer offload_param sub_group_size use_muon swap_optimizer optimizer_swapper".split()
OF_SCALER = "cur_scale loss_scale dynamic".split()
OF_DYNAMIC_SCALER = """
    cur_iter last_overflow_iter cur_hysteresis scale_window min_scale delayed_shift consecutive_hysteresis
    scale_factor raise_error_at_min_scale dtype
""".split()
OF_ENGINE = """
    all_to_all_group checkpoint_mp_rank dist_backend dont_change_device enable_backward_allreduce gate_modules
    gradient_average loaded_checkpoint_mp_world_size local_all_to_all_group losses mesh_device moe_layers num_experts
    optimized_linear_base_weight_sharding optimized_linear_lora_enabled save_non_zero_checkpoint
    save_zero_checkpoint scale_wrt_gas torch_autocast_z0_gradscaler use_ds_comm warn_unscaled_loss zenflow
""".split()
METHODS = """
    autotuning_metric autotuning_profile_model_info checkpoint_serialization_enabled
    checkpoint_tag_validation_enabled checkpoint_tag_validation_fail checkpoint_writer_enabled compile_autosp
    compile_autotp compile_zero_optimization_stage curriculum_learning_config curriculum_learning_enabled
    data_efficiency_config data_efficiency_enabled data_sampling_config data_sampling_enabled flops_profiler_detailed
    flops_profiler_module_depth flops_profiler_output_file flops_profiler_profile_step
    flops_profiler_recompute_fwd_factor flops_profiler_top_modules random_ltd_config random_ltd_enabled
    torch_autocast_lower_precision_safe_modules uses_parallelization_pass_only
    zero_save_muon_momentum_buffer_in_memory
""".split()


def names(api: Api, script: Script) -> None:
    """What the wrapper around the optimizer answers, in every precision."""
    for run, more in RUNS.items():
        with api.engine(config(2, **more)) as engine:
            train(engine, 2)
            optimizer, scaler = engine.optimizer, engine.optimizer.loss_scaler
            own = OF_STAGE_3 if run.startswith("stage 3") else OF_STAGE_2
            script.row(
                f"names of optimizer, {run}", lambda optimizer=optimizer, own=own: of(optimizer, OF_OPTIMIZER + own)
            )
            dynamic = OF_DYNAMIC_SCALER if "fp16" in more and "static" not in run else []
            script.row(
                f"names of optimizer.loss_scaler, {run}", lambda scaler=scaler, d=dynamic: of(scaler, OF_SCALER + d)
            )
            script.row(
                f"optimizer.optimizer, {run}",
                lambda engine=engine: [type(engine.optimizer.optimizer).__name__, engine.get_lr()],
            )
            script.row(f"optimizer.optimizer is basic_optimizer, {run}", lambda engine=engine: is_basic(engine))
            script.row(f"optimizer.get_lr(), set_lr(), {run}", lambda optimizer=optimizer: rates(optimizer))
            script.row(f"optimizer.needs_scaler(), {run}", engine.optimizer.needs_scaler)
            script.row(
                f"an attribute that no optimizer has, {run}", lambda o=optimizer: o.no_such_thing, "no_such_thing"
            )
            if not more:
                script.row("names of the engine, fixed", lambda engine=engine: of(engine, OF_ENGINE))
                script.row("param_names", lambda engine=engine: sorted(engine.param_names.values()))
                for name in METHODS:
                    script.row(f"engine.{name}()", getattr(engine, name))
            if run in ("stage 2", "stage 3"):
                script.row(f"{PUBLIC} engine, {run}", lambda engine=engine: public(engine))
                script.row(f"{PUBLIC} engine.optimizer, {run}", lambda optimizer=optimizer: public(optimizer))


def without_zero(api: Api, script: Script) -> None:
    """The optimizer of stage 0."""
    model = net()
    client = torch.optim.SGD(model.parameters(), 0.01)
    with api.engine(config(1, zero_optimization={"stage": 0}), model=model, optimizer=client) as engine:
        script.row("engine.optimizer == the client's, stage 0", lambda: engine.optimizer == client)


PUBLIC = "public names of"


def of(one: Any, asked: list[str]) -> dict[str, Any]:
    return {name: getattr(one, name) for name in asked}


def public(one: Any) -> list[str]:
    return [name for name in dir(one) if not name.startswith(("_", "ds_"))]


def is_basic(engine: Any) -> bool:
    same: bool = engine.optimizer.optimizer is engine.basic_optimizer
    return same


def rates(optimizer: Any) -> list[float]:
    before = optimizer.get_lr()
    optimizer.set_lr(0.5)
    return [before, optimizer.get_lr(), optimizer.optimizer.param_groups[0]["lr"]]


def partitioned(api: Api, script: Script) -> None:
    """Models that are built under DeepSpeed's own zero.Init."""
    import deepspeed

    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed insists on it
    api.package.init_distributed()
    for dtype, more in (("fp32", {}), ("bf16", {"bf16": {"enabled": True}})):
        ds_config = config(2, zero_optimization=ZERO_3, **more)
        torch.manual_seed(3)
        with deepspeed.zero.Init(config_dict_or_path=ds_config):
            model = Net()
        with api.engine(ds_config, model=model) as engine:
            script.row(f"stock zero.Init, {dtype}: losses", lambda engine=engine: {"about": train(engine, 3)})


def loaded(api: Api, script: Script, folder: Path) -> None:
    """The loss scale's names after load_checkpoint."""
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    with api.engine(config(1, fp16=fp16)) as engine:
        for good in (True, False, True):
            inputs, targets = batches(1)[0]
            engine.backward(engine(inputs, targets if good else targets * float("inf")))
            engine.step()
        engine.save_checkpoint(str(folder), tag="half")
    with api.engine(config(1, fp16=fp16), model=net()) as engine:
        engine.load_checkpoint(str(folder), tag="half")
        asked = ["cur_scale", "loss_scale", "overflow", "dynamic_loss_scale"]
        script.row("load_checkpoint: names of the optimizer", lambda: of(engine.optimizer, asked))
        scaler = ["cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"]
        script.row("load_checkpoint: names of the loss scaler", lambda: of(engine.optimizer.loss_scaler, scaler))
