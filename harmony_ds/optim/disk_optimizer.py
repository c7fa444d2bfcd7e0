"""Optimizer steps block by block, over masters and state on a disk: read before a block's step, and written after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice

import torch
from torch import Tensor
from torch.optim import Optimizer

from harmony_ds.distributed import SingleProcess
from harmony_ds.offload.disk import DiskMasters, submit
from harmony_ds.optim.block_optimizer import BlockOptimizer, Parameters, Tensors

_AHEAD = 2
"""Blocks that are read while one is stepped; as many may still be written."""


class DiskOptimizer(BlockOptimizer):
    """`BlockOptimizer` with masters and state in a file, which threads read and write."""

    def __init__(
        self, optimizer: Optimizer, masters: Parameters, disk: DiskMasters, world: SingleProcess, apart: Sequence[str]
    ) -> None:
        """Raise OptimizerError if the step of `optimizer` is not elementwise."""
        super().__init__(optimizer, masters, disk, world, apart)
        self._disk = disk
        self._reader = ThreadPoolExecutor(1, "harmony-disk-read")
        self._writer = ThreadPoolExecutor(1, "harmony-disk-write")
        self._written: deque[Future[None]] = deque()
        self.moved_bytes = 8.0 * (disk.states + bool(apart))

    def state_bytes(self) -> int:
        """Return 0: the state is on the disk."""
        return 0

    def unallocated_bytes(self) -> int:
        return 0

    def _read(self, whole: Mapping[str, Tensors]) -> Iterator[tuple[str, slice, Tensor, Tensors]]:
        work = [*self._work(whole)]
        coming = iter(work)
        ahead: deque[Future[tuple[Tensor, Tensors]]] = deque()
        try:
            for name, block in work:
                for one, part in islice(coming, 1 + _AHEAD - len(ahead)):
                    ahead.append(submit(self._reader, partial(self._load, one, part, whole[one])))
                values, parts = ahead.popleft().result()
                yield name, block, values, parts
                while len(self._written) > _AHEAD:
                    self._written.popleft().result()
        finally:
            for future in ahead:
                future.cancel()
            for write in self._written:
                write.exception()  # waits
        while self._written:
            self._written.popleft().result()

    def _load(self, name: str, block: slice, states: Tensors) -> tuple[Tensor, Tensors]:
        values, parts = super()._load(name, block, states)
        there = block.start < block.stop
        return values, {key: self._disk.file.copy_of(part) if there else part for key, part in parts.items()}

    def _store(self, name: str, block: slice, values: Tensor, copies: list[tuple[Tensor, Tensor]]) -> None:
        @torch.no_grad()
        def write() -> None:
            self._blocks.write_block(name, block, values)
            for value, place in copies:
                self._disk.file.write(value, place)

        self._written.append(submit(self._writer, write))

    def close(self) -> None:
        """End the threads, and close the file."""
        self._reader.shutdown()
        self._writer.shutdown()
        self._disk.file.close()
