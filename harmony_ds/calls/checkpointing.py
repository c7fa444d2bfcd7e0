"""`torch.utils.checkpoint` and `deepspeed.checkpointing` in code that the engine runs: they pass straight through.

Layers are recomputed anyway, on parameters that are on the device for that time alone; a checkpoint's own recomputation
would come later. What stands around a layer would run the model's code, lanes included, in the middle of a backward
pass. Elsewhere checkpoints are what they were.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from harmony_ds.errors import UsageError


class _Engine(threading.local):
    runs = False


_engine = _Engine()
_generator = torch.utils.checkpoint._checkpoint_without_reentrant_generator


_DEEPSPEEDS = "deepspeed.runtime.activation_checkpointing.checkpointing"
_taken_over: Any = None
"""What stands there for its autograd function, and asks `_engine`."""


@contextmanager
def passed_through() -> Iterator[None]:
    """While open, this thread's checkpoints are calls of what they are given."""
    module = sys.modules.get(_DEEPSPEEDS)
    if module is not None and module.__dict__.get("CheckpointFunction") is not _taken_over:
        _take_over_deepspeeds()
    before, _engine.runs = _engine.runs, True
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


def _without_reentry(
    fn: Any, preserve: bool = True, context_fn: Any = None, *args: Any, **kwargs: Any
) -> Iterator[None]:
    """The generator that runs up to a checkpointed call and behind it."""
    if not _engine.runs:
        yield from _generator(fn, preserve, context_fn, *args, **kwargs)
        return
    forward, _ = context_fn()
    with forward:
        yield


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


def _take_over_deepspeeds() -> None:
    """DeepSpeed's, which takes seconds to import and may come at any time, once it is there."""
    global _taken_over  # noqa: PLW0603 - as the module is
    module: Any = sys.modules.get(_DEEPSPEEDS)
    function = getattr(module, "CheckpointFunction", None)  # None: it is being imported
    if function is not None and not isinstance(function, _Reentrant):
        module.CheckpointFunction = _Reentrant(function, _deepspeeds)
    _taken_over = getattr(module, "CheckpointFunction", None)


# These are looked up in their modules when `checkpoint` is called.
torch.utils.checkpoint._checkpoint_without_reentrant_generator = _without_reentry  # type: ignore[assignment]
torch.utils.checkpoint.CheckpointFunction = _Reentrant(  # type: ignore[assignment, misc]
    torch.utils.checkpoint.CheckpointFunction, _torchs
)
