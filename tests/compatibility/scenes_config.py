"""Rows about ds_config: what is read, what is refused, in which form it may be given."""

from __future__ import annotations

import argparse
import base64
import json
from pathlib import Path
from typing import Any

from tests.compatibility.engines import ADAMW, Api, config, net
from tests.compatibility.record import Script

MICRO = {"train_micro_batch_size_per_gpu": 2}
NVME = {"device": "nvme", "nvme_path": "/nvme"}
READ: dict[str, dict[str, Any]] = {
    "batch size alone": {"train_batch_size": 8},
    "batch and micro-batch size": {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2},
    "batch size and accumulation steps": {"train_batch_size": 8, "gradient_accumulation_steps": 4},
    "all three": {"train_batch_size": 8, **MICRO, "gradient_accumulation_steps": 4},
    "gradient_clipping": {**MICRO, "gradient_clipping": 0.25},
    "no gradient_clipping": MICRO,
    "fp16": {**MICRO, "fp16": {"enabled": True, "loss_scale_window": 7, "hysteresis": 3, "min_loss_scale": 4}},
    "fp16 with a static scale": {**MICRO, "fp16": {"enabled": True, "loss_scale": 128}},
    "bf16": {**MICRO, "bf16": {"enabled": True}},
    "bfloat16": {**MICRO, "bfloat16": {"enabled": True}},
    "flags in words": {**MICRO, "fp16": {"enabled": "true"}},
    "zero_optimization": {**MICRO, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
    "nvme offload": {**MICRO, "zero_optimization": {"stage": 3, "offload_param": NVME, "offload_optimizer": NVME}},
    "zero_optimization.cpu_offload": {**MICRO, "zero_optimization": {"stage": 2, "cpu_offload": True}},
    "optimizer": {**MICRO, "optimizer": ADAMW},
    "scheduler": {**MICRO, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}},
    "ignore_unused_parameters false": {
        **MICRO,
        "zero_optimization": {"stage": 2, "ignore_unused_parameters": False},
    },
    "log_level in capitals": {**MICRO, "log_level": "INFO"},
    "a harmony block": {**MICRO, "harmony": {"device": "cpu"}},
    "an unknown key": {**MICRO, "gradient_cliping": 1.0},
    "bf16.enabled auto": {**MICRO, "bf16": {"enabled": "auto"}},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no batch size": ({}, "Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided"),
    "batch sizes that contradict": (
        {"train_batch_size": 7, **MICRO, "gradient_accumulation_steps": 4},
        "train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 7 != 2 * 4 * 1",
    ),
    "micro-batch size -1": ({"train_micro_batch_size_per_gpu": -1}, "has to be greater than 0"),
    "micro-batch size 0 with a batch size": ({"train_batch_size": 4, "train_micro_batch_size_per_gpu": 0}, ""),
    "batch size auto": ({"train_batch_size": "auto"}, ""),
    "fp16 and bf16": (
        {**MICRO, "fp16": {"enabled": True}, "bf16": {"enabled": True}},
        "bfloat16 and fp16 modes cannot be simultaneously enabled",
    ),
    "fp16.loss_scale -1": ({**MICRO, "fp16": {"loss_scale": -1}}, "fp16.loss_scale must be >= 0"),
    "fp16.loss_scale_window 0": (
        {**MICRO, "fp16": {"enabled": True, "loss_scale_window": 0}},
        "fp16.loss_scale_window must be > 0 when dynamic loss scaling is enabled",
    ),
    "an unknown key in fp16": ({**MICRO, "fp16": {"enable": True}}, "enable"),
    "stage 5": ({**MICRO, "zero_optimization": {"stage": 5}}, "Input should be 0, 1, 2"),
    "ratio below 1 with stage 2": (
        {**MICRO, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        "Partial offloading only supported for ZeRO Stage 3.",
    ),
    "compute_grad_norm false with stage 3": (
        {**MICRO, "zero_optimization": {"stage": 3, "compute_grad_norm": False}},
        "compute_grad_norm=false is supported only with ZeRO Stage 1 or 2",
    ),
    "cpu_offload and offload_optimizer": (
        {**MICRO, "zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}},
        "Cannot provide deprecated parameter 'cpu_offload' and replacing parameter 'offload_optimizer' together",
    ),
    "communication_data_type fp64": (
        {**MICRO, "communication_data_type": "fp64"},
        "Invalid communication_data_type. Supported data types: ['fp16', 'bf16', 'fp32']. Got: fp64",
    ),
    "gradient_allreduce_op sum with stage 3": (
        {**MICRO, "gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}},
        "gradient_allreduce_op='sum' is not supported with ZeRO stage 3",
    ),
    "compression_training": ({**MICRO, "compression_training": {"weight_quantization": {}}}, "ompression"),
}


def read(api: Api, script: Script) -> None:
    for name, source in READ.items():
        script.row(f"ds_config: {name}", lambda source=source: api.parse(dict(source)))
    for name, (source, says) in REFUSED.items():
        script.row(f"ds_config refused: {name}", lambda source=source: api.parse(dict(source)), says)


def forms(api: Api, script: Script, folder: Path) -> None:
    """A dict, a path, comments, duplicates, base64, command-line arguments."""
    source = {**MICRO, "optimizer": ADAMW}
    path = folder / "ds_config.json"
    path.write_text(json.dumps(source))
    script.row("ds_config: the path of a file", lambda: api.parse(str(path)))
    commented = folder / "commented.json"
    commented.write_text('{\n  // two\n  "train_batch_size": 8, # eight\n  "gradient_clipping": 0.5,\n}')
    script.row("ds_config: a file with comments", lambda: api.parse(str(commented)))
    twice = folder / "twice.json"
    twice.write_text('{"train_batch_size": 8, "train_batch_size": 9}')
    script.row(
        "ds_config refused: duplicate keys",
        lambda: api.parse(str(twice)),
        "Duplicate keys in DeepSpeed config: ['train_batch_size']",
    )
    encoded = base64.urlsafe_b64encode(json.dumps(source).encode()).decode()
    script.row("ds_config: base64", lambda: api.parse(encoded))
    script.row(
        "ds_config refused: no such file",
        lambda: api.parse(str(folder / "none.json.json")),
        "Expected a string path to an existing deepspeed config, or a dictionary or a valid base64. Received: ",
    )

    def parsed(*words: str) -> Any:
        parser = api.package.add_config_arguments(argparse.ArgumentParser())
        return vars(parser.parse_args(words))

    script.row("add_config_arguments: names and defaults", parsed)
    script.row(
        "add_config_arguments: values",
        lambda: parsed("--deepspeed", "--deepspeed_config", "x.json")["deepspeed_config"],
    )
    full = folder / "full.json"
    full.write_text(json.dumps(config()))

    def started(ds_config: Any, **arguments: Any) -> list[int]:
        model = net()
        engine, *_ = api.initialize(model=model, model_parameters=model.parameters(), config=ds_config, **arguments)
        sizes = [engine.train_batch_size(), engine.gradient_accumulation_steps()]
        engine.destroy()
        return sizes

    script.row(
        "initialize(args.deepspeed_config)", lambda: started(None, args=argparse.Namespace(deepspeed_config=str(full)))
    )
    script.row("initialize(config=path)", lambda: started(str(full)))
    script.row("initialize(config_params=dict)", lambda: started(None, config_params=config()))
    script.row(
        "initialize: args.deepspeed_config and config",
        lambda: started(config(), args=argparse.Namespace(deepspeed_config=str(full))),
        "Not sure how to proceed, we were given deepspeed configs in the deepspeed arguments and deepspeed.initialize()",
    )
    script.row(
        "initialize: no config", lambda: started(None), "DeepSpeed requires --deepspeed_config to specify configuration"
    )
