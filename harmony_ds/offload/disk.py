"""A file for what is only needed by updates, fp32 masters of bf16 weights and the optimizer's state; one for weights.

The file is allocated before training and has no name: a full disk is an error at once, and nothing is left after a kill.
Its tensors are mapped, so that checkpoints and programs read and write them as any others, through the system's page cache;
updates read and write blocks by system calls, whose errors are exceptions.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from harmony_ds.errors import HostMemoryError

_MEASURED_BYTES = 2**26
_GRAIN = 4096
"""Tensors begin at pages of the file."""
_Result = TypeVar("_Result")


def disk_bytes(numel: int, itemsize: int) -> int:
    """Return the bytes of the file that a tensor takes."""
    return -(-numel * itemsize // _GRAIN) * _GRAIN


class DiskFile:
    """Unnamed file of a fixed size.

    Attributes:
        read_bytes, written_bytes: moved by `read` and `write` so far.
        bytes_per_ms: rate of the disk, measured when the file was made.
    """

    def __init__(self, folder: str, nbytes: int, key: str = "offload_optimizer") -> None:
        """Raise HostMemoryError if the disk of `folder` has no room for `nbytes`; OSError if it takes no file."""
        self.nbytes = max(nbytes, _GRAIN)
        self.read_bytes = self.written_bytes = 0
        self._end = 0
        self._lock = threading.Lock()  # of the numbers that several threads count
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - without a name, and open until `close`
        self._descriptor = self._file.fileno()
        try:
            os.posix_fallocate(self._descriptor, 0, self.nbytes)
        except OSError as error:
            self._file.close()
            free = os.statvfs(folder)
            raise HostMemoryError(
                f"the tensors of {key} take {self.nbytes:,} bytes, and the disk of {folder} (its nvme_path) has "
                f"{free.f_bavail * free.f_frsize:,} free ({error.strerror}): free some, or name another."
            ) from error
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # the system reads further ahead
        self._map = mmap.mmap(self._descriptor, self.nbytes)
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self.bytes_per_ms = self._measure()

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor in the file, a storage of its own; HostMemoryError: the file is full."""
        numel = math.prod(shape)
        begin, self._end = self._end, self._end + disk_bytes(numel, dtype.itemsize)
        if self._end > self.nbytes:
            raise HostMemoryError(
                f"the optimizer keeps more state than its class is known for: {self._end:,} bytes, and the file has "
                f'{self.nbytes:,}. Leave "device": "nvme" out.'
            )
        if not numel:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=begin).view(shape)

    def read(self, source: Tensor, values: Tensor) -> None:
        """Read a contiguous tensor of the file into memory; OSError: the disk fails."""
        moved = self._move(os.preadv, source, values)
        with self._lock:
            self.read_bytes += moved

    def write(self, values: Tensor, target: Tensor) -> None:
        """Write memory into a contiguous tensor of the file; OSError: the disk fails."""
        moved = self._move(os.pwritev, target, values)
        with self._lock:
            self.written_bytes += moved

    def _move(self, call: object, there: Tensor, here: Tensor) -> int:
        assert callable(call)
        octets = memoryview(here.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]
        begin, done = there.data_ptr() - self._memory.data_ptr(), 0
        while done < len(octets):
            moved = call(self._descriptor, [octets[done:]], begin + done)
            if not moved:
                raise OSError(f"the file on the disk ends at byte {begin + done:,} of {self.nbytes:,}")
            done += moved
        return done

    def _measure(self) -> float:
        """Return how many bytes the disk writes and then reads in a millisecond; before the file holds any tensor."""
        values = torch.zeros(min(_MEASURED_BYTES, self.nbytes), dtype=torch.uint8)
        begin = time.perf_counter()
        self.write(values, self._memory[: len(values)])
        os.fdatasync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, len(values), os.POSIX_FADV_DONTNEED)  # else it is read from memory
        self.read(self._memory[: len(values)], values)
        self.read_bytes = self.written_bytes = 0
        return 2 * len(values) / (time.perf_counter() - begin) / 1e3

    def close(self) -> None:
        """Close the file; mapped tensors that are still held stay readable."""
        self._file.close()


class DiskMasters:
    """The masters of a model's parameters in a file; where weights are fp32, they are their own masters, in memory."""

    block = 2**20
    """Numbers that are read, stepped and written at a time."""
    where = 'on the disk (offload_optimizer {"device": "nvme"})'

    def __init__(self, file: DiskFile) -> None:
        self.file = file
        self._masters: dict[str, Tensor] = {}

    @property
    def holds_masters(self) -> bool:
        """Whether masters are in the file, too."""
        return bool(self._masters)

    def add(self, name: str, values: Tensor) -> Tensor:
        """Return the master of `name` in the file, with `values`."""
        master = self._masters[name] = self.file.empty(values.shape, torch.float32)
        return master.copy_(values.detach())

    def round_to(self, weight: Callable[[str], Tensor], write: Callable[[str, Tensor, slice], None]) -> None:
        """Round masters to the weights that `weight` returns by name, plain contiguous tensors, by `write`."""
        self._weight, self._write = weight, write

    def read_block(self, name: str, block: slice, buffer: Tensor) -> Tensor:
        """Return a block's fp32 values: read into `buffer`, or the weights themselves."""
        if name not in self._masters:
            return self._weight(name).view(-1)[block]
        values = buffer[: block.stop - block.start]
        self.file.read(self._masters[name].view(-1)[block], values)
        return values

    def write_block(self, name: str, block: slice, values: Tensor) -> None:
        """Write a block's values, and round them to the weights."""
        if name in self._masters:
            self.file.write(values, self._masters[name].view(-1)[block])
            self._write(name, values, block)


def submit(pool: ThreadPoolExecutor, job: Callable[[], _Result]) -> Future[_Result]:
    """Run `job` on a thread of `pool`; at the end of the interpreter, which has ended pools, here."""
    try:
        return pool.submit(job)
    except RuntimeError:
        done: Future[_Result] = Future()
        done.set_result(job())
        return done
