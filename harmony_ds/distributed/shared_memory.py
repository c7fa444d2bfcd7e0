"""Host memory that the processes of a server share.

The memory is one anonymous file (memfd): the first process creates it, the others open it through /proc, and it ends with
the last of them, however they end. A page is allocated when it is first written. All processes ask for memory in the same
order, so that the same request gets the same place in the file.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

_PAGE = mmap.ALLOCATIONGRANULARITY
_FIXED = 0x10  # MAP_FIXED
_MOST_BYTES = 1 << 46
"""The file's size; only pages that are written take memory."""


def make_file() -> int:
    """Create the file and return its descriptor."""
    file = os.memfd_create("harmony_ds", os.MFD_CLOEXEC)
    os.ftruncate(file, _MOST_BYTES)
    return file


def open_file(pid: int, descriptor: int) -> int:
    """Open the file that the process `pid` has open as `descriptor`; raises OSError."""
    return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


class SharedMemory:
    """Allocator of the file's memory."""

    def __init__(self, file: int, begin: int) -> None:
        """Allocate the memory of the descriptor `file` from byte `begin` on."""
        self._file = file
        self._end = -(-begin // _PAGE) * _PAGE
        self._maps: dict[int, tuple[mmap.mmap, int]] = {}  # by address: the mapped memory, and its place

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory that no process has used, of zeros."""
        return self.at(self.reserve(math.prod(shape) * dtype.itemsize), shape, dtype)

    def reserve(self, nbytes: int) -> int:
        """Reserve a place for `nbytes`, for `at`."""
        place = self._end
        self._end += -(-nbytes // _PAGE) * _PAGE
        assert self._end <= _MOST_BYTES
        return place

    def at(self, place: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the memory at a place that `reserve` returned."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        mapped = mmap.mmap(self._file, count * dtype.itemsize, mmap.MAP_SHARED, offset=place)
        tensor = torch.frombuffer(mapped, dtype=dtype, count=count).view(tuple(shape))
        self._maps[tensor.data_ptr()] = mapped, place
        return tensor

    def free(self, tensor: Tensor) -> None:
        """Free the memory of `tensor`, which no process uses any more."""
        if tensor.data_ptr() in self._maps:
            self._maps[tensor.data_ptr()][0].madvise(mmap.MADV_REMOVE)

    def make_private(self) -> None:
        """Make all allocated memory this process's own, copied only where it is written."""
        for address, (mapped, place) in self._maps.items():
            map_privately(address, len(mapped), self._file, place)
        self._maps.clear()


def map_privately(address: int, nbytes: int, file: int, place: int) -> None:
    """Make memory at which a part of a file is mapped this process's own, copied only where it is written."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    found = libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _FIXED, file, place)
    assert found == address, os.strerror(ctypes.get_errno())
