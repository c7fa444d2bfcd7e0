"""Arguments are copied when a call is made: its micro-batch runs later, and loops use their buffers again."""

from __future__ import annotations

import copy
import random
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harmony_ds.errors import BatchError
from harmony_ds.model.trees import flatten, unflatten
from harmony_ds.step.pending import PendingTensor

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
_BUFFERS = (np.ndarray, bytearray, array)
"""Classes of what a loop may fill anew for the next call, beside tensors and containers; arrays may hold objects."""


class CallInputs:
    """The arguments of one call of the model. Each run gets fresh containers: the caller sees no write into them."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], copies_tensors: bool = False) -> None:
        """Copy containers; `copies_tensors`: tensors and arrays, too.

        One tensor stays one; its gradients reach the caller's.
        """
        leaves, self._shape = flatten((args, kwargs))
        leaves = [leaf.node.materialize() if isinstance(leaf, PendingTensor) else leaf for leaf in leaves]
        own = {id(leaf): _own(leaf) if copies_tensors else leaf for leaf in leaves}
        self._leaves = [own[id(leaf)] for leaf in leaves]

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors among the arguments."""
        return [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]

    @property
    def tree(self) -> Inputs:
        """Positional and keyword arguments, in fresh containers."""
        return self.mapped(lambda tensor: tensor)

    def mapped(self, to_device: Callable[[Tensor], Tensor]) -> Inputs:
        """Return the arguments with every tensor as `to_device` makes it, once however often it is there."""
        copies = {id(tensor): to_device(tensor) for tensor in self.tensors}
        args, kwargs = unflatten([copies.get(id(leaf), leaf) for leaf in self._leaves], self._shape)
        return args, kwargs

    def close(self) -> None:
        """Hold no argument any more."""
        self._leaves = []


def take_batches(data: Iterator[Any] | Sequence[Any], count: int, whole: bool) -> list[CallInputs]:
    """Take `count` micro-batches from an iterator or a list: mappings (keyword arguments), tuples or single arguments.

    Args:
        whole: each of them is one argument, as it is.

    Raises:
        BatchError: `data` would begin anew with every step.
        StopIteration: there is none.
    """
    if not isinstance(data, (list, tuple, Iterator)):
        raise BatchError(
            f"the micro-batches are to come from an iterator or a list of them, not from {type(data).__name__}: "
            "pass iter(loader), made once, so that the next step goes on where this one ends."
        )
    # Taken over one by one: it may yield the same buffers again.
    taken = islice(data, count)
    batches = [CallInputs((batch,), {}, copies_tensors=True) if whole else _arguments_of(batch) for batch in taken]
    if not batches:
        raise StopIteration("the data iterator is at its end")
    return batches


def _arguments_of(batch: Any) -> CallInputs:
    if isinstance(batch, Mapping):
        return CallInputs((), dict(batch), copies_tensors=True)
    return CallInputs(tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {}, copies_tensors=True)


def _own(leaf: Any) -> Any:
    if isinstance(leaf, Iterator):
        raise BatchError(
            f"an argument is an iterator ({type(leaf).__name__}), which can be gone through only once, while forward "
            "passes run again to be measured and recomputed: give a list or a tuple, list(...)."
        )
    if isinstance(leaf, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)):
        raise BatchError(
            f"an argument is a random generator ({type(leaf).__name__}), which would draw other numbers when forward "
            "passes run again to be measured and recomputed: give the numbers that it draws, or let forward draw from the "
            "global generator of torch, NumPy or Python."
        )
    if isinstance(leaf, Tensor):
        return leaf.clone()
    return copy.deepcopy(leaf) if isinstance(leaf, _BUFFERS) else leaf
