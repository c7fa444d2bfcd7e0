"""Torch's process-wide switches that change numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_C: Any = torch._C  # whose functions are read at every layer call
_cuda = torch.backends.cuda


def _set_deterministic(state: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(state[0], warn_only=state[1])


SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "torch.get_default_dtype()": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.get_float32_matmul_precision()": (_C._get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "torch.are_deterministic_algorithms_enabled()": (
        lambda: (_C._get_deterministic_algorithms(), _C._get_deterministic_algorithms_warn_only()),
        _set_deterministic,
    ),
    "the math kernel of attention": (_C._get_math_sdp_enabled, _cuda.enable_math_sdp),
    "the flash kernel of attention": (_C._get_flash_sdp_enabled, _cuda.enable_flash_sdp),
    "the memory-efficient kernel of attention": (_C._get_mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    "the cuDNN kernel of attention": (_C._get_cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    "torch.backends.cudnn.enabled": (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    "torch.backends.cudnn.benchmark": (_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    "torch.backends.cudnn.deterministic": (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
    "torch.backends.mkldnn.enabled": (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
}
"""By name: how each is read and set."""

_read = [read for read, _ in SWITCHES.values()]
_set = [write for _, write in SWITCHES.values()]


def read_switches() -> tuple[Any, ...]:
    """As they are now, in their order."""
    return tuple([read() for read in _read])


def set_switches(values: tuple[Any, ...]) -> None:
    """Sets those that are otherwise."""
    for write, value, now in zip(_set, values, read_switches(), strict=True):
        if value != now:
            write(value)
