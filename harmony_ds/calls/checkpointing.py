"""`torch.utils.checkpoint` in code that the engine runs: it passes straight through.

Layers are recomputed anyway, on parameters that are on the device for that time alone; a checkpoint's own recomputation
would come later. What stands around a layer would run the model's code, lanes included, in the middle of a backward
pass. Elsewhere checkpoints are what they were.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
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
_function = torch.utils.checkpoint.CheckpointFunction


@contextmanager
def passed_through() -> Iterator[None]:
    """While open, this thread's checkpoints are calls of what they are given."""
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
    """The autograd function of the other kind."""

    def apply(self, function: Any, preserve: bool, *args: Any) -> Any:
        if not _engine.runs:
            return _function.apply(function, preserve, *args)
        # It gives nothing that requires a gradient unless one of its own arguments does.
        needed = any(isinstance(argument, Tensor) and argument.requires_grad for argument in args)
        with torch.set_grad_enabled(torch.is_grad_enabled() and needed):
            return function(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(_function, name)


# Both are looked up in their module when `checkpoint` is called.
torch.utils.checkpoint._checkpoint_without_reentrant_generator = _without_reentry  # type: ignore[assignment]
torch.utils.checkpoint.CheckpointFunction = _Reentrant()  # type: ignore[assignment, misc]
