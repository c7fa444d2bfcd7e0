"""What torch keeps for a thread, exchanged between the engine and the lanes, which run on the same one.

A lane begins with what the engine has, and may put more on top of it: `with torch.no_grad():` around a few layers. When it
is suspended there, the engine goes on with its own; when it is resumed, it finds what it had put there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch as dispatch

from harmony_ds.device.base import Device

_PutBack = Callable[[], object]

_innermost_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
_functions: Any = torch._C._len_torch_function_stack
_dispatches: Any = torch._C._len_torch_dispatch_stack


class ThreadState:
    """Of the calling thread, as they are now: grad mode, inference mode, autocast, open modes, hooks on saved tensors, and
    the stream that is issued on.
    """

    __slots__ = ("_device", "_state")

    def __init__(self, device: Device) -> None:
        """`device`: whose autocast may be on beside the host's, and whose stream is meant."""
        self._device = device
        self._state = _read(device)

    def restore(self) -> list[_PutBack]:
        """Makes the thread what it was; returns what undoes that, in order."""
        now = _read(self._device)
        return [] if now == self._state else self._restore(now)  # as it mostly is

    def _restore(self, now: tuple[Any, ...]) -> list[_PutBack]:
        _, inference, *_, functions, dispatches, hooks, place = self._state
        put_back: list[_PutBack] = [partial(self._set_flags, now)]
        if now[-1] != place:
            self._device.make_current(place)
            put_back.append(partial(self._device.make_current, now[-1]))
        if torch.is_inference_mode_enabled() != inference:
            guard = torch._C._InferenceMode(inference)
            guard.__enter__()
            put_back.append(partial(guard.__exit__, None, None, None))
        while _dispatches() > dispatches:
            put_back.append(partial(dispatch._push_mode, dispatch._pop_mode()))
        while _functions() > functions:
            put_back.append(partial(overrides._push_mode, overrides._pop_mode()))
        while (pair := _innermost_hooks(True)) is not None and pair != hooks:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            put_back.append(partial(torch._C._autograd._push_saved_tensors_default_hooks, *pair))
        self._set_flags(self._state)
        return put_back[::-1]

    def _set_flags(self, state: tuple[Any, ...]) -> None:
        grad, _, host, device, caches, *_ = state
        torch._C._set_grad_enabled(grad)
        torch.set_autocast_cache_enabled(caches)
        for kind, autocast in (("cpu", host), (self._device.torch_device.type, device)):
            if autocast is not None:
                torch.set_autocast_enabled(kind, autocast[0])
                torch.set_autocast_dtype(kind, autocast[1])


def _read(device: Device) -> tuple[Any, ...]:
    kind, beside = device.torch_device.type, None
    if kind != "cpu" and _has_autocast(kind):
        beside = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        beside,
        torch.is_autocast_cache_enabled(),
        _functions(),
        _dispatches(),
        _innermost_hooks(True),
        device.current(),
    )


_has_autocast = functools.cache(torch.amp.is_autocast_available)
