"""Torch's process-wide switches that change numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_C: Any = torch._C  # whose functions are read at every layer call
_cuda = torch.backends.cuda


def _set_deterministic(mode: int) -> None:
    torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)


_SWITCHES: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (_C._get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, _set_deterministic),
    (_C._get_math_sdp_enabled, _cuda.enable_math_sdp),
    (_C._get_flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_C._get_mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_C._get_cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    (_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
    (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
]
"""Reader and writer of each switch."""

_read = [read for read, _ in _SWITCHES]


def read_switches() -> tuple[Any, ...]:
    """Return the current values."""
    return tuple([read() for read in _read])


def set_switches(values: tuple[Any, ...]) -> None:
    """Set the switches whose current values differ."""
    for (_, write), value, now in zip(_SWITCHES, values, read_switches(), strict=True):
        if value != now:
            write(value)
