"""DeepSpeed's own engine, in a process of its own: `python deepspeed_side.py JOBS`, JOBS a JSON list of dictionaries.

A job trains `steps` (first, last) after loading the checkpoint in `load` (if given), and saves into `save` (if given).
It prints one JSON line with the losses.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds import init_distributed

MICRO_BATCHES = 2
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
SCALE = {"fp16": {"initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}}


class Net(nn.Module):
    """Two parameter groups' worth, odd sizes (so that partitions are padded), a buffer, a tied and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(13, 10)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(10, width), nn.Tanh(), nn.Linear(width, 10)) for width in (7, 6)]
        )
        self.norm = nn.LayerNorm(10)
        self.frozen = nn.Linear(10, 10)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(10, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.7))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(self.norm(x + self.frozen(x)) * self.scale)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), words[:, 1:].flatten())


def batch(index: int) -> Tensor:
    return torch.randint(0, 13, (2, 6), generator=torch.Generator().manual_seed(index))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]


def config(
    stage: int, precision: str = "fp32", universal: bool = False, optimizer: str = "torch", clip: float = 0.5
) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage, **({} if optimizer == "torch" else OFFLOAD)},
        "zero_allow_untested_optimizer": True,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "betas": [0.8, 0.95], "torch_adam": optimizer == "torch"},
        },
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 0.02}},
        **({precision: {"enabled": True, **SCALE.get(precision, {})}} if precision != "fp32" else {}),
        **({"checkpoint": {"load_universal": True}} if universal else {}),
    }


def train(engine: Any, first: int, last: int) -> list[float]:
    """Train steps `first` to `last` - 1, whose micro-batches processes take in turn; return the losses."""
    losses = []
    for index in range(first * MICRO_BATCHES, last * MICRO_BATCHES):
        loss = engine(batch(index * engine.world_size + engine.global_rank).to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss)
    return [loss.item() for loss in losses]


def run(job: dict[str, Any]) -> dict[str, Any]:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # slow on most CPUs, and right
    model = Net()
    if job.get("scramble"):
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.mul_(1.5).add_(0.1)
    settings = config(
        job["stage"],
        job.get("precision", "fp32"),
        job.get("universal", False),
        job.get("optimizer", "torch"),
        job.get("clip", 0.5),
    )
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups(model), config=settings)
    found: dict[str, Any] = {}
    if "load" in job:
        folder, client_state = engine.load_checkpoint(job["load"])
        assert folder is not None, job
        found = {"epoch": client_state.get("epoch"), "global_steps": engine.global_steps, "scaler": scaler_of(engine)}
    found["losses"] = train(engine, *job["steps"])
    if "save" in job:
        engine.save_checkpoint(job["save"], client_state={"epoch": 3})
    found["lr"] = engine.get_lr()
    found["skipped_steps"] = engine.skipped_steps
    found["saved_scaler"] = scaler_of(engine)
    if "then" in job:
        found["then"] = train(engine, *job["then"])
    engine.destroy()
    return found


def scaler_of(engine: Any) -> list[float]:
    """Return scale, steps, last overflow and remaining hysteresis of a dynamic loss scale."""
    names = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
    return [float(getattr(engine.optimizer.loss_scaler, name, 0.0)) for name in names]


def main() -> None:
    os.environ["LOCAL_RANK"] = "0"  # DeepSpeed's engine wants it, however it was initialized
    init_distributed()
    torch.set_num_threads(1)
    for job in json.loads(sys.argv[1]):
        print("JOB" + json.dumps(run(job)), flush=True)


def argparse_of(source: str, target: str) -> Any:
    from argparse import Namespace

    return Namespace(
        input_folder=source,
        output_folder=target,
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )


if __name__ == "__main__":
    main()
