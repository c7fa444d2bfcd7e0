"""`torch.utils.checkpoint` and `deepspeed.checkpointing` in code that the engine runs: they pass straight through.

Layers are recomputed anyway, on parameters that are on the device for that time alone; a checkpoint's own recomputation
would come later. What stands around a layer would run the model's code, lanes included, in the middle of a backward
pass. So from the first time on that an engine runs, checkpoints ask whether one does so on their thread; where none does,
they are what they were.
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
_DEEPSPEEDS = "deepspeed.runtime.activation_checkpointing.checkpointing"  # seconds to import: it may come at any time


@contextmanager
def checkpoints_bypassed() -> Iterator[None]:
    """While open, this thread's checkpoints are calls of what they are given."""
    torch.utils.checkpoint._checkpoint_without_reentrant_generator = _without_reentry  # type: ignore[assignment]
    _make_ask(torch.utils.checkpoint.CheckpointFunction, _torchs)
    _make_ask(getattr(sys.modules.get(_DEEPSPEEDS), "CheckpointFunction", None), _deepspeeds)
    before, _engine.runs = _engine.runs, True
    try:
        yield
    finally:
        _engine.runs = before


def refuse_outer_checkpoint() -> None:
    """Raises UsageError where a checkpoint of the caller's own is open: its recomputation would call the engine again."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and getattr(hooks[0], "__module__", None) == torch.utils.checkpoint.__name__:
        raise UsageError(
            "the engine was called within a checkpoint of torch.utils, which would call it again during the backward pass. "
            "Call the engine itself: it recomputes layers anyway. Checkpoints inside the model may stay."
        )


def _make_ask(function: Any, passed: Callable[..., Any]) -> None:
    """Make an autograd function that runs its first argument without a graph, and again in the backward pass, ask first.

    Args:
        passed: what its `apply` does where the engine runs; two arguments come before those of what is checkpointed.
    """
    if function is None or "apply" in vars(function):
        return

    def apply(cls: Any, *args: Any) -> Any:
        if not _engine.runs:
            return super(function, cls).apply(*args)
        # It gives nothing that requires a gradient unless one of its own arguments does.
        needed = any(isinstance(argument, Tensor) and argument.requires_grad for argument in args[2:])
        with torch.set_grad_enabled(torch.is_grad_enabled() and needed):
            return passed(*args)

    function.apply = classmethod(apply)


def _torchs(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
    return function(*args)


def _deepspeeds(function: Callable[..., Any], outputs: list[Any], *args: Any) -> None:
    result = function(*args)
    outputs += [result] if isinstance(result, Tensor) else result


_generator = torch.utils.checkpoint._checkpoint_without_reentrant_generator


def _without_reentry(fn: Any, preserve: bool, context_fn: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    """The generator that runs up to a checkpointed call, and on after it."""
    if not _engine.runs:
        yield from _generator(fn, preserve, context_fn, *args, **kwargs)
        return
    with context_fn()[0]:
        yield
