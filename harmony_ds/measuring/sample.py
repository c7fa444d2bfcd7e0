"""A micro-batch to measure a model with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from harmony_ds.calls.trees import map_tensors, tensors_in
from harmony_ds.runtime.micro_batch import Objective

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """A micro-batch to measure a model with.

    Attributes:
        inputs: arguments of the model's forward.
        call: the forward pass with such arguments.
        objective: what is propagated back from.
        seed: of its random numbers.
        modes: training and requires_grad flags that it is measured in.
    """

    inputs: Any
    call: Callable[[Any], Any]
    objective: Objective
    seed: int
    modes: bytes = b""

    @property
    def rows(self) -> int:
        """Length of its first tensor."""
        return next((t.shape[0] for t in tensors_in(self.inputs) if t.dim()), 1)

    def few(self, rows: int) -> Sample:
        """Return the first `rows` rows of each tensor that has as many as the first one, repeated if there are fewer."""
        total = self.rows

        def some(tensor: Tensor) -> Tensor:
            if not tensor.dim() or tensor.shape[0] != total or not total:
                return tensor
            return tensor[torch.arange(rows, device=tensor.device) % total]

        return replace(self, inputs=map_tensors(some, self.inputs))


def shapes_of(inputs: Any) -> Shapes:
    """Return the shape of every tensor of `inputs`."""
    return tuple(tuple(t.shape) for t in tensors_in(inputs))
