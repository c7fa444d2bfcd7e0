"""Weights in a file: a thread reads those of a swap-in, chunk by chunk, and issues their copies to the device.

    file ──read──> a page-locked chunk ──copy, on a stream of its own──> device buffer

The chunks take the same host memory whatever a pack takes. A program reads and writes weights through the file's mapping.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from harmony_ds.device.base import Device, Event, Stream, StreamContext
from harmony_ds.distributed import ALONE, SingleProcess
from harmony_ds.offload.disk import DiskFile, submit

CHUNK_BYTES = 2**24
_CHUNKS = 4
"""While one is read, the others may be on their way to the device."""
HOST_BYTES = _CHUNKS * CHUNK_BYTES
Copies = Sequence[tuple[Tensor, Tensor]]


class DiskWeights:
    """The file that slabs lie in, and their swap-ins."""

    def __init__(self, folder: str, device: Device, nbytes: int, world: SingleProcess = ALONE) -> None:
        """Allocate a file of `nbytes`; HostMemoryError: its disk is full."""
        self.device = device
        self.file = DiskFile(folder, nbytes, "offload_param", world)
        size = min(CHUNK_BYTES, self.file.nbytes)
        self._chunks: deque[tuple[Tensor, Event | None]] = deque()  # with the event after the last copy out of it
        self._chunks.extend((device.host_empty(size, torch.uint8), None) for _ in range(_CHUNKS))
        self._reader = ThreadPoolExecutor(1, "harmony-disk-weights", device.current_member().set_current)

    @property
    def host_bytes(self) -> int:
        return len(self._chunks) * self._chunks[0][0].nbytes  # not one by one: the thread moves them

    def swap_in(self, copies: Copies, free: Event) -> Future[Event]:
        """Copy tensors of the file to the device's, free after an event, and promise one; OSError: the disk fails."""
        device = self.device.current_member()
        return submit(self._reader, partial(self._copy, copies, device, free, device.on(Stream.DISK)))

    @torch.inference_mode()  # of the caller, too: then targets of it are written from this thread
    def _copy(self, copies: Copies, device: Device, free: Event, context: StreamContext) -> Event:
        device.wait(Stream.DISK, free)
        try:
            with context:
                for source, target in copies:
                    step = self._chunks[0][0].numel() // source.element_size()
                    for begin in range(0, source.numel(), step):
                        self._copy_chunk(source[begin : begin + step], target[begin : begin + step], device)
        except OSError:
            device.record(Stream.DISK).synchronize()  # the target will be freed
            raise
        return device.record(Stream.DISK)

    def _copy_chunk(self, source: Tensor, target: Tensor, device: Device) -> None:
        self._chunks.rotate(-1)
        memory, copied = self._chunks[-1]
        if copied is not None:
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
