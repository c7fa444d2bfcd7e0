"""Device memory that CUDA kernels take for themselves while they run: no tensor that an operation returns shows it.

On a GPU the allocator counts it. On the meta device it is worked out here, for the kernels whose scratch is not small.
Paths of torch are below aten/src/ATen/native.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_aten = torch.ops.aten
_FP32_BYTES, _INDEX_BYTES = 4, 8
_ATTENTION_ROWS = 128
_UNSORTED_INDICES = 3072
_INDEX_ARRAYS = 6


def scratch_bytes(operation: Any, arguments: Sequence[Any]) -> int:
    """Return the bytes that the kernel of an operation takes beside its results; 0: little, or not known.

    flash attention, backward    gradients of the queries in fp32 (dq_accum), a number for each row (softmax_d), with rows
                                 and widths rounded up (torch, transformers/cuda/flash_attn/flash_api.cpp)
    embedding, backward          of more than 3072 indices: a partial sum in fp32 for each index, and six arrays of sorted
                                 indices (torch, cuda/EmbeddingBackwardKernel.cu)
    """
    packet = getattr(operation, "_overloadpacket", None)  # None: an operator of functions
    if packet is _aten._scaled_dot_product_flash_attention_backward:
        return _flash_backward_bytes(*arguments[1].shape)
    if packet is _aten.embedding_dense_backward:
        return _embedding_backward_bytes(indices=arguments[1].numel(), width=arguments[0].shape[-1])
    return 0


def _flash_backward_bytes(batch: int, heads: int, rows: int, width: int) -> int:
    rounded_width = _round_up(width, 32 if width <= 128 else 64)
    return _FP32_BYTES * batch * heads * _round_up(rows, _ATTENTION_ROWS) * (rounded_width + 1)


def _embedding_backward_bytes(indices: int, width: int) -> int:
    if indices <= _UNSORTED_INDICES:
        return 0
    return indices * (_FP32_BYTES * width + _INDEX_ARRAYS * _INDEX_BYTES)


def _round_up(number: int, grain: int) -> int:
    return -(-number // grain) * grain
