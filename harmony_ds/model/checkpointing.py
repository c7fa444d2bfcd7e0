"""`torch.utils.checkpoint` and `deepspeed.checkpointing` in code that the engine runs: they just call their function.

Layers are recomputed anyway, while their parameters are on the device; a checkpoint's own recomputation would come too
late, and one around a layer would run the model's code in the middle of a backward pass. So from an engine's first run
on, checkpoints ask whether an engine runs on their thread. Elsewhere they work as before.
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


class _Recomputation(threading.local):
    runs = False


_engine = _Recomputation()
_DEEPSPEED = "deepspeed.runtime.activation_checkpointing.checkpointing"  # takes seconds to import: not imported here


@contextmanager
def checkpoints_bypassed() -> Iterator[None]:
    """Make this thread's checkpoints call their functions directly while the context is open."""
    setattr(torch.utils.checkpoint, _NON_REENTRANT, _non_reentrant)
    _patch_reentrant(torch.utils.checkpoint.CheckpointFunction, lambda function, _preserve, *args: function(*args))
    _patch_reentrant(getattr(sys.modules.get(_DEEPSPEED), "CheckpointFunction", None), _call_for_deepspeed)
    before, _engine.runs = _engine.runs, True
    try:
        yield
    finally:
        _engine.runs = before


def _patch_reentrant(function: Any, call: Callable[..., Any]) -> None:
    """Make a checkpoint's autograd function use `call` instead of its `apply` where an engine runs.

    The first two arguments of both come before those of the checkpointed function.
    """
    if function is None or "apply" in vars(function):
        return

    def apply(cls: Any, *args: Any) -> Any:
        if not _engine.runs:
            return super(function, cls).apply(*args)
        # Outputs require no gradient unless one of the arguments does.
        needed = any(isinstance(argument, Tensor) and argument.requires_grad for argument in args[2:])
        with torch.set_grad_enabled(torch.is_grad_enabled() and needed):
            return call(*args)

    function.apply = classmethod(apply)


def _call_for_deepspeed(function: Callable[..., Any], outputs: list[Any], *args: Any) -> None:
    result = function(*args)
    outputs += [result] if isinstance(result, Tensor) else result


_NON_REENTRANT = "_checkpoint_without_reentrant_generator"
if hasattr(torch.utils.checkpoint, f"{_NON_REENTRANT}_impl"):  # torch 2.14 and later
    _NON_REENTRANT += "_impl"
_generator = getattr(torch.utils.checkpoint, _NON_REENTRANT)


def _non_reentrant(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Stand in for torch's generator, which runs up to a checkpointed call and goes on after it."""
    if not _engine.runs:
        yield from _generator(*args, **kwargs)
        return
    with kwargs.get("context_fn", args[2])()[0]:  # by position before torch 2.14
        yield
