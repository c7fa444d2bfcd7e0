"""Backward passes that the program starts itself: `loss.backward()` in the place of `engine.backward(loss)`.

As in DeepSpeed, the gradients that come from outside to a model's outputs are divided by the accumulation steps then.
`engine.backward` has divided its loss, so that what it brings is taken as it comes. Each gradient is divided once, where it
enters: an output that another one was computed from (`logits` and their `loss`) is returned as an alias.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from torch import Tensor

from harmony_ds.calls.boundary import reachable_nodes


class EngineBackward:
    """Count of the calls of `engine.backward` under way, of all engines: one may lead through another."""

    under_way: ClassVar[int] = 0

    @classmethod
    @contextmanager
    def entered(cls) -> Iterator[None]:
        """Run a backward pass whose loss has been divided."""
        cls.under_way += 1
        try:
            yield
        finally:
            cls.under_way -= 1


def divided(tensor: Tensor, divisor: int) -> Tensor:
    """Return `tensor` so that gradients which come to it are divided."""
    if divisor == 1 or not tensor.requires_grad:
        return tensor
    alias = tensor.view_as(tensor)
    alias.register_hook(lambda gradient: gradient / divisor)
    return alias


def inputs_of_others(outputs: Sequence[Tensor]) -> set[int]:
    """Return the ids of those `outputs` that others were computed from."""
    edges = {edge for node in reachable_nodes(output.grad_fn for output in outputs) for edge in node.next_functions}
    return {id(output) for output in outputs if (output.grad_fn, output.output_nr) in edges}
