"""Transformers of diffusers, with LoRA, beside plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import harmony_ds
from tests.oracle import assert_same

diffusers = pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.fixed_times

ROWS, PATCHES, WORDS = 2, 16, 5


def flux() -> nn.Module:
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 6, 6),
        guidance_embeds=True,
    )
    transformer.requires_grad_(False)
    names = ["attn.to_q", "attn.to_v", "proj_mlp"]
    transformer.add_adapter(peft.LoraConfig(r=2, init_lora_weights=False, target_modules=names))
    return transformer


def batches(count: int) -> list[tuple[dict[str, Any], Tensor]]:
    """Return the arguments of each call, and what is to be predicted."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    made = []
    for _ in range(count):
        arguments = {
            "hidden_states": random(ROWS, PATCHES, 4),
            "encoder_hidden_states": random(ROWS, WORDS, 16),
            "pooled_projections": random(ROWS, 8),
            "timestep": torch.rand(ROWS, generator=generator),
            "guidance": torch.full((ROWS,), 3.5),
            "txt_ids": torch.zeros(WORDS, 3),
            "img_ids": torch.arange(PATCHES).repeat(3, 1).T.float(),
            "return_dict": False,
        }
        made.append((arguments, random(ROWS, PATCHES, 4)))
    return made


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)


@pytest.mark.parametrize("harmony", [{"pack_layers": 1}, {"pack_layers": 2, "residency": "off"}], ids=str)
def test_lora_of_flux_has_plain_pytorchs_bits_and_each_block_crosses_once(harmony: dict[str, Any]) -> None:
    plain = flux()
    optimizer = adamw(plain)
    expected = []
    for group in (batches(4)[:2], batches(4)[2:]):
        for arguments, target in group:
            loss = F.mse_loss(plain(**arguments)[0], target)
            (loss / 2).backward()
            expected.append(loss.detach())
        nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()

    model = flux()
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "harmony": {"device": "cpu", **harmony},
    }
    engine, *_ = harmony_ds.initialize(model=model, optimizer=adamw(model), config=config)
    losses = []
    for arguments, target in batches(4):
        loss = F.mse_loss(engine(**arguments)[0], target)
        engine.backward(loss)
        losses.append(loss.detach())
        engine.step()
    assert engine.swap_report().ratio == 1.0
    assert [float(loss) for loss in losses] == [float(loss) for loss in expected]
    assert_same(model, plain, bitwise=True)
    engine.destroy()
    model.to(torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
