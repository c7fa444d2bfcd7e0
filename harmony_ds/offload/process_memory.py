"""Memory that this process holds and does not need: pages of mapped files, and what the allocator keeps of freed tensors.

`from_pretrained` and `load_weights` map files instead of reading them. A page takes memory once it has been read; when
its tensor has been copied elsewhere, the page is needed no more. Dropping it changes nothing that anybody can read,
as long as it was never written: it comes back from the file when somebody looks. Linux only; elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from bisect import bisect_right
from pathlib import Path

import numpy as np
from torch import Tensor

_AROUND = 16 * mmap.PAGESIZE
"""A read brings the pages around it too, so those of a neighbour come back that were dropped before."""
_ENTRY_BYTES = 8
_PRESENT, _SWAPPED, _OF_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))


def return_freed() -> None:
    """Gives freed memory back to the system. glibc keeps blocks of up to 32 MiB for itself, once some have been freed."""
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


class MappedFiles:
    """The mapped files of this process, as they are when it is constructed."""

    def __init__(self) -> None:
        self._ranges = _mapped_ranges()
        self._begins = [begin for begin, _ in self._ranges]

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory is a file."""
        return tensor.numel() > 0 and self._range(tensor) is not None

    def release(self, tensor: Tensor) -> None:
        """Drops the resident pages of the tensor's memory, if they are a file's and none of them was ever written."""
        found = self._range(tensor) if tensor.numel() else None
        if found is None:
            return
        begin, end = _span(tensor)
        begin = max(found[0], begin // _AROUND * _AROUND)
        end = min(found[1], -(-end // _AROUND) * _AROUND)
        libc = _libc()
        if libc is not None and _never_written(begin, end):
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(mmap.MADV_DONTNEED))

    def _range(self, tensor: Tensor) -> tuple[int, int] | None:
        begin, end = _span(tensor)
        index = bisect_right(self._begins, begin) - 1
        return self._ranges[index] if index >= 0 and end <= self._ranges[index][1] else None


def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def _mapped_ranges() -> list[tuple[int, int]]:
    """Address ranges of mapped files, in order; adjacent ones are kept apart."""
    file = Path("/proc/self/maps")
    if not file.is_file() or not hasattr(mmap, "MADV_DONTNEED"):
        return []
    ranges: list[tuple[int, int]] = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        addresses, _, _, _, inode = line.split(maxsplit=5)[:5]
        if inode != "0":
            begin, _, end = addresses.partition("-")
            ranges.append((int(begin, 16), int(end, 16)))
    return ranges


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first address of the tensor's memory, and the one behind its last."""
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def _never_written(begin: int, end: int) -> bool:
    """Whether every page is the file's own: one that was written is a private copy, which dropping would lose."""
    wanted = (end - begin) // mmap.PAGESIZE * _ENTRY_BYTES
    try:
        descriptor = os.open("/proc/self/pagemap", os.O_RDONLY)
    except OSError:
        return False
    try:
        data = os.pread(descriptor, wanted, begin // mmap.PAGESIZE * _ENTRY_BYTES)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    if len(data) != wanted:
        return False
    entries = np.frombuffer(data, dtype=np.uint64)
    private = ((entries & _SWAPPED) != 0) | (((entries & _PRESENT) != 0) & ((entries & _OF_FILE) == 0))
    return not bool(private.any())
