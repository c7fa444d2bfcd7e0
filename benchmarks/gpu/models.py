"""Models of billions of parameters, made in seconds: their weights repeat one block of random normal numbers.

`harmony-ds` takes them as MODEL: `benchmarks.gpu.models:llama_6b`. Random initialization by transformers takes minutes
at this size, for every process of a comparison anew.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, GPT2LMHeadModel, LlamaForCausalLM
from transformers.initialization import no_init_weights

SHAPES = Path(__file__).resolve().parents[1] / "models"
_BLOCK = 2**20
_SCALE = 0.02


def gpt2_1b5() -> nn.Module:
    """1.56 billion parameters."""
    return _made(GPT2LMHeadModel, "gpt2-1.5b")


def llama_3b() -> nn.Module:
    """3.1 billion parameters."""
    return _made(LlamaForCausalLM, "llama-3b")


def llama_6b() -> nn.Module:
    """5.9 billion parameters: with ZeRO-3 offload (20 bytes each) still within 128 GiB of host memory."""
    return _made(LlamaForCausalLM, "llama-6b")


def llama_8b() -> nn.Module:
    """7.9 billion parameters: what 128 GiB of host memory hold at 14 bytes each."""
    return _made(LlamaForCausalLM, "llama-8b")


def llama_7m() -> nn.Module:
    """6.6 million parameters, for a machine without a GPU."""
    return _made(LlamaForCausalLM, "llama-7m")


def _made(kind: type, name: str) -> nn.Module:
    config = AutoConfig.from_pretrained(str(SHAPES / f"{name}.json"))
    with no_init_weights():
        model: nn.Module = kind._from_config(config, dtype=torch.bfloat16)
    if next(model.parameters()).device.type == "meta":
        return model
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    block = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0)).mul_(_SCALE).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)  # of a norm; a bias of 1 does no harm to a benchmark
                continue
            flat = parameter.view(-1)
            # Tiles end at odd places, so that no two rows of a matrix are alike.
            for first in itertools.count(0, _BLOCK - 7):
                if first >= len(flat):
                    break
                part = flat[first : first + _BLOCK - 7]
                part.copy_(block[: len(part)])
    return model
