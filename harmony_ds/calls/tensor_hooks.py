"""Notices who asks for gradients of tensors on their way: by `register_hook`, `retain_grad`, hooks of all modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.modules.module as all_modules
from torch import Tensor

from harmony_ds.calls.places import Places, patched
from harmony_ds.calls.trees import tensors_in
from harmony_ds.errors import UnsupportedError

Noticed = Callable[[str, Tensor], None]
"""Is told which method is called, and of which tensor."""


@contextmanager
def noticing_hooks(noticed: Noticed) -> Iterator[None]:
    """While open, `noticed` is told of what is called; what the engine itself registers is none of it."""

    def registering(register: Any) -> Any:
        def registered(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
            if not is_ours(hook):
                noticed("register_hook", tensor)
            return register(tensor, hook)

        return registered

    def retaining(retain: Any) -> Any:
        def retained(tensor: Tensor) -> None:
            noticed("retain_grad", tensor)
            retain(tensor)

        return retained

    with patched(Tensor, "register_hook", registering), patched(Tensor, "retain_grad", retaining):
        yield


def is_ours(hook: Any) -> bool:
    """Whether a hook is the engine's own."""
    return getattr(getattr(hook, "func", hook), "__module__", "").partition(".")[0] == "harmony_ds"


def hooked_as_a_module() -> bool:
    """Whether torch puts backward hooks of the program's on what a call of any module gives, an engine's included."""
    return bool(all_modules._global_backward_hooks or all_modules._global_backward_pre_hooks)


class LeftTensors:
    """Tensors that a forward pass has kept on modules and variables, and the hooks that they had when it was over."""

    def __init__(self, places: Places = (), but: Iterable[Tensor] = ()) -> None:
        """`but`: those that the program has got as outputs, whose gradients autograd itself computes."""
        outputs = {id(tensor) for tensor in but}
        self._found = [
            (place.key, weakref.ref(tensor), _hooks_of(tensor))
            for place in places
            for tensor in tensors_in(place.read())
            if tensor.requires_grad and not tensor.is_leaf and id(tensor) not in outputs
        ]

    def check(self) -> None:
        """Raises UnsupportedError if one has got a hook since, which would not see its gradient."""
        for key, reference, hooks in self._found:
            tensor = reference()
            if tensor is not None and _hooks_of(tensor) != hooks:
                raise UnsupportedError(
                    f"register_hook() or retain_grad() was called on a tensor that forward kept in {key} when the call was "
                    "over: layers have taken it by then, and their gradients come past it. Call it in forward (or in a "
                    "forward hook), where the tensor is made: if h.requires_grad: h.retain_grad()."
                )


def _hooks_of(tensor: Tensor) -> tuple[bool, int]:
    return tensor.retains_grad, len(tensor._backward_hooks or ())
