"""Buffers of a layer while it is run several times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from harmony_ds.calls.lending import changes_buffers_unseen

Buffers = list[tuple[nn.Module, dict[str, Tensor | None]]]


@contextmanager
def buffers_apart(own: Buffers) -> Iterator[None]:
    """While open, modules hold `own` buffers; what is done to them is done to nobody else's."""
    newest = [(module, module._buffers) for module, _ in own]
    try:
        for module, buffers in own:
            module.__dict__["_buffers"] = buffers
        yield
    finally:
        for module, buffers in newest:
            module.__dict__["_buffers"] = buffers


def versions(modules: list[nn.Module]) -> list[tuple[Tensor, int]]:
    """Buffers whose changes are seen by their versions. Normalization's own do not matter to what it gives."""
    return [
        (b, b._version) for m in modules if not changes_buffers_unseen(m) for b in m._buffers.values() if b is not None
    ]
