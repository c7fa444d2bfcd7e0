"""Rows about precision, batch sizes, contexts, data, monitors."""

from __future__ import annotations

import csv
import logging
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from tests.compatibility.engines import OFFLOAD, Api, Net, batches, config, net, train
from tests.compatibility.record import Script, about


def half(api: Api, script: Script) -> None:
    """fp16 with a scale that overflows, fp16 by hand, bf16 with a NaN."""
    fp16 = {"enabled": True, "initial_scale_power": 40, "hysteresis": 1, "loss_scale_window": 3}
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4}}
    with api.engine(config(1, fp16=fp16, scheduler=schedule)) as engine:
        script.row("fp16: fp16_enabled()", engine.fp16_enabled)
        script.row("fp16: loss_scale()", engine.loss_scale)
        script.row("fp16: dtype of the weights", lambda: engine.module.first.weight.dtype)
        script.row("fp16: optimizer.dynamic_loss_scale", lambda: engine.optimizer.dynamic_loss_scale)
        seen = []
        for step in range(4):
            train(engine, 1, first=step)
            seen.append([engine.optimizer.cur_scale, engine.optimizer.overflow, engine.skipped_steps, engine.get_lr()])
        script.row("fp16: scale, overflow, skipped_steps, lr while it overflows", lambda: seen)
        script.row("fp16: was_step_applied() after an overflow", engine.was_step_applied)
        script.row("fp16: optimizer.loss_scale", lambda: engine.optimizer.loss_scale)
        script.row("fp16: global_steps with skipped ones", lambda: engine.global_steps)
        loss = engine(*batches(1)[0])
        script.row(
            "fp16: loss.backward() unscaled",
            loss.backward,
            "Loss scaling is required for this configuration, but backward() was called directly without scaling the loss",
        )
    static = {"enabled": True, "loss_scale": 128}
    with api.engine(config(1, fp16=static)) as engine:
        script.row("fp16: static scale", lambda: engine.optimizer.cur_scale)
        script.row("fp16: dynamic_loss_scale() with a static scale", engine.dynamic_loss_scale)
        loss = engine(*batches(1)[0])
        scaled = engine.scale(loss)
        script.row("fp16: engine.scale(loss)", lambda: scaled.item() / loss.item())
        scaled.backward()
        engine.step()
        script.row("fp16: a step after scale(loss).backward()", engine.was_step_applied)
        script.row("fp16: losses with a static scale", lambda: about(train(engine, 2)))
    with api.engine(config(1, bf16={"enabled": True})) as engine:
        script.row("bf16: bfloat16_enabled()", engine.bfloat16_enabled)
        script.row("bf16: dtype of the weights", lambda: engine.module.first.weight.dtype)
        train(engine, 1)
        master = api.helpers.safe_get_full_fp32_param(engine.module.first.weight)
        script.row("bf16: dtype of masters", lambda: master.dtype)
        inputs, targets = batches(1)[0]
        loss = engine(inputs, targets * float("nan"))
        engine.backward(loss)
        engine.step()
        script.row("bf16: a step with NaN is skipped", lambda: [engine.was_step_applied(), engine.skipped_steps])
        script.row("bf16: losses go on", lambda: about(train(engine, 2)))


def scales(api: Api, script: Script) -> None:
    """The loss scale's rules, step by step, over steps that overflow and steps that do not."""
    for name, more in (
        ("hysteresis 3", {"hysteresis": 3}),
        ("consecutive_hysteresis", {"hysteresis": 2, "consecutive_hysteresis": True}),
        ("loss_scale_window 2", {"loss_scale_window": 2, "hysteresis": 1}),
        ("min_loss_scale 64", {"hysteresis": 1, "min_loss_scale": 64}),
    ):
        fp16 = {"enabled": True, "initial_scale_power": 8, **more}
        with api.engine(config(1, fp16=fp16)) as engine:
            seen = []
            for good in (True, False, True, False, True, True, True):
                inputs, targets = batches(1)[0]
                engine.backward(engine(inputs, targets if good else targets * float("inf")))
                engine.step()
                seen.append([engine.optimizer.cur_scale, engine.was_step_applied(), engine.skipped_steps])
            script.row(f"fp16: scale, applied, skipped with {name}", lambda seen=seen: seen)
    fp16 = {"enabled": True, "initial_scale_power": 1, "hysteresis": 1, "min_loss_scale": 1}
    with api.engine(config(1, fp16=fp16)) as engine:

        def overflow() -> None:
            for _ in range(3):
                inputs, targets = batches(1)[0]
                engine.backward(engine(inputs, targets * float("inf")))
                engine.step()

        script.row("fp16: overflow at the smallest scale", overflow, "Current loss scale already at minimum")


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.kept: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record.getMessage())


def progress(api: Api, script: Script) -> None:
    logger = logging.getLogger("DeepSpeed" if api.is_deepspeed else "harmony_ds.progress")
    lines, level = Lines(), logger.level
    plain = {"type": "AdamW", "params": {"lr": 1e-2}}  # betas in a file are a list there, and a tuple here
    with api.engine(config(2, steps_per_print=2, optimizer=plain)) as engine:
        logger.addHandler(lines)
        logger.setLevel(logging.INFO)
        train(engine, 4)
        logger.removeHandler(lines)
        logger.setLevel(level)
    said = [line.split("] ")[-1] for line in lines.kept if "step=" in line and "skipped=" in line]
    script.row("steps_per_print: lines", lambda: said)


def sizes_and_contexts(api: Api, script: Script) -> None:
    with api.engine(config(2)) as engine:
        script.row("set_train_batch_size(8)", lambda: engine.set_train_batch_size(8))
        script.row("gradient_accumulation_steps() then", engine.gradient_accumulation_steps)
        script.row("losses then", lambda: train(engine, 2))
        script.row(
            "set_train_batch_size(7)",
            lambda: engine.set_train_batch_size(7),
            "Train batch size must be divisible by micro-batch data parallelism",
        )
        script.row("set_train_micro_batch_size(4)", lambda: engine.set_train_micro_batch_size(4))
        script.row("train_batch_size() then", engine.train_batch_size)
        script.row("no_sync() with ZeRO stage 2", lambda: entered(engine.no_sync()))
        script.row("coalesce_grad_reduction()", lambda: entered(engine.coalesce_grad_reduction()))
        script.row("get_wall_clock_timers() without wall_clock_breakdown", engine.get_wall_clock_timers)
        script.row("is_compiled", lambda: engine.is_compiled)
        script.row("compile()", lambda: engine.compile(backend="eager"))
        script.row("is_compiled then", lambda: engine.is_compiled)
        script.row("losses then, compiled", lambda: train(engine, 1))
        script.row("empty_partition_cache()", engine.empty_partition_cache)
        script.row(
            "_zero3_consolidated_16bit_state_dict() with stage 2",
            engine._zero3_consolidated_16bit_state_dict,
            "this function requires ZeRO-3 mode",
        )
        script.row(
            "_consolidated_16bit_state_dict() with stage 2",
            engine._consolidated_16bit_state_dict,
            "consolidated_16bit_state_dict is only applicable to cases where weights are partitioned",
        )
        before = engine.module_state_dict()
        state = {"module": {name: torch.zeros_like(value) for name, value in before.items()}}
        script.row("load_module_state_dict()", lambda: engine.load_module_state_dict(state))
        script.row("weights then", engine.module.second.weight.float)
        script.row(
            "load_module_state_dict() with a missing key",
            lambda: engine.load_module_state_dict({"module": {}}),
            "Missing key(s) in state_dict",
        )
    with api.engine(
        config(2, zero_optimization={"stage": 0}, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    ) as engine:
        script.row("no_sync() with stage 0", lambda: entered(engine.no_sync()))
        with engine.no_sync():
            script.row("no_sync() inside no_sync()", lambda: entered(engine.no_sync()), "reentry is unsupported")
            script.row("step() inside no_sync()", engine.step, "It is illegal to call Engine.step() inside no_sync")
    with api.engine(config(2, managed_gradient_accumulation=False)) as engine:
        for inputs, targets in batches(3):
            engine.backward(engine(inputs, targets))
        script.row("unmanaged: is_gradient_accumulation_boundary()", engine.is_gradient_accumulation_boundary)
        engine.step()
        script.row("unmanaged: every step is a boundary", lambda: [engine.global_steps, engine.was_step_applied()])
        script.row("unmanaged: global_samples", lambda: engine.global_samples)
        script.row(
            "unmanaged: set_gradient_accumulation_boundary()",
            lambda: engine.set_gradient_accumulation_boundary(True),
            "set_gradient_accumulation_boundary() is not supported with managed_gradient_accumulation=False",
        )
        script.row("unmanaged: losses", lambda: engine(*batches(1)[0]).item())


def entered(context: Any) -> bool:
    with context:
        return True


def data(api: Api, script: Script) -> None:
    dataset = TensorDataset(torch.arange(7.0).view(7, 1), torch.arange(7.0))
    engine, _, loader, _ = api.start(config(2), training_data=dataset)
    script.row("training_data: the loader", lambda: [len(next(iter(loader))), loader.batch_size])
    script.row("training_data: engine.training_dataloader is it", lambda: engine.training_dataloader is loader)
    script.row("training_data: number of batches", lambda: len(loader))
    script.row("training_data: attributes", lambda: [loader.batch_size, loader.dataloader_drop_last])
    options = {"num_local_io_workers": 0, "pin_memory": False}
    script.row(
        "deepspeed_io: order of samples", lambda: [b[1].tolist() for b in engine.deepspeed_io(dataset, **options)]
    )
    again = engine.deepspeed_io(dataset, batch_size=3, route="eval", **options)
    script.row("deepspeed_io: route eval, a batch size of its own", lambda: [b[1].tolist() for b in again])
    script.row("deepspeed_io: no dataset", lambda: engine.deepspeed_io(3), "Training data must be a torch Dataset")
    stacked = engine.deepspeed_io(dataset, collate_fn=len, **options)
    script.row("deepspeed_io: collate_fn", lambda: list(stacked))
    repeating = api.utils.RepeatingLoader([1, 2])
    script.row("utils.RepeatingLoader", lambda: [next(repeating) for _ in range(5)])
    engine.destroy()
    dropping, *_ = api.start(config(2, dataloader_drop_last=True))
    script.row("dataloader_drop_last", lambda: len(dropping.deepspeed_io(dataset, **options)))
    dropping.destroy()
    with api.package.zero.Init(config_dict_or_path=config(), enabled=False):
        model = net()
    script.row("zero.Init", lambda: model.first.weight.shape)


def monitors(api: Api, script: Script, folder: Path) -> None:
    csv_monitor = {"enabled": True, "output_path": str(folder / api.name), "job_name": "job"}
    fp16 = {"enabled": True, "initial_scale_power": 8}
    with api.engine(config(2, csv_monitor=csv_monitor, fp16=fp16)) as engine:
        script.row("csv_monitor: engine.monitor", lambda: [type(engine.monitor).__name__, engine.monitor.enabled])
        train(engine, 2)
    files = sorted((folder / api.name / "job").glob("*.csv"))
    script.row("csv_monitor: files", lambda: [path.name for path in files])
    for path in files:
        with path.open(newline="") as file:
            rows = [[number(cell) for cell in row] for row in csv.reader(file)]
        script.row(f"csv_monitor: {path.name}", lambda rows=rows: rows)
    timed = config(2, wall_clock_breakdown=True)
    with api.engine(timed) as engine:
        train(engine, 1)
        script.row(
            "wall_clock_breakdown: names of get_wall_clock_timers()", lambda: sorted(engine.get_wall_clock_timers())
        )
    script.row("init_distributed: rank and world", lambda: distributed(api))


def profiles(api: Api, script: Script, folder: Path) -> None:
    """The table of the flops profiler: what it counts, as deep and as far down as it was asked to."""
    shapes: dict[str, dict[str, Any]] = {
        "": {},
        "module_depth 1, detailed false": {"module_depth": 1, "detailed": False},
        "top_modules 2, recompute_fwd_factor 1": {"top_modules": 2, "recompute_fwd_factor": 1.0},
    }
    for name, more in shapes.items():
        script.row(f"flops_profiler: {name or 'its table'}", lambda more=more: counted(api, folder, more))


def counted(api: Api, folder: Path, more: dict[str, Any]) -> list[str]:
    """Return the lines of the table that `flops_profiler` writes of the second step, without times."""
    file = folder / api.name / "flops.txt"
    profiler = {"enabled": True, "profile_step": 1, "output_file": str(file), **more}
    with api.engine(config(1, flops_profiler=profiler)) as engine:
        train(engine, 3)
    lines = [line for line in file.read_text().splitlines() if "latency" not in line or "% MACs" in line]
    return [re.split(r"second|MACs, .* latency", line)[0] for line in lines if "FLOPS per GPU" not in line]


def distributed(api: Api) -> list[Any]:
    from deepspeed import comm

    api.package.init_distributed()
    return [comm.is_initialized(), comm.get_rank(), comm.get_world_size(), torch.distributed.get_world_size()]


def number(cell: str) -> object:
    try:
        return float(cell)
    except ValueError:
        return cell


class Gives(Net):
    """The same layers; gives its loss, its logits, or both."""

    def __init__(self, gives: str) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.gives = gives

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        logits = self.second(torch.relu(self.first(inputs)))
        loss = (logits - targets).pow(2).mean()
        return {"loss": loss, "logits": logits, "both": {"loss": loss, "logits": logits}}[self.gives]


DIRECT: dict[str, tuple[str, Any]] = {
    "loss.backward()": ("loss", lambda engine, loss: loss.backward()),
    "(3 * loss).backward()": ("loss", lambda engine, loss: (3 * loss).backward()),
    "engine.scale(loss).backward()": ("loss", lambda engine, loss: engine.scale(loss).backward()),
    "(loss / accumulation steps).backward()": ("loss", lambda engine, loss: (loss / 4).backward()),
    "logits.backward(gradient)": ("logits", lambda engine, logits: logits.backward(torch.ones(2, 4))),
    "criterion(logits).backward()": ("logits", lambda engine, logits: logits.pow(2).mean().backward()),
    "outputs['loss'].backward()": ("both", lambda engine, outputs: outputs["loss"].backward()),
    "outputs['logits'].sum().backward()": ("both", lambda engine, outputs: outputs["logits"].sum().backward()),
}


def stepped(api: Api, gives: str, backward: Any, managed: bool = True) -> torch.Tensor:
    """How far a weight goes in one step of SGD over four micro-batches."""
    model = Gives(gives)
    before = model.first.weight.detach().clone()
    sgd = {"type": "SGD", "params": {"lr": 1.0}}
    free = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
    unmanaged = {} if managed else {"managed_gradient_accumulation": False}
    ds_config = config(4, optimizer=sgd, zero_optimization={"stage": 2}, **free, **unmanaged)
    with api.engine(ds_config, model=model) as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for inputs, targets in batches(4):
            backward(engine, engine(inputs, targets))
            if managed:
                engine.step()
        if not managed:
            engine.step()
        return before - model.first.weight.detach().float()


def direct(api: Api, script: Script) -> None:
    """Backward passes without engine.backward, and what outputs are."""
    for name, (gives, backward) in DIRECT.items():
        script.row(f"update of {name}", lambda gives=gives, backward=backward: stepped(api, gives, backward))
    plain = DIRECT["loss.backward()"]
    script.row("update of loss.backward() without managed accumulation", lambda: stepped(api, *plain, managed=False))
    with api.engine(config(2), model=Gives("both")) as engine:
        outputs = engine(*batches(1)[0])
        script.row("outputs are a dict", lambda: isinstance(outputs, dict))
        script.row("keys of outputs", lambda: list({**outputs}))
        script.row("outputs.get('nothing', 3)", lambda: outputs.get("nothing", 3))
    script.row("a plain loop around the engine", lambda: plain_loop(api))


def plain_loop(api: Api) -> list[float]:
    """Losses of a plain PyTorch loop with the engine in the model's place."""
    losses = []
    with api.engine(config(1)) as engine:
        for inputs, targets in batches(3):
            engine.optimizer.zero_grad()
            loss = engine(inputs, targets)
            loss.backward()
            engine.optimizer.step()
            losses.append(loss.item())
    return losses


def partitions(api: Api, script: Script) -> None:
    """What ZeRO-3 keeps of a parameter in this process: in one process, all of it."""
    model = net()
    weight = model.second.weight
    with api.engine(config(1, zero_optimization={**OFFLOAD, "stage": 3}), model=model) as engine:
        train(engine, 1)
        script.row("safe_get_local_fp32_param", lambda: api.utils.safe_get_local_fp32_param(weight))
        script.row(
            "safe_get_local_optimizer_state", lambda: api.utils.safe_get_local_optimizer_state(weight, "exp_avg")
        )
        api.utils.safe_set_local_optimizer_state(weight, torch.full((64,), 0.25), "exp_avg_sq")
        script.row(
            "safe_set_local_optimizer_state", lambda: api.utils.safe_get_local_optimizer_state(weight, "exp_avg_sq")
        )
        engine.backward(engine(*batches(1)[0]))
        script.row("safe_get_local_grad", lambda: api.utils.safe_get_local_grad(weight).float())
        api.utils.safe_set_local_grad(weight, torch.full((64,), 0.5))
        script.row("safe_set_local_grad", lambda: api.utils.safe_get_local_grad(weight).float())
        engine.step()
        api.utils.safe_set_local_fp32_param(weight, torch.full((64,), 0.75))
        script.row("safe_set_local_fp32_param", lambda: api.utils.safe_get_local_fp32_param(weight))


def masters(api: Api, script: Script) -> None:
    """What bf16 starts from, and adds gradients up in."""
    model = net()
    with api.engine(config(1, bf16={"enabled": True}), model=model) as engine:
        script.row(
            "bf16: masters before the first step", lambda: api.utils.safe_get_full_fp32_param(model.first.weight)
        )
        script.row("bf16: optimizer.gradient_accumulation_dtype", lambda: engine.optimizer.gradient_accumulation_dtype)


class Quantized(torch.nn.Module):
    """A layer, and a frozen weight of 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)
        self.table = torch.nn.Parameter(torch.zeros(4, 4).to(torch.float8_e4m3fn), requires_grad=False)


def refused(api: Api, script: Script) -> None:
    """What one engine runs and the other refuses."""
    bf16: dict[str, Any] = {"bf16": {"enabled": True}}
    untested = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": False}

    def started(ds_config: dict[str, Any], **arguments: Any) -> bool:
        with api.engine(ds_config, **arguments):
            return True

    def with_sgd(ds_config: dict[str, Any]) -> bool:
        model = net()
        return started(ds_config, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))

    script.row("initialize: an optimizer that ZeRO was not tested with", lambda: with_sgd(config(1, **untested)))
    third = {**bf16, "data_types": {"grad_accum_dtype": "fp16"}}
    script.row("bf16: gradients added up in fp16", lambda: trained(api, config(2, **third)))
    cast = {**bf16, "data_types": {"buffer_dtype": "bf16"}}
    script.row("bf16: buffer_dtype", lambda: started(config(1, **cast)))
    script.row("a second engine of a model", lambda: second_engine(api))
    strict = {**OFFLOAD, "ignore_unused_parameters": False}
    script.row(
        "a step with an unused parameter, ignore_unused_parameters false",
        lambda: trained(api, config(1, zero_optimization=strict), HalfUsed()),
        "not used in producing loss",
    )
    scaled = {"fp16": {"enabled": True, "loss_scale": 64}}
    script.row(
        "fp16: engine.backward of a loss of engine.module", lambda: trained(api, config(1, **scaled), direct=True)
    )
    masterless = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
    script.row("bf16: bf16_master_weights_and_grads", lambda: started(config(1, **masterless)))
    eight = Quantized()
    script.row(
        "bf16: a frozen parameter of float8",
        lambda: started(config(1, **bf16), model=eight, model_parameters=list(eight.layer.parameters())),
    )
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    script.row("fp16: gradients put on parameters by hand", lambda: applied_without_zero(api, by_hand, **fp16))
    script.row("two losses of one micro-batch, gradients read in between", lambda: two_losses(api))
    script.row(
        "loss.backward(), stage 0", lambda: applied_without_zero(api, lambda engine: engine(*batches(1)[0]).backward())
    )


class HalfUsed(Net):
    """Has a layer that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Linear(2, 2)


def trained(
    api: Api, ds_config: dict[str, Any], model: torch.nn.Module | None = None, direct: bool = False
) -> dict[str, list[float]]:
    """Return the largest weight of each parameter after a step, and its norm; `direct`: the losses are the module's own."""
    with api.engine(ds_config, model=net() if model is None else model) as engine:
        for inputs, targets in batches(engine.gradient_accumulation_steps()):
            engine.backward((engine.module if direct else engine)(inputs, targets))
            engine.step()
        largest = [parameter.abs().max().item() for parameter in engine.module.parameters()]
        return about([*largest, float(engine.get_global_grad_norm())])


def second_engine(api: Api) -> list[float]:
    """Losses of an engine whose model another one has trained before."""
    model = net()
    losses = []
    with api.engine(config(1), model=model) as first:
        inputs, targets = batches(1)[0]
        first.backward(first(inputs, targets))
        first.step()
        with api.engine(config(1), model=model) as second:
            for inputs, targets in batches(2):
                losses.append(second(inputs, targets))
                second.backward(losses[-1])
                second.step()
    return [loss.item() for loss in losses]


def applied_without_zero(api: Api, make_gradients: Callable[[Any], object], **more: Any) -> bool:
    """Whether a step of stage 0 with such gradients is applied."""
    model = net()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    with api.engine(config(1, zero_optimization={"stage": 0}, **more), model=model, optimizer=sgd) as engine:
        make_gradients(engine)
        engine.step()
        applied: bool = engine.was_step_applied()
        return applied


def by_hand(engine: Any) -> None:
    for parameter in engine.module.parameters():
        parameter.grad = torch.ones_like(parameter)


def two_losses(api: Api) -> list[float]:
    model = torch.nn.Linear(8, 4)
    norms = []
    with api.engine(config(1), model=model) as engine:
        outputs = engine(batches(1)[0][0])
        for loss, retain in ((outputs.sum(), True), (outputs.pow(2).sum(), False)):
            engine.zero_grad()
            engine.backward(loss, retain_graph=retain)
            norms.append(api.utils.safe_get_full_grad(model.weight).norm().item())
    return [len(norms)]
