"""A script that knows DeepSpeed alone, for the launchers of one process: one tiny step, its loss on standard output."""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn

import harmony_ds

harmony_ds.install_as_deepspeed()

import deepspeed  # noqa: E402

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 2},
    "harmony": {"device": "cpu"},
}


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.line(inputs).square().mean()


def with_deepspeed(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG, model_parameters=model.parameters())
    loss = engine(inputs)
    engine.backward(loss)
    engine.step()
    engine.destroy()
    return loss


def with_accelerate(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    from accelerate import Accelerator

    accelerator = Accelerator()
    accelerator.state.deepspeed_plugin.deepspeed_config.update(
        train_micro_batch_size_per_gpu=2, harmony=CONFIG["harmony"], zero_force_ds_cpu_optimizer=False
    )
    engine, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(engine, harmony_ds.HarmonyEngine)
    loss = engine(inputs)
    accelerator.backward(loss)
    optimizer.step()
    return loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)  # DeepSpeed's launcher hands it over
    parser.add_argument("--accelerate", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model, inputs = Line(), torch.ones(2, 3)
    loss = (with_accelerate if arguments.accelerate else with_deepspeed)(model, inputs)
    print(
        "trained", round(loss.item(), 5), round(model.line.weight.sum().item(), 5), torch.distributed.get_world_size()
    )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
