"""Bytes that processes send each other, counted where torch hands a collective to its library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class SentBytes(TorchDispatchMode):
    """Counter of the bytes that this process must send at least; entered on the thread that calls collectives.

    Attributes:
        nbytes: of a ring's share: of `size` processes each sends (size - 1) / size of what is gathered, or of what is
            reduced and scattered; twice that where all reduce to all.
    """

    def __init__(self, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0
        self._share = (size - 1) / size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = str(func._schema.name)
        if name.startswith("c10d::"):
            self.nbytes += int(self._share * _whole_bytes(name.removeprefix("c10d::"), args))
        return func(*args, **dict(kwargs or {}))


def _whole_bytes(name: str, args: tuple[Any, ...]) -> int:
    """Return the bytes of all processes' tensors together, or of one that all have."""
    if name.startswith(("allgather", "_allgather_base")):  # the gathered tensor is the first argument
        return _nbytes(args[0])
    if name.startswith(("reduce_scatter", "_reduce_scatter_base", "alltoall", "gather")):
        return _nbytes(args[1])
    if name.startswith(("allreduce", "broadcast", "reduce", "scatter")):
        return _nbytes(args[0]) * (2 if name.startswith("allreduce") else 1)
    return 0


def _nbytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_nbytes, tensors)) if isinstance(tensors, (list, tuple)) else 0
