"""Settings of a thread or of the process, exchanged between the engine and the lanes, which run on the same thread.

A lane begins with what the engine has, and may put more on top of it: `with torch.no_grad():` around a few layers. When it
is suspended there, the engine goes on with its own; when it is resumed, it finds what it had put there. The layer that it
has called runs with the lane's own modes and switches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch as dispatch

from harmony_ds.device.base import Device
from harmony_ds.model.contract import read_switches, set_switches

_C: Any = torch._C
_hooks: Any = _C._autograd
_innermost_hooks = partial(_hooks._top_saved_tensors_default_hooks, True)
_STACKS: tuple[tuple[Callable[[], int], Callable[[], Any], Callable[[Any], object]], ...] = (
    (_C._len_torch_function_stack, overrides._pop_mode, overrides._push_mode),
    (_C._len_torch_dispatch_stack, dispatch._pop_mode, dispatch._push_mode),
)
"""Of each stack of torch's modes: its depth, and what takes the innermost mode off and puts one on."""


@dataclass(frozen=True, slots=True)
class SuspendedModes:
    """Settings that a suspended lane has made on top of the engine's.

    Attributes:
        put_back: closed when the lane goes on, which finds there again what it had set.
        around_layer: a context in which a layer runs as its caller would have run it; None: it does so anyway.
    """

    put_back: ExitStack
    around_layer: CallersSettings | None


@dataclass(frozen=True, slots=True)
class CallersSettings:
    """What a layer's caller has set for it; of two callers equal if a layer finds the same with either.

    Attributes:
        switches: of torch.
        modes: the functions that take each off and put it on, and the mode; the innermost last.
    """

    switches: tuple[Any, ...]
    modes: tuple[tuple[Callable[[], Any], Callable[[Any], object], Any], ...]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Set the switches and open the modes, while open."""
        with ExitStack() as stack:
            stack.callback(set_switches, read_switches())
            set_switches(self.switches)
            for pop, push, mode in self.modes:
                push(mode)
                stack.callback(pop)
            yield


class ThreadState:
    """Exchanges settings of the thread between the engine and one lane, each time that the lane stops or runs on.

    The settings are inference and grad mode, hooks on saved tensors, torch's modes and switches, autocast, the current
    stream, and the model's `forward`.
    """

    def __init__(self, device: Device, own: dict[str, Any]) -> None:
        """Exchange the host's autocast, that of `device` with its current stream, and `forward` in `own`."""
        self.device = device
        values: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
            (read_switches, set_switches),
            (torch.is_grad_enabled, _C._set_grad_enabled),
            (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
            (device.current, device.make_current),
            (partial(own.get, "forward"), partial(put_forward, own)),  # MatryoshkaLoss replaces it for each micro-batch
        ]
        for kind in filter(torch.amp.is_autocast_available, {"cpu", device.torch_device.type}):
            values.append((partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)))
            values.append((partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)))
        self._reads = [read for read, _ in values]
        self._writes = [write for _, write in values]

    def read(self) -> tuple[Any, ...]:
        """Return the settings as they are now."""
        depths = _C._len_torch_function_stack(), _C._len_torch_dispatch_stack()  # of _STACKS
        return torch.is_inference_mode_enabled(), _innermost_hooks(), depths, [read() for read in self._reads]

    def restore(self, engines: tuple[Any, ...]) -> SuspendedModes | None:
        """Set everything as it was when `engines` was read; return what was otherwise."""
        now = self.read()
        return None if now == engines else self._exchange(now, engines)  # the common case

    def _exchange(self, lanes: tuple[Any, ...], engines: tuple[Any, ...]) -> SuspendedModes:
        inference, hooks, depths, values = engines
        put_back, modes = ExitStack(), []
        put_back.callback(self._write, lanes[-1])  # the last to be put back, and the last to be restored
        if lanes[0] != inference:
            put_back.enter_context(torch.inference_mode(inference))
        while (pair := _innermost_hooks()) is not None and pair != hooks:
            _hooks._pop_saved_tensors_default_hooks()
            put_back.callback(_hooks._push_saved_tensors_default_hooks, *pair)
        for (depth, pop, push), engines_depth in zip(_STACKS, depths, strict=True):
            while depth() > engines_depth:
                modes.append((pop, push, pop()))
                put_back.callback(push, modes[-1][-1])
        self._write(values)
        switches = lanes[-1][0]
        as_it_is = not modes and switches == values[0]
        return SuspendedModes(put_back, None if as_it_is else CallersSettings(switches, tuple(modes[::-1])))

    def _write(self, values: list[Any]) -> None:
        for write, value in zip(self._writes, values, strict=True):
            write(value)


def put_forward(own: dict[str, Any], forward: Any) -> None:
    """Set `forward` among a module's own attributes; None: it has none."""
    own["forward"] = forward
    if forward is None:
        del own["forward"]
