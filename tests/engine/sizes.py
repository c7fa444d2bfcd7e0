"""Bytes of a Llama's layers as plans count them."""

from __future__ import annotations

from torch import nn

LLAMA_CALLS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm", "lm_head")


def rounded(nbytes: int) -> int:
    """A parameter starts at a multiple of 64 bytes."""
    return (nbytes + 63) // 64 * 64


def layer_bytes(model: nn.Module, element: int) -> list[int]:
    """Bytes of each call's parameters, in call order."""
    modules = [model.get_submodule(name) for name in LLAMA_CALLS]
    return [sum(rounded(p.numel() * element) for p in module.parameters()) for module in modules]


def packed(layers: list[int], pack: int) -> list[int]:
    """Bytes of each pack; packs are counted from the last call."""
    backwards = layers[::-1]
    return [sum(backwards[start : start + pack]) for start in range(0, len(layers), pack)][::-1]
