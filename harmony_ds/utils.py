"""Read and change masters, gradients and optimizer state by the names that `deepspeed.utils` has for it.

Weights and state are whole here. The "full" functions are DeepSpeed's own; the "local" ones, which DeepSpeed has for ZeRO-3
alone, give and take the same, flat, as DeepSpeed's partitions are. Parameters that no engine trains give None and stay as
they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harmony_ds.model.engine_parameter import EngineParameter

_DEEPSPEEDS = ("RepeatingLoader", "logger", "log_dist")


def __getattr__(name: str) -> Any:
    if name not in _DEEPSPEEDS and "_full_" not in name:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from deepspeed import utils

    return getattr(utils, name)


def safe_get_local_fp32_param(param: torch.nn.Parameter) -> Tensor | None:
    """Return a copy of the fp32 master of `param`."""
    return _flat(param.get_full_hp_param()) if isinstance(param, EngineParameter) else None


def safe_set_local_fp32_param(param: torch.nn.Parameter, value: Tensor) -> None:
    """Replace the master of `param`, and `param` with it."""
    if isinstance(param, EngineParameter):
        param.set_full_hp_param(value.view(param.shape))


def safe_get_local_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return a copy of the optimizer's state of `param` (such as "exp_avg"); ValueError before the first step."""
    return _flat(param.get_full_hp_param(optim_state_key)) if isinstance(param, EngineParameter) else None


def safe_set_local_optimizer_state(param: torch.nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace the optimizer's state of `param`."""
    if isinstance(param, EngineParameter):
        param.set_full_hp_param(value.view(param.shape), optim_state_key)


def safe_get_local_grad(param: torch.nn.Parameter) -> Tensor | None:
    """Return a copy of the gradient of `param` in fp32, as it has accumulated since the last step; None without one."""
    return _flat(param.get_full_hp_grad()) if isinstance(param, EngineParameter) else None


def safe_set_local_grad(param: torch.nn.Parameter, value: Tensor) -> None:
    """Replace the gradient of `param`, before it is clipped and used."""
    if isinstance(param, EngineParameter):
        param.set_full_hp_grad(value.view(param.shape))


def _flat(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.flatten()
