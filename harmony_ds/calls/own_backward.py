"""Backward passes that the program's own code runs while the engine runs it: in forward, or in a hook of the engine's
backward pass. The graphs of layers are cut, so that one which leads through them would end there without a word.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from harmony_ds.calls.boundary import is_of_engine, nodes_behind, targets_of
from harmony_ds.calls.places import patched
from harmony_ds.errors import UnsupportedError

_IN_FORWARD = (
    "forward propagates back (torch.autograd.grad, backward) through layers, whose graphs are not kept "
    "while it runs. Take such gradients within one layer's forward, or of what comes behind the last one."
)
_IN_BACKWARD = (
    "a hook, or the backward of an autograd function, propagates back itself (torch.autograd.grad, backward) through "
    "layers, as implicit differentiation does (DEQ): the engine runs layers backward one by one and keeps no graph through "
    "them. Make what the hook differentiates and the hook one layer: name the module whose forward holds both in the "
    'ds_config ("harmony": {"layers": ["..."]}).'
)


_IN_ITSELF = (
    "a hook propagates back through the tensor that it is on, and so calls itself without end. A hook that is to be "
    "removed first must know its handle by a local variable: an attribute is put back between the forward and "
    "the backward pass of a layer."
)
_DEEPEST = 40
"""Backward passes within each other: torch's own limit, and Python's, end in errors that say nothing."""


@contextmanager
def guarded_forward(inside_layer: Callable[[], bool]) -> Iterator[None]:
    """While open, a backward pass that forward runs itself, between the layers, must not reach one.

    Raises:
        UnsupportedError: (whoever runs one) it does.
    """
    thread = threading.get_ident()  # another one's engine propagates through layers of its own

    def around(run: Any) -> Any:
        def asked(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and not inside_layer() and _reaches_boundary(outputs, args[3]):
                raise UnsupportedError(_IN_FORWARD)
            return run(outputs, *args, **kwargs)

        return asked

    with patched(torch.autograd, "_engine_run_backward", around):
        yield


@contextmanager
def guarded_hooks(inside_layer: Callable[[], bool]) -> Iterator[None]:
    """While open, neither must one that runs within another.

    Args:
        inside_layer: whether the outer one is a layer's own.

    Raises:
        UnsupportedError: (whoever runs one) it does.
    """
    depth = 0

    def around(run: Any) -> Any:
        def asked(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if is_of_engine() or torch._C._current_graph_task_id() == -1:
                return run(outputs, *args, **kwargs)
            if not inside_layer() and _reaches_boundary(outputs, args[3]):
                raise UnsupportedError(_IN_BACKWARD)
            if depth == _DEEPEST:
                raise UnsupportedError(_IN_ITSELF)
            depth += 1
            try:
                return run(outputs, *args, **kwargs)
            finally:
                depth -= 1

        return asked

    with patched(torch.autograd, "_engine_run_backward", around):
        yield


def _reaches_boundary(outputs: Sequence[Any], inputs: Sequence[Any]) -> bool:
    """Whether a layer's is on the way from `outputs`, up to `inputs`."""
    todo, seen = set(map(_node_of, outputs)), {None, *map(_node_of, inputs)}
    while todo := todo - seen:
        if any(targets_of(node) is not None for node in todo):
            return True
        seen |= todo
        todo = {following for node in todo for following in nodes_behind(node)}
    return False


def _node_of(tensor: Any) -> Node | None:
    return tensor.node if isinstance(tensor, GradientEdge) else tensor.grad_fn
