"""A `forward` that takes itself away when reached, as `_ForwardRedirection` of Lightning and of TRL puts on a module.

A call of the engine reaches it later than it was made, and more than once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from harmony_ds.model.intercept import InterceptedForward
from harmony_ds.runtime.thread_state import put_forward


class ReplacedForward:
    """Makes calls of a module by the `forward` that a library has put on it for one call, which then takes itself away."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._left: dict[object, Any] = {_code(None): None}

    @property
    def is_new(self) -> bool:
        """Whether nothing like the callable there has run so far."""
        return _code(self._standing()) not in self._left

    def call(self) -> Callable[..., Any]:
        """Return a call of the module by the callable there now, which is there no more if it takes itself away."""
        put = self._standing()

        def call(*args: Any, **kwargs: Any) -> Any:
            put_forward(vars(self._module), put)
            outputs = self._module(*args, **kwargs)
            self._left.setdefault(_code(put), self._standing())
            return outputs

        left = self._left.get(_code(put), put)
        if _code(left) != _code(put):
            put_forward(vars(self._module), left)
        return self._module if put is None else call

    def _standing(self) -> Any:
        put = self._module.__dict__.get("forward")
        return None if isinstance(put, InterceptedForward) else put


def _code(forward: Any) -> object:
    """Return what is the same of functions that are made anew for every call."""
    return getattr(forward, "__code__", type(forward))
