"""A micro-batch to measure a model with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harmony_ds.calls.trees import tensors_in
from harmony_ds.runtime.micro_batch import Objective


@dataclass(frozen=True, slots=True)
class Sample:
    """A micro-batch to measure a model with.

    Attributes:
        inputs: arguments of the model's forward, on the host.
        forward: the forward pass over all its rows.
        few: the forward pass over so many rows of it, repeated where there are not enough.
        objective: what is propagated back from.
        seed: of its random numbers.
        modes: training and requires_grad flags that it is measured in.
    """

    inputs: Any
    forward: Callable[[], Any]
    few: Callable[[int], Callable[[], Any]]
    objective: Objective
    seed: int
    modes: bytes = b""

    @property
    def rows(self) -> int:
        """The length of its first tensor."""
        return next((t.shape[0] for t in tensors_in(self.inputs) if t.dim()), 1)
