"""Host memory that exists once on a server, whichever of its processes looks at it.

It is one file that lies in memory and has no name (memfd): the first process makes it, the others open it through /proc,
and it goes with the last of them, however they end. Its pages come into being where they are first written. All
processes ask for memory in the same order, so that the same request has the same place.
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
"""The file's size: it takes what is written."""


def make_file() -> int:
    """A file of shared memory, all zeros."""
    file = os.memfd_create("harmony_ds", os.MFD_CLOEXEC)
    os.ftruncate(file, _MOST_BYTES)
    return file


def open_file(pid: int, number: int) -> int:
    """The file that the process `pid` has open as `number`.

    Raises:
        OSError: this process may not, or there is none.
    """
    return os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)


class SharedMemory:
    """Hands out the file's memory, from `begin` on."""

    def __init__(self, file: int, begin: int) -> None:
        self._file = file
        self._end = -(-begin // _PAGE) * _PAGE
        self._maps: list[tuple[mmap.mmap, int]] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory that is the same in every process; zeros until somebody writes."""
        return self.at(self.reserve(math.prod(shape) * dtype.itemsize), shape, dtype)

    def reserve(self, nbytes: int) -> int:
        """A place for `nbytes`, for `at`."""
        place = self._end
        self._end += -(-nbytes // _PAGE) * _PAGE
        assert self._end <= _MOST_BYTES
        return place

    def at(self, place: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The memory at a place that was reserved."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        mapped = mmap.mmap(self._file, count * dtype.itemsize, mmap.MAP_SHARED, offset=place)
        self._maps.append((mapped, place))
        return torch.frombuffer(mapped, dtype=dtype, count=count).view(tuple(shape))

    def free(self, tensor: Tensor) -> None:
        """What was handed out as `tensor` is not used any more, by any process: its memory is free."""
        for mapped, _ in self._maps:
            address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
            if address == tensor.data_ptr():
                mapped.madvise(mmap.MADV_REMOVE)

    def make_private(self) -> None:
        """What has been handed out is this process's own from here on: what it writes, only it sees. Copies nothing."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        for mapped, place in self._maps:
            address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
            access = mmap.PROT_READ | mmap.PROT_WRITE
            found = libc.mmap(address, len(mapped), access, mmap.MAP_PRIVATE | _FIXED, self._file, place)
            assert found == address, os.strerror(ctypes.get_errno())
        self._maps.clear()
