"""Torch's process-wide settings that change numbers, as one mapping from names to values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch

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


class Switches(MutableMapping[str, Any]):
    """Reads and writes the settings themselves."""

    def __getitem__(self, name: str) -> Any:
        return _SWITCHES[name][0]()

    def __setitem__(self, name: str, value: Any) -> None:
        _SWITCHES[name][1](value)

    def __delitem__(self, name: str) -> None:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_SWITCHES)

    def __len__(self) -> int:
        return len(_SWITCHES)


def switch_values() -> list[Any]:
    """Their values, in order."""
    return [read() for read, _ in _SWITCHES.values()]
