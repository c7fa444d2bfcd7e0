"""Rows about the engine: what initialize gives, training step by step, schedules, precision, settings."""

from __future__ import annotations

from typing import Any

import torch

from tests.compatibility.engines import ADAMW, OFFLOAD, Api, batches, config, net, train
from tests.compatibility.record import Script

Sgd = torch.optim.SGD
FORCED = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.02, "warmup_num_steps": 3, "warmup_type": "linear"},
    "WarmupDecayLR": {"total_num_steps": 6, "warmup_max_lr": 0.02, "warmup_num_steps": 2},
    "WarmupCosineLR": {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_type": "linear"},
    "OneCycle": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.02, "cycle_first_step_size": 2},
    "LRRangeTest": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2},
}
METHODS = """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping optimizer_name
    optimizer_params scheduler_name scheduler_params zero_optimization zero_optimization_stage fp16_enabled
    bfloat16_enabled loss_scale dynamic_loss_scale initial_dynamic_scale dynamic_loss_scale_args steps_per_print
    wall_clock_breakdown memory_breakdown dump_state managed_gradient_accumulation dataloader_drop_last
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_reduce_bucket_size zero_allgather_bucket_size
    zero_overlap_comm zero_contiguous_gradients zero_sub_group_size zero_max_live_parameters
    zero_prefetch_bucket_size zero_param_persistence_threshold zero_gather_16bit_weights_on_model_save
    zero_optimization_partition_gradients zero_optimization_partition_weights zero_use_cpu_optimizer
    zero_cpu_offload postscale_gradients gradient_predivide_factor load_universal_checkpoint
    use_node_local_storage get_data_parallel_rank get_sequence_parallel_group get_data_types
""".split()
ATTRIBUTES = """
    local_rank global_rank world_size dp_world_size mp_world_size device global_steps global_samples micro_steps
    skipped_steps loaded_checkpoint_dp_world_size communication_data_type is_compiled has_moe_layers mpu
    training_dataloader training_data collate_fn lr_scheduler inside_no_sync_ctxt
""".split()


def start(api: Api, script: Script) -> None:
    """What initialize returns and refuses."""
    engine, optimizer, loader, scheduler = api.start()
    script.row("initialize returns engine, optimizer, loader, scheduler", lambda: [loader, scheduler])
    script.row("engine.optimizer is the second result", lambda: engine.optimizer is optimizer)
    script.row("engine.module is the model", lambda: type(engine.module).__name__)
    script.row("engine is an nn.Module", lambda: isinstance(engine, torch.nn.Module))
    script.row("the optimizer is a torch.optim.Optimizer", lambda: isinstance(optimizer, torch.optim.Optimizer))
    script.row("engine.basic_optimizer", lambda: engine.basic_optimizer)
    script.row("engine.config", lambda: engine.config)
    script.row("engine.state_dict() keys", lambda: list(engine.state_dict()))
    script.row("engine.module_state_dict()", engine.module_state_dict)
    script.row("engine.get_batch_info()", lambda: list(engine.get_batch_info()))
    script.row("optimizer.param_groups keys", lambda: sorted(optimizer.param_groups[0]))
    script.row("engine.get_lr()", engine.get_lr)
    script.row("engine.get_mom()", engine.get_mom)
    script.row("engine.get_type()", engine.get_type)
    script.row("engine.get_global_grad_norm() before a step", engine.get_global_grad_norm)
    script.row("engine.was_step_applied() before a step", engine.was_step_applied)
    script.row("engine.train()", engine.train)
    script.row("engine.eval()", engine.eval)
    script.row("engine.module.training after eval()", lambda: engine.module.training)
    script.row("an attribute of the model", lambda: engine.first)
    script.row("an attribute that nobody has", lambda: engine.no_such_thing, "no_such_thing")
    script.row("engine.monitor.enabled", lambda: engine.monitor.enabled)
    script.row("engine.zero_grad()", engine.zero_grad)
    for name in METHODS:
        script.row(f"engine.{name}()", getattr(engine, name))
    for name in ATTRIBUTES:
        script.row(f"engine.{name}", lambda name=name: getattr(engine, name))
    script.row("engine._config.zero_config.stage", lambda: engine._config.zero_config.stage)
    script.row("engine.destroy()", engine.destroy)
    script.row("engine.destroy() again", engine.destroy)
    script.row("initialize: no model", lambda: api.initialize(config=config()), "deepspeed.initialize requires a model")
    one = net()
    script.row(
        "initialize: a parameter twice",
        lambda: api.start(model=one, model_parameters=[{"params": [one.first.weight]}, {"params": [one.first.weight]}]),
    )
    schedule = torch.optim.lr_scheduler.StepLR(Sgd(net().parameters(), lr=0.1), 1)
    script.row(
        "initialize: a scheduler object with an optimizer to be made",
        lambda: api.start(
            config(zero_optimization={"stage": 0}),
            optimizer=lambda parameters: Sgd(parameters, lr=0.1),
            lr_scheduler=schedule,
        ),
        "is not instantiated but Client LR Scheduler is instantiated",
    )
    script.row(
        "initialize: a scheduler that nobody knows",
        lambda: api.start(config(scheduler={"type": "Cosinus", "params": {}})),
        "DeepSpeed does not recognize LR scheduler Cosinus",
    )
    script.row(
        "initialize: max_grad_norm in optimizer.params",
        lambda: api.start(config(optimizer={"type": "AdamW", "params": {"max_grad_norm": 1.0}})),
        "'max_grad_norm' is not supported as an optimizer parameter",
    )
    script.row(
        "initialize: an optimizer that nobody knows",
        lambda: api.start(config(optimizer={"type": "Adamm", "params": {}})),
        "Adamm is not a supported DeepSpeed Optimizer",
    )
    script.row(
        "initialize: a client's optimizer under offload",
        lambda: rates_of(api, {"optimizer": Sgd(one.parameters(), 0.1), "model": one}),
    )


def rates_of(api: Api, arguments: dict[str, Any]) -> list[float]:
    """Of an engine whose ds_config has no optimizer."""
    ds_config = {key: value for key, value in config().items() if key != "optimizer"}
    with api.engine(ds_config, **arguments) as engine:
        rates: list[float] = engine.get_lr()
        return rates


def training(api: Api, script: Script) -> None:
    """The loop, with clipping, weights and states."""
    model = net()
    schedule = {"type": "WarmupLR", "params": SCHEDULES["WarmupLR"]}
    with api.engine(config(2, gradient_clipping=0.5, scheduler=schedule), model=model) as engine:
        data = batches(6)
        seen: list[Any] = []
        returned, norms, rates, losses = [], [], [], []
        for inputs, targets in data:
            boundary = engine.is_gradient_accumulation_boundary()
            loss = engine(inputs, targets)
            returned.append(engine.backward(loss))
            engine.step()
            losses.append(loss)
            rates.append(engine.get_lr())
            seen.append(
                [boundary, engine.was_step_applied(), engine.micro_steps, engine.global_steps, engine.global_samples]
            )
            if engine.was_step_applied():
                norms.append(float(engine.get_global_grad_norm()))
        script.row("losses of the loop", lambda: [loss.item() for loss in losses])
        script.row("backward() returns loss / accumulation steps", lambda: [value.item() for value in returned])
        script.row("backward() returns a graph", lambda: returned[0].requires_grad)
        script.row("boundary, applied, micro_steps, global_steps, global_samples", lambda: seen)
        script.row("get_lr() in the loop", lambda: rates)
        script.row("get_global_grad_norm() under gradient_clipping", lambda: norms)
        script.row("type of get_global_grad_norm()", engine.get_global_grad_norm)
        script.row("weights after training", model.second.weight.float)
        script.row("engine.lr_scheduler.get_last_lr()", engine.lr_scheduler.get_last_lr)
        script.row("engine.lr_scheduler.state_dict()", engine.lr_scheduler.state_dict)
        with torch.no_grad():
            script.row("engine(...) without gradients", lambda: engine(*data[0]).item())
        states(api, script, engine, model)
    with api.engine(config(2), model=net()) as engine:
        loss = engine(*batches(1)[0])
        script.row(
            "backward(scale_wrt_gas=False)", lambda: engine.backward(loss, scale_wrt_gas=False).item() - loss.item()
        )
        script.row("backward() of no scalar", lambda: engine.backward(torch.ones(2)), "loss must be a scalar tensor")
        script.row("set_gradient_accumulation_boundary(True)", lambda: engine.set_gradient_accumulation_boundary(True))
        script.row("is_gradient_accumulation_boundary() then", engine.is_gradient_accumulation_boundary)
        script.row("step() returns", engine.step)
        script.row("global_steps then", lambda: engine.global_steps)
        script.row("zero_grad() after a step", engine.zero_grad)


def states(api: Api, script: Script, engine: Any, model: Any) -> None:
    """DeepSpeed's own helpers, and ours under their names."""
    weight = model.first.weight
    for kind, helpers in (("deepspeed", api.helpers), ("its own", api.utils)):
        script.row(f"{kind} safe_get_full_fp32_param", lambda helpers=helpers: helpers.safe_get_full_fp32_param(weight))
        for key in ("exp_avg", "exp_avg_sq"):
            script.row(
                f"{kind} safe_get_full_optimizer_state({key})",
                lambda helpers=helpers, key=key: helpers.safe_get_full_optimizer_state(weight, key),
            )
        script.row(
            f"{kind} safe_get_full_optimizer_state of no such state",
            lambda helpers=helpers: helpers.safe_get_full_optimizer_state(weight, "nothing"),
            "nothing not found in optimizer state fragment",
        )
        helpers.safe_set_full_optimizer_state(weight, torch.full_like(weight, 0.5), "exp_avg")
        script.row(
            f"{kind} safe_set_full_optimizer_state",
            lambda helpers=helpers: helpers.safe_get_full_optimizer_state(weight, "exp_avg"),
        )
        helpers.safe_set_full_fp32_param(weight, torch.full_like(weight, 0.25))
        script.row(f"{kind} safe_set_full_fp32_param", lambda helpers=helpers: helpers.safe_get_full_fp32_param(weight))
    script.row(
        "safe_get_full_fp32_param of a parameter without an engine",
        lambda: api.utils.safe_get_full_fp32_param(torch.nn.Parameter(torch.ones(2))),
    )
    with api.package.zero.GatheredParameters([weight], modifier_rank=0):
        pass
    script.row("zero.GatheredParameters", lambda: weight.shape)
    with api.package.zero.GatheredParameters(weight, enabled=False):
        pass
    script.row("losses after weights and states were set", lambda: train(engine, 1, first=6)[-1])


def gradients(api: Api, script: Script) -> None:
    """Between the backward of a group's last micro-batch and step()."""
    model = net()
    weight = model.first.weight
    with api.engine(config(2, gradient_clipping=10.0), model=model) as engine:
        first, second, third, fourth = batches(4)
        engine.backward(engine(*first))
        engine.step()
        engine.backward(engine(*second))
        for kind, helpers in (("deepspeed", api.helpers), ("its own", api.utils)):
            script.row(f"{kind} safe_get_full_grad", lambda helpers=helpers: helpers.safe_get_full_grad(weight))
            helpers.safe_set_full_grad(weight, torch.full_like(weight, 0.5))
            script.row(f"{kind} safe_set_full_grad", lambda helpers=helpers: helpers.safe_get_full_grad(weight))
        api.utils.safe_update_full_grad_vectorized([weight], lambda old, _: old * 0.5)
        script.row("safe_update_full_grad_vectorized", lambda: api.utils.safe_get_full_grad(weight))
        engine.step()
        script.row("grad norm after gradients were set", lambda: float(engine.get_global_grad_norm()))
        script.row("weights after gradients were set", lambda: model.first.weight.detach().float())
        engine.backward(engine(*third))
        script.row("safe_get_full_grad in the middle of a group", lambda: api.utils.safe_get_full_grad(weight))
        engine.step()
        engine.backward(engine(*fourth))
        engine.step()
        script.row("global_steps after gradients were set", lambda: engine.global_steps)


def rates_while_training(api: Api, section: dict[str, Any], zero: dict[str, Any]) -> list[list[float]]:
    sgd = {"type": "SGD", "params": {"lr": 1e-2}}
    with api.engine(config(1, scheduler=section, zero_optimization=zero, optimizer=sgd, **FORCED)) as engine:
        rates = [engine.get_lr()]
        for step in range(4):
            train(engine, 1, first=step)
            rates.append(engine.get_lr())
        return rates


def schedules(api: Api, script: Script) -> None:
    for name, params in SCHEDULES.items():
        section = {"type": name, "params": params}
        script.row(f"learning rates of {name}", lambda section=section: rates_while_training(api, section, OFFLOAD))
    section = {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}}
    script.row("learning rates of StepLR, stage 0", lambda: rates_while_training(api, section, {"stage": 0}))
    script.row("learning rates of StepLR, stage 2", lambda: rates_while_training(api, section, OFFLOAD))
    section = {"type": "OneCycle", "params": {**SCHEDULES["OneCycle"], "cycle_min_mom": 0.8, "cycle_max_mom": 0.95}}
    with api.engine(config(1, scheduler=section)) as engine:
        momenta = []
        for step in range(4):
            train(engine, 1, first=step)
            momenta.append(engine.get_mom())
        script.row("get_mom() with OneCycle", lambda: momenta)
    made = config(1)
    with api.engine(
        made, lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    ) as engine:
        train(engine, 2)
        script.row("learning rate of a client's callable", engine.get_lr)
    with api.engine(config(1, scheduler={"type": "WarmupLR", "params": SCHEDULES["WarmupLR"]})) as engine:
        train(engine, 3)
        engine.lr_scheduler.step(1)
        script.row("lr_scheduler.step(1) by hand", engine.get_lr)


def optimizers(api: Api, script: Script) -> None:
    losses = {
        "AdamW": ADAMW,
        "Adam": {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "Adam without adam_w_mode": {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False}},
        "torch_adam": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "SGD": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}},
    }
    for name, section in losses.items():
        ds_config = config(2, optimizer=section, zero_optimization={"stage": 0} if name == "SGD" else OFFLOAD, **FORCED)
        with api.engine(ds_config) as engine:
            script.row(f"losses with {name}", lambda engine=engine: train(engine, 3))
            if name == "SGD":
                script.row("get_mom() with SGD", engine.get_mom)
    model = net()
    plain = {k: v for k, v in config(2, zero_optimization={"stage": 0}).items() if k != "optimizer"}
    with api.engine(plain, model=model, optimizer=Sgd(model.parameters(), lr=0.05)) as engine:
        script.row("losses with a client's optimizer", lambda: train(engine, 3))
    with api.engine(plain, optimizer=lambda parameters: Sgd(parameters, lr=0.05), model_parameters=None) as engine:
        script.row("losses with a client's callable", lambda: train(engine, 3))
    model = net()
    groups = [
        {"params": [model.first.weight, model.first.bias], "lr": 1e-3},
        {"params": list(model.second.parameters())},
    ]
    with api.engine(config(2), model=model, model_parameters=groups) as engine:
        script.row("get_lr() of two groups", engine.get_lr)
        script.row("losses with two groups", lambda: train(engine, 3))
    model = net()
    model.first.requires_grad_(False)
    with api.engine(
        config(2), model=model, model_parameters=[p for p in model.parameters() if p.requires_grad]
    ) as engine:
        script.row("losses with frozen parameters", lambda: train(engine, 3))
        script.row(
            "module_state_dict(exclude_frozen_parameters=True)",
            lambda: list(engine.module_state_dict(exclude_frozen_parameters=True)),
        )
        script.row(
            "safe_get_full_fp32_param of a frozen parameter",
            lambda: api.utils.safe_get_full_fp32_param(model.first.weight),
        )
    with api.engine(plain, model_parameters=None) as engine:
        script.row("engine.optimizer without an optimizer", lambda: engine.optimizer)
        script.row("get_lr() without an optimizer", engine.get_lr)
        loss = engine(*batches(1)[0])
        script.row(
            "backward() without an optimizer",
            lambda: engine.backward(loss),
            "must provide optimizer during init in order to use backward",
        )
        script.row(
            "step() without an optimizer", engine.step, "must provide optimizer during init in order to use step"
        )
