"""Recorder of the allocations of operations, in order: what is made, how large it is, and when its last reference goes.

As in `live_bytes`, a storage is an allocation, from the operation that makes it to its finalisation. What is known of the
memory that CUDA's kernels take for themselves is recorded, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from harmony_ds.device.kernel_scratch import scratch_bytes
from harmony_ds.device.live_bytes import EagerDispatchMode, is_plain, tensors_among


class AllocationTrace(EagerDispatchMode):
    """Dispatch mode that writes down allocations of one type of device.

    Attributes:
        events: of the part that is recorded now: pairs of an allocation's number and its bytes, or 0 where it ends.
        uploads: numbers of what was made of host tensors: copies of a micro-batch's inputs.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self.events: list[tuple[int, int]] = []
        self.uploads: list[int] = []
        self._is_paused = False
        self._count = 0
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}  # storage -> number

    @contextmanager
    def recording(self, events: list[tuple[int, int]]) -> Iterator[None]:
        """Add to `events` while open."""
        before = self.events, self._is_paused
        self.events, self._is_paused = events, False
        try:
            yield
        finally:
            self.events, self._is_paused = before

    def begin(self, events: list[tuple[int, int]]) -> None:
        """Add to `events` from now on."""
        self.events, self._is_paused = events, False

    def pause(self) -> None:
        """Note only what ends, from now on."""
        self._is_paused = True

    def numbers(self, tensors: Iterable[Tensor | None]) -> tuple[int, ...]:
        """Return the numbers of the allocations that tensors are in, each once; of those that were recorded."""
        found: dict[int, None] = {}
        for tensor in tensors:
            if tensor is not None and is_plain(tensor):
                known = self._known.get(tensor.untyped_storage()._cdata)
                if known is not None:
                    found[known[1]] = None
        return tuple(found)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._is_paused:
            return func(*args, **(kwargs or {}))
        taken = [tensor for tensor in tensors_among((args, kwargs)) if is_plain(tensor)]
        given = {tensor.untyped_storage()._cdata for tensor in taken}
        is_upload = bool(taken) and all(tensor.device.type == "cpu" != self._device_type for tensor in taken)
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_among(result):
            if is_plain(tensor) and tensor.device.type == self._device_type:
                storage = tensor.untyped_storage()
                if storage._cdata not in given and self._follow(storage) and is_upload:
                    self.uploads.append(self._count)
        nbytes = scratch_bytes(func, args)
        if nbytes:
            self._count += 1
            self.events += [(self._count, nbytes), (self._count, 0)]
        return result

    def _follow(self, storage: torch.UntypedStorage) -> bool:
        """Record an allocation, until its storage ends; return whether it is a new one."""
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known or not nbytes:
            return False
        self._count += 1
        number = self._count
        self.events.append((number, nbytes))

        def end(_: object) -> None:
            del self._known[key]
            self.events.append((number, 0))

        self._known[key] = weakref.ref(storage, end), number
        return True
