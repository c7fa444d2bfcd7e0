"""The host optimizer of masters and state on a disk: a thread reads blocks ahead of their steps, another writes them back.

reader    read 3 │ read 4 │ read 5
updater            step 1 │ step 2 │ step 3
writer                     write 1 │ write 2
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from harmony_ds.distributed import SingleProcess
from harmony_ds.offload.disk import DiskMasters, submit
from harmony_ds.optim.block_optimizer import BlockOptimizer, Parameters, StateTensors

_AHEAD = 2
"""The number of blocks that are read while one is stepped; as many may still wait to be written."""


class DiskOptimizer(BlockOptimizer):
    """`BlockOptimizer` with masters and state in a file, which threads read and write."""

    def __init__(
        self,
        optimizer: Optimizer,
        masters: Parameters,
        disk: DiskMasters,
        world: SingleProcess,
        separate_masters: Sequence[str],
    ) -> None:
        """Raise OptimizerError if the step of `optimizer` is not known to be elementwise."""
        super().__init__(optimizer, masters, disk, world, separate_masters)
        self._disk = disk
        self._reader = ThreadPoolExecutor(1, "harmony-disk-read")
        self._writer = ThreadPoolExecutor(1, "harmony-disk-write")
        self._writes: deque[Future[None]] = deque()  # not known to be done
        self.moved_bytes = 8.0 * (disk.states + bool(separate_masters))

    def state_bytes(self) -> int:
        """Return 0: the state is on the disk."""
        return 0

    def unallocated_bytes(self) -> int:
        return 0

    def _read_blocks(self, states: Mapping[str, StateTensors]) -> Iterator[tuple[str, slice, Tensor, StateTensors]]:
        """Yield every block as `BlockOptimizer` does, with the next ones being read meanwhile; OSError: the disk fails."""
        blocks = [*self._blocks_of(states)]
        reads: deque[Future[tuple[Tensor, StateTensors]]] = deque()
        issued = 0  # reads of the first so many blocks
        try:
            for name, block in blocks:
                while issued < len(blocks) and len(reads) < 1 + _AHEAD:
                    next_name, next_block = blocks[issued]
                    reads.append(
                        submit(self._reader, partial(self._read_block, next_name, next_block, states[next_name]))
                    )
                    issued += 1
                values, block_state = reads.popleft().result()
                yield name, block, values, block_state
                while len(self._writes) > _AHEAD:
                    self._writes.popleft().result()
        finally:
            for read in reads:
                read.cancel()
            for write in self._writes:
                write.exception()  # waits for the write
        while self._writes:
            self._writes.popleft().result()

    def _read_block(self, name: str, block: slice, states: StateTensors) -> tuple[Tensor, StateTensors]:
        values, block_state = super()._read_block(name, block, states)
        if block.start < block.stop:
            block_state = {key: self._disk.file.copy_of(on_disk) for key, on_disk in block_state.items()}
        return values, block_state

    def _store_block(self, name: str, block: slice, values: Tensor, states: list[tuple[Tensor, Tensor]]) -> None:
        @torch.no_grad()
        def write() -> None:
            self._blocks.write_block(name, block, values)
            for value, on_disk in states:
                self._disk.file.write(value, on_disk)

        self._writes.append(submit(self._writer, write))

    def close(self) -> None:
        """End the threads, and close the file."""
        self._reader.shutdown()
        self._writer.shutdown()
        self._disk.file.close()
