"""Gradients that `optimizer.step()` by hand has used, until the program drops them.

Plain PyTorch keeps them, and adds the next ones to them. The engine has released them, layer by layer: the placeholder
on `.grad` can be dropped and zeroed, and reading its values is an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.errors import UnsupportedError
from harmony_ds.model.torch_functions import name_of

_DESCRIPTIONS = frozenset(
    "shape dtype device layout ndim is_leaf requires_grad grad_fn is_sparse is_cuda is_cpu numel size dim element_size "
    "is_floating_point is_complex".split()
)
_ITSELF = frozenset("data detach detach_ requires_grad_".split())


class UsedGradient(torch.Tensor):
    """The placeholder of a parameter's gradient that has been used."""

    harmony_name: str
    harmony_parameter: nn.Parameter

    @staticmethod
    def stand_in_for(name: str, parameter: nn.Parameter) -> UsedGradient:
        used: UsedGradient = torch.Tensor._make_wrapper_subclass(
            UsedGradient, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        used.harmony_name, used.harmony_parameter = name, parameter
        return used

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"UsedGradient({self.harmony_name})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = name_of(func)
        if name in _DESCRIPTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name in _ITSELF:
            return args[0]
        if name == "_foreach_zero_":
            return [_zero(gradient) for gradient in args[0]]
        return _zero(args[0]) if name == "zero_" else _refuse(args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        _refuse(args, kwargs)


def _zero(gradient: Tensor) -> Tensor:
    if isinstance(gradient, UsedGradient):
        gradient.harmony_parameter.grad = zeros = torch.zeros(gradient.shape, dtype=gradient.dtype)
        return zeros
    return gradient.zero_()


def _refuse(*arguments: Any) -> None:
    used = next(one for one in torch.utils._pytree.tree_iter(arguments) if isinstance(one, UsedGradient))
    raise UnsupportedError(
        f"the gradient of {used.harmony_name} has been used by optimizer.step() and is gone: gradients are not kept after "
        "the update. Read, log or clip them between backward and optimizer.step() (engine.get_global_grad_norm() has their "
        "norm after it), and let no second optimizer step what the engine's optimizer trains."
    )


def check_dropped(names: set[str]) -> None:
    """Raise UnsupportedError for used gradients that plain PyTorch would add to now, or use again."""
    if names:
        named = min(names)
        if len(names) > 1:
            named += f" and {len(names) - 1} other parameters"
        raise UnsupportedError(
            f"a backward pass or a step comes to {named} whose gradient the last optimizer.step() has "
            "used and no zero_grad() has dropped: plain PyTorch would add to it, and the engine has used it up. Call "
            "optimizer.zero_grad() right after optimizer.step(), before anything else propagates through this model "
            "(a generator's loss through its discriminator, say); or take steps by engine.step(), which drops them."
        )
