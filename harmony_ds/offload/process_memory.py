"""Host memory of this process: freed memory that the allocator keeps, and tensors in mapped files. Linux only.

`from_pretrained` and `load_weights` map files instead of reading them.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from torch import Tensor


def trim_allocator() -> None:
    """Return freed memory to the system; glibc keeps blocks of up to 32 MiB, once some have been freed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))


class MappedFiles:
    """Files that this process has mapped at the time of construction."""

    def __init__(self) -> None:
        maps = Path("/proc/self/maps")
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines() if maps.is_file() else []
        rows = [line.split(maxsplit=5) for line in lines]
        spans = [row[0].split("-") for row in rows if row[4] != "0"]  # files have an inode
        self._ranges = [range(int(begin, 16), int(end, 16)) for begin, end in spans]

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the tensor's memory is a mapped file."""
        return tensor.numel() > 0 and any(tensor.data_ptr() in addresses for addresses in self._ranges)
