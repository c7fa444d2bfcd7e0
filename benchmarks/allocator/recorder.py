"""Record what the engine allocates on the device, with its real sizes, streams and order, on a machine without a GPU.

The engine runs as it is, on torch's meta device: its own tasks, streams and layers, and autograd. A dispatch mode sees
every operation; a storage that an operation makes is an allocation, and ends with its last reference, as on a GPU.

    tensors          made under the recorder's mode by the thread that trains: device memory of the current stream
    host memory      is on the meta device, too, and no device memory: what `Device.host_empty` makes, what is made while
                     SWAP_OUT is the current stream (which allocates nothing on a device), and what operations make of these
    kernels          what attention's and the embedding's backward take for themselves, which no tensor shows
    values           a number that is read is 1; a tensor that is copied to a CPU tensor leaves it as it is

Not recorded: what other kernels take for themselves, and most of what measuring does on a GPU (several sizes, times).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.allocator.events import Allocated, Event, Freed, PoolFilled, Refused, StepBegun, TaskDone, Used
from benchmarks.allocator.replay import AllocatorReplay
from harmony_ds.device.base import MemoryProbe, Stream
from harmony_ds.device.kernel_scratch import scratch_bytes
from harmony_ds.device.live_bytes import EagerDispatchMode, tensors_among
from harmony_ds.device.meta import MetaDevice
from harmony_ds.profiling.roofline import RooflineClock
from harmony_ds.scheduler.plan import Task

_aten = torch.ops.aten


class Recorder(EagerDispatchMode):
    """Dispatch mode that writes device allocations down.

    Attributes:
        events: what has happened so far.
    """

    def __init__(self, allocator: AllocatorReplay) -> None:
        """Follow in `allocator` what is recorded: what measuring asks of it and it cannot serve is refused."""
        super().__init__()
        self.events: list[Event] = []
        self._allocator = allocator
        self._is_measuring = False
        self._stream = Stream.COMPUTE
        self._makes_buffer = False
        self._is_aside = False
        self._count = 0
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}  # storage -> its number

    # ---- what the device and the program tell

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before

    @contextmanager
    def making_buffer(self) -> Iterator[None]:
        """Note that what is allocated is a buffer of `Device.empty`."""
        self._makes_buffer = True
        try:
            yield
        finally:
            self._makes_buffer = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Record nothing: it is host memory."""
        before, self._is_aside = self._is_aside, True
        try:
            yield
        finally:
            self._is_aside = before

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Raise torch.OutOfMemoryError while open where the allocator cannot serve a request, as a GPU does.

        In a step, where that must not happen, `AllocatorReplay.failure` says so, and the engine goes on.
        """
        self._is_measuring = True
        try:
            yield
        finally:
            self._is_measuring = False

    def _note(self, event: Event) -> None:
        self.events.append(event)
        self._allocator.play(event)

    def record_use(self, tensor: Tensor, stream: Stream) -> None:
        number = self._number_of(tensor)
        if number is not None:
            self._note(Used(number, stream))

    def fill_pool(self, other_bytes: int) -> None:
        self._note(PoolFilled(other_bytes))

    def begin_step(self, step: int) -> None:
        self._note(StepBegun(step))

    def end_task(self, done: int, total: int, task: Task) -> None:
        """Note that a task is done; a callback of `Executor.on_progress`."""
        self._note(TaskDone(f"task {done} of {total}, {task}"))

    # ---- operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        if packet is _aten._local_scalar_dense and args[0].is_meta and args[0].dtype is not torch.bool:
            return 1
        if packet is _aten._to_copy and args[0].is_meta and _is_cpu(kwargs.get("device")):
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device="cpu")
        if packet is _aten.copy_ and args[1].is_meta and not args[0].is_meta:
            return args[0]
        given = [tensor for tensor in tensors_among((args, kwargs)) if _has_storage(tensor)]
        result = func(*args, **kwargs)
        if self._is_aside or self._stream is Stream.SWAP_OUT:
            return result
        numbers = [self._number_of(tensor) for tensor in given if tensor.is_meta]
        is_of_host = numbers and not any(numbers) and "device" not in kwargs
        if is_of_host:
            return result
        storages = {tensor.untyped_storage()._cdata for tensor in given}
        for tensor in tensors_among(result):
            if tensor.is_meta and _has_storage(tensor) and tensor.untyped_storage()._cdata not in storages:
                self._follow(tensor.untyped_storage())
        nbytes = scratch_bytes(func, args)
        if nbytes:
            number = self._allocate(nbytes)
            self._note(Freed(number))
        return result

    def _number_of(self, tensor: Tensor) -> int | None:
        """Return the number of the allocation that `tensor` is in; None: it is host memory."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[1]

    def _follow(self, storage: torch.UntypedStorage) -> None:
        """Record an allocation, until its storage ends."""
        key = storage._cdata
        if key in self._known:
            return
        number = self._allocate(storage.nbytes())

        def end(_: object) -> None:
            del self._known[key]
            self._note(Freed(number))

        self._known[key] = weakref.ref(storage, end), number

    def _allocate(self, nbytes: int) -> int:
        request = Refused(nbytes, self._stream, self._makes_buffer)
        if self._is_measuring and not self._allocator.serves(request):
            self.events.append(request)
            raise torch.OutOfMemoryError(f"{nbytes} bytes were asked for while measuring.")
        self._count += 1
        self._note(Allocated(self._count, nbytes, self._stream, self._makes_buffer))
        return self._count


def _is_cpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cpu"


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and type(tensor).__name__ != "PhantomParameter"


class RecordedDevice(MetaDevice):
    """Meta device that tells a recorder what it does, and leaves as much room as a CUDA device."""

    def __init__(self, clock: RooflineClock, budget_bytes: int, recorder: Recorder) -> None:
        super().__init__(clock, budget_bytes, "cuda", leaves_room=True)
        self._recorder = recorder

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        context = self._recorder.on(stream)
        return context if self._watch is None else self._watch(stream, context)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        with self._recorder.making_buffer():
            return super().empty(numel, dtype)

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        with self._recorder.aside():
            return super().host_empty(numel, dtype)

    def _copy_in(self, tensor: Tensor) -> Tensor:
        with self._recorder.on(Stream.UPLOAD):
            return super()._copy_in(tensor)

    def record_use(self, tensor: Tensor) -> None:
        self._recorder.record_use(tensor, Stream.COMPUTE)

    def fill_pool(self, other_bytes: int) -> None:
        self._recorder.fill_pool(other_bytes)

    @contextmanager
    def probe(self) -> Iterator[MemoryProbe]:
        with super().probe() as probe, self._recorder.measuring():
            yield probe
