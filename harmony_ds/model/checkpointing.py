"""`torch.utils.checkpoint` and `deepspeed.checkpointing` in code that the engine runs: most just call their function.

Layers are recomputed anyway, while their parameters are on the device; a checkpoint's own recomputation would come too
late, and one around a layer would run the model's code in the middle of a backward pass. So from an engine's first run
on, checkpoints ask whether an engine runs on their thread. Elsewhere they work as before.

    in a layer, or around layers      the function is called
    between layers                    torch's own, without reentry: a loss in chunks, say; others call the function

Whether a function calls layers shows when it is called: then it is known by its code, and the pass runs again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import unwrap
from typing import Any, NoReturn
from weakref import WeakSet

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from harmony_ds.model.contract import UnseenError
from harmony_ds.model.intercept import Handler, Request, active_handler, is_intercepted, set_handler
from harmony_ds.model.token_tensor import is_not_computed
from harmony_ds.model.trees import tensors_in


class _Recomputation(threading.local):
    runs = False


class _NoLayers:
    """A handler of layer calls while a checkpoint of torch's own is open, whose function is not known to call any."""

    def __init__(self, handler: Handler, checkpoint: Generator[None], code: Any) -> None:
        self.device = handler.device
        self._handler = handler
        self._checkpoint = checkpoint
        self._code = code

    def call(self, request: Request) -> NoReturn:
        """End the checkpoint, and know the function the next time."""
        set_handler(self._handler)
        self._checkpoint.close()
        _calling_layers.add(self._code)
        raise UnseenError("a function in a torch.utils.checkpoint calls a layer, which was not seen before.")


_engine = _Recomputation()
_calling_layers: WeakSet[Any] = WeakSet()
"""Code of functions in checkpoints that has called layers."""
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
    handler = active_handler()
    code = _code_of(args[0])
    if handler is None or code is None or code in _calling_layers or _takes_token_tensors(args, kwargs):
        with kwargs.get("context_fn", args[2])()[0]:  # by position before torch 2.14
            yield
        return
    own = _generator(*args, **kwargs)
    set_handler(_NoLayers(handler, own, code))
    yield from own
    set_handler(handler)


_OF_A_CALL = frozenset(["__call__", "_wrapped_call_impl", "_call_impl", "forward"])
"""Names of methods that a module is called by."""


def _code_of(function: Any) -> Any:
    """Return the code that a checkpointed function runs, by which it is known; None: it is a layer, or cannot be known."""
    while isinstance(function, partial):
        function = function.func
    called = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    if isinstance(called, nn.Module) and getattr(function, "__name__", "forward") in _OF_A_CALL:
        return None if is_intercepted(called) else type(called)
    return getattr(unwrap(function), "__code__", None)


def _takes_token_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the function is given what is computed in tiles, forward and back: there is nothing left to save."""
    return any(map(is_not_computed, tensors_in((args, kwargs))))
