"""Memory that this process holds and does not need: what the allocator keeps of freed tensors. Tensors that take none of
their own: `from_pretrained` and `load_weights` map files instead of reading them. Linux only; elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from torch import Tensor


def trim_allocator() -> None:
    """Gives freed memory back to the system. glibc keeps blocks of up to 32 MiB for itself, once some have been freed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))


class MappedFiles:
    """The mapped files of this process, as they are when it is constructed."""

    def __init__(self) -> None:
        maps = Path("/proc/self/maps")
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines() if maps.is_file() else []
        rows = [line.split(maxsplit=5) for line in lines]
        spans = [row[0].split("-") for row in rows if row[4] != "0"]  # those that have an inode
        self._ranges = [range(int(begin, 16), int(end, 16)) for begin, end in spans]

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory is a file."""
        return tensor.numel() > 0 and any(tensor.data_ptr() in addresses for addresses in self._ranges)
