"""Notices that a forward pass asks for gradients of tensors on their way: `register_hook`, `retain_grad`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def noticing_hooks() -> Iterator[list[str]]:
    """While open, the list gets the name of what is called; what the engine itself registers is none of it."""
    noticed: list[str] = []
    register, retain = torch.Tensor.register_hook, torch.Tensor.retain_grad

    def registering(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        if not is_ours(hook):
            noticed.append("register_hook")
        return register(tensor, hook)

    def retaining(tensor: Tensor) -> None:
        noticed.append("retain_grad")
        retain(tensor)

    own = {key: vars(torch.Tensor).get(key) for key in ("register_hook", "retain_grad")}
    torch.Tensor.register_hook, torch.Tensor.retain_grad = registering, retaining  # type: ignore[method-assign, assignment]
    try:
        yield noticed
    finally:
        for key, value in own.items():
            if value is None:
                delattr(torch.Tensor, key)
            else:
                setattr(torch.Tensor, key, value)


def is_ours(hook: Any) -> bool:
    """Whether a hook is the engine's own."""
    return getattr(hook, "__module__", "").partition(".")[0] == "harmony_ds"
