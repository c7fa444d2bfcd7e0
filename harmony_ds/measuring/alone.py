"""Losses of micro-batches whose forward passes run one after the other: what they must be where they run together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from harmony_ds.measuring.passes import Passes
from harmony_ds.measuring.sample import Sample


class Alone(Passes):
    """Runs forward passes layer by layer, one after the other. Used once."""

    @contextmanager
    def open(self) -> Iterator[Callable[[Sample], Tensor | None]]:
        """A context with a function from a micro-batch to its loss. What a forward pass leaves in buffers, the next one
        finds; it is undone in the end.
        """
        with self._opened() as copy, self._lent(copy):
            yield self._loss

    def _loss(self, sample: Sample) -> Tensor | None:
        loss = sample.objective(self._forward(sample))
        # On the host, since it waits for the step, whose device memory is planned.
        return None if loss is None else loss.detach().to("cpu", copy=True)
