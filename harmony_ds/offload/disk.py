"""Files on a disk for what does not fit into host memory: one for masters and optimizer state, one for weights.

A file is allocated before training and has no name: a full disk is an error at once, and nothing is left after a kill. Its
tensors are mapped, so that checkpoints and programs read and write them like others, through the system's page cache.
Updates read and write blocks by system calls, whose errors are exceptions. The processes of a server share the files.
"""

from __future__ import annotations

import gc
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from harmony_ds.distributed import SINGLE_PROCESS, SingleProcess
from harmony_ds.distributed.shared_memory import map_privately
from harmony_ds.errors import HostMemoryError

_MEASURED_BYTES = 2**26
_GRAIN = 4096
"""Bytes of a page: each tensor begins at one."""
_Result = TypeVar("_Result")


def disk_bytes(numel: int, itemsize: int) -> int:
    """Return the bytes that a tensor takes in a file."""
    return -(-numel * itemsize // _GRAIN) * _GRAIN


class DiskFile:
    """Unnamed file of a fixed size, which holds tensors.

    Attributes:
        nbytes: its size.
        bytes_per_ms: rate of the disk, measured when the file was made, divided by the processes that share it.
    """

    def __init__(
        self, folder: str, nbytes: int, key: str = "offload_optimizer", world: SingleProcess = SINGLE_PROCESS
    ) -> None:
        """Make the file, and measure its disk.

        Args:
            key: the block of the ds_config that asks for it, for errors.

        Raises:
            HostMemoryError: the disk of `folder` has no room for `nbytes`.
            OSError: no file can be made there.
        """
        self.nbytes = max(nbytes, _GRAIN)
        self._end = 0
        self._world = world
        self._file = os.fdopen(world.share_file(partial(_make_file, folder, self.nbytes, key)), "r+b", buffering=0)
        self._descriptor = self._file.fileno()
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # the system reads further ahead
        self._map = mmap.mmap(self._descriptor, self.nbytes)
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self.bytes_per_ms = world.compute_on_first("the rate of a disk", self._measure) / world.local_size

    def reserve(self, nbytes: int) -> int:
        """Reserve `nbytes`, and return their place for `at`. All processes have to reserve in the same order."""
        place, self._end = self._end, self._end + disk_bytes(nbytes, 1)
        assert self._end <= self.nbytes
        return place

    def at(self, place: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor at a place of the file, with a storage of its own."""
        if not shape.numel():
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=shape.numel(), offset=place).view(shape)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Reserve room for a tensor, and return it uninitialised."""
        return self.at(self.reserve(shape.numel() * dtype.itemsize), shape, dtype)

    def read(self, source: Tensor, values: Tensor) -> None:
        """Read a contiguous tensor of the file into memory; OSError: the disk fails."""
        self._move(os.preadv, source, values)

    def copy_of(self, source: Tensor) -> Tensor:
        """Return a copy in memory of a tensor of the file; OSError: the disk fails."""
        values = torch.empty_like(source)
        self.read(source, values)
        return values

    def write(self, values: Tensor, target: Tensor) -> None:
        """Write memory into a contiguous tensor of the file; OSError: the disk fails."""
        self._move(os.pwritev, target, values)

    def _move(self, call: Callable[..., int], there: Tensor, here: Tensor) -> None:
        octets = memoryview(here.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]
        begin, done = there.data_ptr() - self._memory.data_ptr(), 0
        while done < len(octets):
            moved = call(self._descriptor, [octets[done:]], begin + done)
            if not moved:
                raise OSError(f"the file on the disk ends at byte {begin + done:,} of {self.nbytes:,}")
            done += moved

    def _measure(self) -> float:
        """Return how many bytes the disk writes and then reads in a millisecond; before the file holds any tensor."""
        values = torch.zeros(min(_MEASURED_BYTES, self.nbytes), dtype=torch.uint8)
        begin = time.perf_counter()
        self.write(values, self._memory[: len(values)])
        os.fdatasync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, len(values), os.POSIX_FADV_DONTNEED)  # else it is read from memory
        self.read(self._memory[: len(values)], values)
        return 2 * len(values) / (time.perf_counter() - begin) / 1e3

    def close(self) -> None:
        """Close the file. Tensors that are still referred to stay readable, as memory of this process alone."""
        if self._world.size > 1:
            map_privately(self._memory.data_ptr(), self.nbytes, self._descriptor, 0)
        self._file.close()


def _make_file(folder: str, nbytes: int, key: str) -> int:
    Path(folder).mkdir(parents=True, exist_ok=True)
    gc.collect()  # models of engines that are gone may hold a file
    with tempfile.TemporaryFile(dir=folder) as file:  # without a name
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            free = os.statvfs(folder)
            raise HostMemoryError(
                f"the tensors of {key} take {nbytes:,} bytes, and the disk of {folder} (its nvme_path) has "
                f"{free.f_bavail * free.f_frsize:,} free ({error.strerror}): free some, or name another."
            ) from error
        return os.dup(file.fileno())


class DiskMasters:
    """The fp32 masters of 16-bit weights, in a file. Weights that are fp32 are their own masters, in memory."""

    block = 2**20
    """Elements that are read, stepped and written at a time."""
    where = 'where masters are on the disk (offload_optimizer {"device": "nvme"}), block by block'

    def __init__(self, file: DiskFile, states: int) -> None:
        """Begin without masters; `states`: how many states of each parameter the optimizer keeps in the file, too."""
        self.file, self.states = file, states
        self._masters: dict[str, Tensor] = {}

    def add(self, name: str, shape: torch.Size) -> Tensor:
        """Return the master of `name` in the file, uninitialised."""
        master = self._masters[name] = self.file.empty(shape, torch.float32)
        return master

    def attach_weights(self, weight: Callable[[str], Tensor], write: Callable[[str, Tensor, slice], None]) -> None:
        """Set how weights are reached: `weight(name)` returns a plain tensor, `write(name, values, piece)` writes."""
        self._weight, self._write = weight, write

    def read_block(self, name: str, block: slice) -> Tensor:
        """Return the fp32 values of a block: a copy in memory, or fp32 weights themselves."""
        if name not in self._masters:
            return self._weight(name).view(-1)[block]
        return self.file.copy_of(self._masters[name].view(-1)[block])

    def write_block(self, name: str, block: slice, values: Tensor) -> None:
        """Write the values of a block to the file, and rounded to the weights."""
        if name in self._masters:
            self.file.write(values, self._masters[name].view(-1)[block])
            self._write(name, values, block)


def submit(pool: ThreadPoolExecutor, job: Callable[[], _Result]) -> Future[_Result]:
    """Run `job` on a thread of `pool`; or on the caller's, when the interpreter is ending and has shut pools down."""
    try:
        return pool.submit(job)
    except RuntimeError:
        done: Future[_Result] = Future()
        done.set_result(job())
        return done
