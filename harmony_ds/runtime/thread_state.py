"""What is set for a thread or for the process, exchanged between the engine and the lanes, which run on the same thread.

A lane begins with what the engine has, and may put more on top of it: `with torch.no_grad():` around a few layers. When it
is suspended there, the engine goes on with its own; when it is resumed, it finds what it had put there. The layer that it
has called runs with the lane's own modes and switches.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch as dispatch

from harmony_ds.calls.switches import read_switches, set_switches
from harmony_ds.device.base import Device

_PutBack = Callable[[], object]

_innermost_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
_functions: Any = torch._C._len_torch_function_stack
_dispatches: Any = torch._C._len_torch_dispatch_stack
_C: Any = torch._C
_subclasses: Any = _C._get_torch_function_state
_disabled_hooks: Any = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message


class ThreadState:
    """As they are now: grad mode, inference mode, autocast, open modes, hooks on saved tensors, torch's switches, the
    running event loop, how deep calls may go, and the stream that is issued on.
    """

    __slots__ = ("_device", "_state")

    def __init__(self, device: Device) -> None:
        """`device`: whose autocast may be on beside the host's, and whose stream is meant."""
        self._device = device
        self._state = _read(device)

    @property
    def is_now(self) -> bool:
        """Whether everything is as it was."""
        return _read(self._device) == self._state

    def follow(self, began: ThreadState | None = None) -> None:
        """What is otherwise now of the process's own, and was when a lane `began`, stays."""
        now = _of_process()
        if now != (began or self)._state[-2]:
            self._state = (*self._state[:-2], now, self._state[-1])

    def restore(self) -> Own | None:
        """Makes everything what it was; returns what was otherwise."""
        now = _read(self._device)
        return None if now == self._state else self._restore(now)  # as it mostly is

    def _restore(self, now: tuple[Any, ...]) -> Own:
        inference, functions, dispatches, hooks, *_, process, place = self._state
        switches = now[-2][-1]
        own = Own(partial(self._set_flags, now), switches if switches != process[-1] else None)
        if now[-1] != place:
            self._device.make_current(place)
            own.put_back.append(partial(self._device.make_current, now[-1]))
        if torch.is_inference_mode_enabled() != inference:
            guard = torch._C._InferenceMode(inference)
            guard.__enter__()
            own.put_back.append(partial(guard.__exit__, None, None, None))
        while _dispatches() > dispatches:
            own.take_mode(dispatch._push_mode, dispatch._pop_mode)
        while _functions() > functions:
            own.take_mode(overrides._push_mode, overrides._pop_mode)
        while (pair := _innermost_hooks(True)) is not None and pair != hooks:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            own.put_back.append(partial(torch._C._autograd._push_saved_tensors_default_hooks, *pair))
        self._set_flags(self._state)
        return own

    def _set_flags(self, state: tuple[Any, ...]) -> None:
        *_, grad, host, device, caches, subclasses, disabled, loop, (anomaly, depth, switches), _ = state
        torch._C._set_grad_enabled(grad)
        torch.set_autocast_cache_enabled(caches)
        for kind, autocast in (("cpu", host), (self._device.torch_device.type, device)):
            if autocast is not None:
                torch.set_autocast_enabled(kind, autocast[0])
                torch.set_autocast_dtype(kind, autocast[1])
        _C._set_torch_function_state(subclasses)
        if disabled is None:
            torch._C._autograd._saved_tensors_hooks_enable()
        else:
            torch._C._autograd._saved_tensors_hooks_disable(disabled)
        asyncio._set_running_loop(loop)
        torch.set_anomaly_enabled(*anomaly)
        sys.setrecursionlimit(depth)
        set_switches(switches)


class Own:
    """What a lane has put on top of the engine's.

    Attributes:
        put_back: puts it there again, the last one first.
    """

    def __init__(self, put_back: _PutBack, switches: tuple[Any, ...] | None) -> None:
        """`switches`: torch's, if they are the lane's own."""
        self.put_back = [put_back]
        self._switches = switches
        self._modes: list[tuple[Callable[[Any], object], Callable[[], Any], Any]] = []  # the innermost first

    def take_mode(self, push: Callable[[Any], object], pop: Callable[[], Any]) -> None:
        """Closes the innermost mode of a kind."""
        mode = pop()
        self.put_back.append(partial(push, mode))
        self._modes.append((push, pop, mode))

    def again(self) -> None:
        """Everything is the lane's again."""
        for put_back in reversed(self.put_back):
            put_back()

    @property
    def around_layer(self) -> Callable[[], AbstractContextManager[None]] | None:
        """A context in which a layer runs as its caller would have run it; None: it does so anyway."""
        return self._around_layer if self._modes or self._switches is not None else None

    @contextmanager
    def _around_layer(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._switches is not None:
                stack.callback(set_switches, read_switches())
                set_switches(self._switches)
            for push, pop, mode in reversed(self._modes):
                push(mode)
                stack.callback(pop)
            yield


def _read(device: Device) -> tuple[Any, ...]:
    kind, beside = device.torch_device.type, None
    if kind != "cpu" and _has_autocast(kind):
        beside = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return (
        torch.is_inference_mode_enabled(),
        _functions(),
        _dispatches(),
        _innermost_hooks(True),
        torch.is_grad_enabled(),
        (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        beside,
        torch.is_autocast_cache_enabled(),
        _subclasses(),
        _disabled_hooks(),
        asyncio._get_running_loop(),
        _of_process(),
        device.current(),
    )


def _of_process() -> tuple[Any, ...]:
    anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    return anomaly, sys.getrecursionlimit(), read_switches()


_has_autocast = functools.cache(torch.amp.is_autocast_available)
