"""Whether the gradients of the backward pass that runs now have been divided by accumulation steps already.

A gradient is divided once, where it enters a chain of engines: by `engine.backward(loss)`, or at the outputs of the last
engine of the chain for `loss.backward()`. What that engine hands on to engines before it stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from harmony_ds.model.graph_cut import on_one_thread

_divided_by: ContextVar[frozenset[int] | None] = ContextVar("harmony_ds_divided_by", default=None)


def divided_by() -> frozenset[int] | None:
    """Return the accumulation steps that engines have divided the gradients by; None: the gradients are not divided.

    Empty: the caller of `engine.backward` or `train_batch` has chosen what the loss is divided by.
    """
    return _divided_by.get()


@contextmanager
def divided(steps: frozenset[int] = frozenset()) -> Iterator[None]:
    """Run backward passes whose gradients have been divided by `steps` while open.

    They run on this thread, with their hooks: autograd's own threads for accelerators do not know this context.
    """
    token = _divided_by.set(steps)
    try:
        with on_one_thread():
            yield
    finally:
        _divided_by.reset(token)
