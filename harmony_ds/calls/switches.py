"""Torch's process-wide settings that change numbers, as places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from harmony_ds.calls.places import Place

_cuda, _cudnn = torch.backends.cuda, torch.backends.cudnn


def _set_deterministic(state: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(state[0], warn_only=state[1])


_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "torch.get_default_dtype()": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.get_float32_matmul_precision()": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "torch.are_deterministic_algorithms_enabled()": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _set_deterministic,
    ),
    "the math kernel of attention": (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    "the flash kernel of attention": (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    "the memory-efficient kernel of attention": (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    "the cuDNN kernel of attention": (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    "torch.backends.cudnn.enabled": (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    "torch.backends.cudnn.benchmark": (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    "torch.backends.cudnn.deterministic": (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    "torch.backends.mkldnn.enabled": (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
}


class Switch(Place):
    """One of them; it is always there."""

    __slots__ = ()

    def read(self) -> Any:
        return self.held[self.key][0]()

    def write(self, value: Any) -> None:
        self.held[self.key][1](value)


SWITCHES = tuple(Switch(_SWITCHES, name, name) for name in _SWITCHES)
