"""The two engines behind one face, and a model, data and ds_config for both."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.99], "weight_decay": 0.1}}
OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


class Net(nn.Module):
    """Two layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = torch.relu(self.first(inputs.to(self.first.weight.dtype)))
        return (self.second(hidden).float() - targets).pow(2).mean()


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(4)
    return [(torch.randn(2, 8, generator=source), torch.randn(2, 4, generator=source)) for _ in range(count)]


def config(steps: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": steps,
        "optimizer": ADAMW,
        "zero_optimization": OFFLOAD,
        "harmony": {"device": "cpu", "seed": 1},  # DeepSpeed ignores it
        **more,
    }


class Api:
    """DeepSpeed or harmony_ds."""

    def __init__(self, name: str) -> None:
        self.name = name
        if name == "deepspeed":
            os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed insists on it
            import deepspeed
            import deepspeed.utils
            from deepspeed.accelerator import get_accelerator

            import harmony_ds

            logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
            deepspeed.utils.logger.setLevel(logging.ERROR)
            # It refuses fp16 on CPUs without instructions for it, though torch computes without them.
            get_accelerator().is_fp16_supported = lambda: True
            harmony_ds.init_distributed()  # deepspeed.comm for one process, which it cannot start by itself
            self.package: Any = deepspeed
        else:
            import harmony_ds

            logging.getLogger("harmony_ds").setLevel(logging.ERROR)
            self.package = harmony_ds
        import cpuinfo
        import deepspeed.utils as helpers

        # DeepSpeed's CPU optimizers ask it each time, and it takes a second.
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)

        self.helpers: Any = helpers  # DeepSpeed's own, under both engines
        self.utils: Any = helpers if name == "deepspeed" else harmony_ds.utils

    def initialize(self, *arguments: Any, **named: Any) -> tuple[Any, ...]:
        """The package's."""
        result: tuple[Any, ...] = self.package.initialize(*arguments, **named)
        return result

    @property
    def is_deepspeed(self) -> bool:
        return self.name == "deepspeed"

    def start(self, ds_config: Any = None, model: nn.Module | None = None, **arguments: Any) -> tuple[Any, ...]:
        model = net() if model is None else model
        if "optimizer" not in arguments and "model_parameters" not in arguments:
            arguments["model_parameters"] = list(model.parameters())
        return self.initialize(model=model, config=config() if ds_config is None else ds_config, **arguments)

    @contextmanager
    def engine(self, ds_config: Any = None, **arguments: Any) -> Iterator[Any]:
        engine, *_ = self.start(ds_config, **arguments)
        try:
            yield engine
        finally:
            engine.destroy()

    def parse(self, source: Any) -> dict[str, Any]:
        """A ds_config's meaning."""
        if self.is_deepspeed:
            from deepspeed.runtime.config import DeepSpeedConfig

            theirs = DeepSpeedConfig(source)
            zero, fp16 = theirs.zero_config, theirs.float16_config
            offload = zero.offload_optimizer
            return {
                "batch": [
                    theirs.train_batch_size,
                    theirs.train_micro_batch_size_per_gpu,
                    theirs.gradient_accumulation_steps,
                ],
                "clip": theirs.gradient_clipping,
                "fp16": [fp16.enabled, fp16.loss_scale, fp16.loss_scale_window, fp16.hysteresis, fp16.min_loss_scale],
                "bf16": theirs.bfloat16_config.enabled,
                "stage": zero.stage,
                "offload": "none" if offload is None else offload.device,
                "optimizer": [theirs.optimizer_name, theirs.optimizer_params],
                "scheduler": [theirs.scheduler_name, theirs.scheduler_params],
            }
        from harmony_ds.config import load_config

        ours = load_config(source)
        values = ours.values
        named = ours.optimizer and ours.optimizer.type
        return {
            "batch": [ours.train_batch_size, ours.micro_batch, ours.gradient_accumulation_steps],
            "clip": ours.gradient_clipping,
            "fp16": [
                values[f"fp16.{key}"]
                for key in ("enabled", "loss_scale", "loss_scale_window", "hysteresis", "min_loss_scale")
            ],
            "bf16": ours.compute_dtype == torch.bfloat16,
            "stage": values["zero_optimization.stage"],
            "offload": values.get("zero_optimization.offload_optimizer.device", "none"),
            "optimizer": [named and named.lower(), ours.optimizer and ours.optimizer.params],
            "scheduler": [ours.scheduler and ours.scheduler.type, ours.scheduler and ours.scheduler.params],
        }


def train(engine: Any, steps: int, first: int = 0) -> list[float]:
    """The familiar loop over `steps` groups; the losses, looked at after each step."""
    size = engine.gradient_accumulation_steps()
    data = batches(first + steps * size)[first:]
    losses = []
    for group in range(steps):
        row = []
        for inputs, targets in data[group * size : (group + 1) * size]:
            loss = engine(inputs, targets)
            engine.backward(loss)
            engine.step()
            row.append(loss)
        losses += [loss.item() for loss in row]
    return losses
