"""Tensors of classes that keep their values in other tensors, such as torchao's: quantized codes and their scales."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_wrapper(value: object) -> bool:
    """Return whether `value` is a tensor that says which tensors it keeps its values in (`__tensor_flatten__`)."""
    return isinstance(value, Tensor) and is_traceable_wrapper_subclass(value)


def inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensors that `tensor`, a wrapper, keeps its values in, by the names of its attributes."""
    wrapper: Any = tensor
    names, _ = wrapper.__tensor_flatten__()
    return {name: getattr(wrapper, name) for name in names}


def stored_bytes(tensor: Tensor) -> int:
    """Return the bytes of memory that the values of `tensor` take; a wrapper's own `nbytes` is of what it stands for."""
    if is_wrapper(tensor):
        return sum(stored_bytes(inner) for inner in inner_tensors(tensor).values())
    return tensor.nbytes
