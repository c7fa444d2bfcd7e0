"""Backward passes that are run for what they take, not for their gradients: what the program has stays as it is.

A loss may lead to more than the model: a head with an optimizer of its own, outputs of another engine, host parameters that
a loss function uses. While the model is measured, no gradient stays there, and no hook of the program's is called.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

_current: ContextVar[Untouched | None] = ContextVar("harmony_ds_untouched", default=None)


is_for_measuring: Callable[[], Untouched | None] = _current.get  # the getter itself: each layer call asks five times
"""Return what keeps gradients from the program now; None: they are for the program."""


@dataclass(slots=True)
class _Kept:
    """A leaf of the program's, its gradient, and its hooks by the dictionaries that they are in."""

    leaf: Tensor
    gradient: Tensor | None
    hooks: list[tuple[dict[Any, Any], dict[Any, Any]]]


class Untouched:
    """Keeper of the gradients and hooks of the program's leaves, until `restore`.

    Attributes:
        unlayered, layer: device copies of parameters, which may get gradients: of those that no layer owns, and of the
            layer that runs now.
        looks_into_layers: True: `propagate` also sets aside leaves that are used by layers and between them. False: that
            was done already.
    """

    def __init__(self) -> None:
        self.unlayered: Collection[Tensor] = ()
        self.layer: Collection[Tensor] = ()
        self.looks_into_layers = True
        self._kept: dict[int, _Kept] = {}
        self._begin = torch._C._autograd._get_sequence_nr()

    def set_aside(self, nodes: Iterable[Node]) -> bool:
        """Take gradients and hooks off all of the program's leaves among `nodes`, which are about to be propagated through.

        Returns:
            Whether some of `nodes` were there before measuring began, so that their graph must be retained.
        """
        own, earlier = {id(tensor) for tensor in (*self.unlayered, *self.layer)}, False
        for node in nodes:
            leaf = getattr(node, "variable", None)
            if leaf is None:
                earlier |= node._sequence_nr() < self._begin
            elif id(leaf) not in own and id(leaf) not in self._kept:
                self._kept[id(leaf)] = _take_off(leaf)
        return earlier

    def restore(self) -> None:
        """Give the leaves their gradients and hooks back."""
        with torch._C.DisableTorchFunctionSubclass():  # parameters of an engine among them
            for kept in self._kept.values():
                kept.leaf.grad = kept.gradient
                for hooks, before in kept.hooks:
                    hooks.update(before)
        self._kept.clear()


@contextmanager
def untouched() -> Iterator[Untouched]:
    """Open a context for backward passes that leave no gradient on the program's leaves, and call none of their hooks."""
    keeper = Untouched()
    token = _current.set(keeper)
    try:
        yield keeper
    finally:
        _current.reset(token)
        keeper.restore()


def _take_off(leaf: Tensor) -> _Kept:
    with torch._C.DisableTorchFunctionSubclass():
        gradient, leaf.grad = leaf.grad, None
        own: list[dict[Any, Any] | None] = [leaf._backward_hooks, leaf._post_accumulate_grad_hooks]
    hooks = [(one, dict(one)) for one in own if one]
    for one, _ in hooks:
        one.clear()
    return _Kept(leaf, gradient, hooks)
