"""`torch.utils.checkpoint` and `deepspeed.checkpointing` in code that the engine runs: they pass straight through.

Layers are recomputed anyway, on parameters that are on the device for that time alone; a checkpoint's own recomputation
would come later. What stands around a layer would run the model's code, lanes included, in the middle of a backward
pass. In other threads checkpoints are what they were, and when no engine runs, torch's own stand in torch's modules.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
import torch.utils.checkpoint
from torch import Tensor

from harmony_ds.errors import UsageError


class _Engine(threading.local):
    runs = False


_engine = _Engine()


@contextmanager
def passed_through() -> Iterator[None]:
    """While open, this thread's checkpoints are calls of what they are given."""
    before = _engine.runs
    with _stand_ins:
        _engine.runs = True
        try:
            yield
        finally:
            _engine.runs = before


def refuse_around_engine() -> None:
    """Raises UsageError where a checkpoint of the caller's own is open: its recomputation would call the engine again."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and getattr(hooks[0], "__module__", None) == torch.utils.checkpoint.__name__:
        raise UsageError(
            "the engine was called within a checkpoint of torch.utils, which would call it again during the backward pass. "
            "Call the engine itself: it recomputes layers anyway. Checkpoints inside the model may stay."
        )


def _without_reentry(generator: Any) -> Any:
    """Return what stands for the generator that runs up to a checkpointed call, and on after it."""

    def run(fn: Any, preserve: bool = True, context_fn: Any = None, *args: Any, **kwargs: Any) -> Iterator[None]:
        if not _engine.runs:
            yield from generator(fn, preserve, context_fn, *args, **kwargs)
            return
        forward, _ = context_fn()
        with forward:
            yield

    return run


class _Reentrant:
    """Stands for an autograd function that runs without a graph, and again in the backward pass.

    Args:
        function: the autograd function.
        passed: what it does where the engine runs, with the arguments of its `apply`; two of them come before those of
            what is checkpointed.
    """

    def __init__(self, function: Any, passed: Callable[..., Any]) -> None:
        self._function = function
        self._passed = passed

    def apply(self, *args: Any) -> Any:
        if not _engine.runs:
            return self._function.apply(*args)
        # It gives nothing that requires a gradient unless one of its own arguments does.
        needed = any(isinstance(argument, Tensor) and argument.requires_grad for argument in args[2:])
        with torch.set_grad_enabled(torch.is_grad_enabled() and needed):
            return self._passed(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def _torchs(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
    return function(*args)


def _deepspeeds(function: Callable[..., Any], outputs: list[Any], *args: Any) -> None:
    result = function(*args)
    outputs += [result] if isinstance(result, Tensor) else result


_TORCHS = "torch.utils.checkpoint"
_DEEPSPEEDS = "deepspeed.runtime.activation_checkpointing.checkpointing"  # seconds to import: it may come at any time


class _StandIns:
    """What stands in the modules where checkpoints look it up, while the engine runs in any thread."""

    _MAKE: ClassVar[dict[tuple[str, str], Callable[[Any], Any]]] = {
        (_TORCHS, "_checkpoint_without_reentrant_generator"): _without_reentry,
        (_TORCHS, "CheckpointFunction"): partial(_Reentrant, passed=_torchs),
        (_DEEPSPEEDS, "CheckpointFunction"): partial(_Reentrant, passed=_deepspeeds),
    }

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the garbage collector may end a context in here
        self._open = 0
        self._originals: dict[tuple[str, str], Any] = {}

    def __enter__(self) -> None:
        with self._lock:
            self._open += 1
            for place, make in self._MAKE.items():
                module, name = sys.modules.get(place[0]), place[1]
                if place not in self._originals and hasattr(module, name):  # it may be in the middle of its import
                    self._originals[place] = getattr(module, name)
                    setattr(module, name, make(self._originals[place]))

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._open -= 1
            while self._originals and not self._open:
                (module, name), original = self._originals.popitem()
                setattr(sys.modules[module], name, original)


_stand_ins = _StandIns()
