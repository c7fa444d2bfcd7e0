"""Weights on a disk: for a swap-in, a thread reads them chunk by chunk, and issues the chunks' copies to the device.

    file ──read──> page-locked chunk ──copy on the DISK stream──> device buffer

Four chunks serve packs of any size. A program reads and writes weights through the file's mapping.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from harmony_ds.device.base import Device, Event, Stream, StreamContext
from harmony_ds.distributed import SINGLE_PROCESS, SingleProcess
from harmony_ds.offload.disk import DiskFile, submit

CHUNK_BYTES = 2**24
_CHUNKS = 4
"""While one chunk is read, the others may be on their way to the device."""
HOST_BYTES = _CHUNKS * CHUNK_BYTES
CopyPairs = Sequence[tuple[Tensor, Tensor]]


class DiskWeights:
    """The file that slabs of weights lie in, and the thread of their swap-ins."""

    def __init__(self, folder: str, device: Device, nbytes: int, world: SingleProcess = SINGLE_PROCESS) -> None:
        """Allocate a file of `nbytes`; HostMemoryError: its disk is full."""
        self.device = device
        self.file = DiskFile(folder, nbytes, "offload_param", world)
        size = min(CHUNK_BYTES, self.file.nbytes)
        self._chunks: deque[tuple[Tensor, Event | None]] = deque()  # each with the event after the last copy out of it
        self._chunks.extend((device.host_empty(size, torch.uint8), None) for _ in range(_CHUNKS))
        self._reader = ThreadPoolExecutor(1, "harmony-disk-weights", device.current_member().set_current)

    @property
    def host_bytes(self) -> int:
        """Bytes of the chunks."""
        return len(self._chunks) * self._chunks[0][0].nbytes  # no loop over them: the thread moves them meanwhile

    def swap_in(self, pairs: CopyPairs, free: Event) -> Future[Event]:
        """Begin to copy tensors of the file to the device; return a promise of the event after the copies.

        Args:
            pairs: pairs of a tensor in the file and one on the device.
            free: event after which the device's tensors may be written.
        """
        device = self.device.current_member()
        return submit(self._reader, partial(self._copy, pairs, device, free, device.on(Stream.DISK)))

    @torch.inference_mode()  # otherwise tensors that the caller made in inference mode could not be written
    def _copy(self, pairs: CopyPairs, device: Device, free: Event, context: StreamContext) -> Event:
        # The swap-in stream has waited for the work that may still use the buffer's memory.
        device.wait(Stream.DISK, free)
        try:
            with context:
                for source, target in pairs:
                    step = self._chunks[0][0].numel() // source.element_size()
                    for begin in range(0, source.numel(), step):
                        self._copy_chunk(source[begin : begin + step], target[begin : begin + step], device)
        except OSError:
            # The caller will free the target, which copies may still write.
            device.record(Stream.DISK).synchronize()
            raise
        return device.record(Stream.DISK)

    def _copy_chunk(self, source: Tensor, target: Tensor, device: Device) -> None:
        self._chunks.rotate(-1)
        memory, copied = self._chunks[-1]
        if copied is not None:
            # The chunk is overwritten only after the last copy has read it.
            copied.synchronize()
        chunk = memory[: source.numel() * source.element_size()].view(source.dtype)
        self.file.read(source, chunk)
        target.copy_(chunk, non_blocking=True)
        self._chunks[-1] = memory, device.record(Stream.DISK)

    def close(self) -> None:
        """End the thread, and close the file; the weights stay readable."""
        self._reader.shutdown()
        for chunk, _ in self._chunks:
            self.device.host_free(chunk)
        self.file.close()
