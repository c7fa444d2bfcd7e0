"""FLUX.1-dev's transformer and a micro-batch of one image, for `harmony-ds estimate`: nothing is downloaded or allocated.

harmony-ds estimate examples.flux_lora.size:flux_dev --machine rtx4090 --lora 16 --accumulation 8
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn

PATCHES_PER_SIDE, PROMPT_TOKENS = 64, 512  # an image of 1024 x 1024 pixels


class FluxLoss(nn.Module):
    """The transformer with a loss of its prediction, as estimates need it."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = FluxTransformer2DModel(guidance_embeds=True)  # the other sizes are FLUX.1-dev's by default

    def forward(self, latents: Tensor, **inputs: Tensor) -> Tensor:
        prediction = self.transformer(hidden_states=latents, return_dict=False, **inputs)[0]
        return F.mse_loss(prediction, latents)


def flux_dev() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the model with its loss, and the keyword arguments of one micro-batch."""
    model = FluxLoss()
    config, patches = model.transformer.config, PATCHES_PER_SIDE**2
    return model, {
        "latents": torch.zeros(1, patches, config.in_channels),
        "timestep": torch.zeros(1),
        "guidance": torch.zeros(1),
        "pooled_projections": torch.zeros(1, config.pooled_projection_dim),
        "encoder_hidden_states": torch.zeros(1, PROMPT_TOKENS, config.joint_attention_dim),
        "txt_ids": torch.zeros(PROMPT_TOKENS, 3),
        "img_ids": torch.zeros(patches, 3),
    }
