"""What scripts take from `deepspeed.utils`: looking at, and changing, masters and optimizer state.

Weights and state are whole here, so the "full" and the "local" functions differ in shape only: local ones are flat, as
DeepSpeed's partitions are. Parameters that no engine trains give None and stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harmony_ds.parameters import EngineParameter

_DEEPSPEEDS = ("RepeatingLoader", "logger", "log_dist")

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
]


def __getattr__(name: str) -> Any:
    if name not in _DEEPSPEEDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from deepspeed import utils

    return getattr(utils, name)


def safe_get_full_fp32_param(param: torch.nn.Parameter) -> Tensor | None:
    """A copy of the fp32 master of `param`."""
    return param.get_full_hp_param() if isinstance(param, EngineParameter) else None


def safe_set_full_fp32_param(param: torch.nn.Parameter, value: Tensor) -> None:
    """Replaces the master of `param`, and `param` with it."""
    if isinstance(param, EngineParameter):
        param.set_full_hp_param(value)


def safe_get_full_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A copy of the optimizer's state of `param` (such as "exp_avg").

    Raises:
        ValueError: there is none of that name, or no step has been taken yet.
    """
    return param.get_full_hp_param(optim_state_key) if isinstance(param, EngineParameter) else None


def safe_set_full_optimizer_state(param: torch.nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replaces the optimizer's state of `param`."""
    if isinstance(param, EngineParameter):
        param.set_full_hp_param(value, optim_state_key)


def safe_get_full_grad(param: torch.nn.Parameter) -> Tensor | None:
    """A copy of the gradient of `param` in fp32, as it has gathered since the last step; None if there is none."""
    return param.get_full_hp_grad() if isinstance(param, EngineParameter) else param.grad


def safe_set_full_grad(param: torch.nn.Parameter, value: Tensor) -> None:
    """Replaces the gradient of `param`, before it is clipped and used."""
    if isinstance(param, EngineParameter):
        param.set_full_hp_grad(value)
    elif param.grad is not None:
        param.grad.copy_(value)


def safe_update_full_grad_vectorized(
    param_list: list[torch.nn.Parameter], update_func: Callable[[Tensor, torch.nn.Parameter], Tensor]
) -> None:
    """Replaces the gradients of `param_list` by what `update_func` makes of them."""
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


def safe_get_local_fp32_param(param: torch.nn.Parameter) -> Tensor | None:
    """`safe_get_full_fp32_param`, flat."""
    return _flat(safe_get_full_fp32_param(param))


def safe_set_local_fp32_param(param: torch.nn.Parameter, value: Tensor) -> None:
    """`safe_set_full_fp32_param` of a flat value."""
    safe_set_full_fp32_param(param, value.view(param.shape))


def safe_get_local_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> Tensor | None:
    """`safe_get_full_optimizer_state`, flat."""
    return _flat(safe_get_full_optimizer_state(param, optim_state_key))


def safe_set_local_optimizer_state(param: torch.nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """`safe_set_full_optimizer_state` of a flat value."""
    safe_set_full_optimizer_state(param, value.view(param.shape), optim_state_key)


def safe_get_local_grad(param: torch.nn.Parameter) -> Tensor | None:
    """`safe_get_full_grad`, flat."""
    return _flat(safe_get_full_grad(param))


def safe_set_local_grad(param: torch.nn.Parameter, value: Tensor) -> None:
    """`safe_set_full_grad` of a flat value."""
    safe_set_full_grad(param, value.view(param.shape))


def _flat(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.flatten()
