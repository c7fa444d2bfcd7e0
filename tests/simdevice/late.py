"""Streams that are as late as their events allow, and report accesses that no event orders: a switch of test devices.

    swap and upload  copies wait in a queue until some stream or the host waits for a later event, or (with a seed) until
                     a random time before that; copies that nothing waits for are never done
    compute          kernels run at once, since torch runs them so; late are their effects on the host: their
                     copies into page-locked memory, and the passing of their events
    device memory    NaN until it is written; gone for a queued copy once it was dropped; memory that a stream
                     gave back may be handed out to it by its next allocation (as CUDA's caching allocator would), so
                     every other stream's use must be ordered before that
    host memory      page-locked buffers must be given back before they are dropped, and be left alone while a queued
                     copy reads or writes them. What lies there in several pieces (columns of a matrix) is gathered by the
                     host when its copy is issued, as CUDA's copy_ does

`LateSimDevice` is the device that counts every byte, late; `LateCpuDevice` is the CPU device, late: for processes, whose
collectives take tensors of the CPU alone. Several of them (`beside`) share their streams and make a DeviceGroup: a kernel
runs on the device of its operands, which must be one; copies from another one on a PEER stream are as late as those of the
swap streams.

Unordered accesses are reported even where they do no harm in this run (see `order`), and do harm wherever
lateness can: a copy out of freed memory gives NaN, one out of overwritten memory gives the later values.

Not simulated: kernels that run late (that a swap stream overtakes one is reported, not done); copies of pageable memory
(CUDA stages those before the call returns, so they are done at once); how much memory fragmentation takes. All threads
of the host count as one. Only torch operations of threads that `watched` or the engine's lanes cover are seen.
"""

from __future__ import annotations

import random
import threading
import traceback
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from harmony_ds.device import CpuDevice, Event, Stream
from harmony_ds.device.cpu import HostStreamDevice
from tests.simdevice.device import SimDevice
from tests.simdevice.order import Block, Clock, Order, Who, name_of
from tests.simdevice.tensors import TensorRef, move_in_one_piece, operands, poisoned, same_bits, tensors_in

_GRAIN = 512
"""Bytes; CUDA's caching allocator hands out multiples of it."""
_UPDATES = "harmony-update"  # the thread that may wait
_COPY = torch.ops.aten.copy_.default
_TO_COPY = torch.ops.aten._to_copy.default
_READS_A_VALUE = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}
_HOST = None


class LateStreams:
    """The streams of the devices of one process, their queued copies, and the memory that all of them use.

    Attributes:
        order: which access is known to come after which; it has the reports.
        registered: page-locked buffers, from address to bytes.
        waste: what a step should do once and no more, and where: memory taken that no stream had given back (of its size),
            host memory page-locked, and the host waiting for a stream, but on the thread of updates.
    """

    def __init__(self, seed: int | None, device_type: str) -> None:
        """Take `seed`: copies are done at random moments; None: as late as possible."""
        self.order = Order()
        self.registered: dict[int, int] = {}
        self.waste: list[str] = []
        self.devices = 0
        self._device_type = device_type
        self._spare: Counter[tuple[Who, int]] = Counter()  # device memory given back, by stream and bytes
        self._random = None if seed is None else random.Random(seed)
        self._queues: defaultdict[Who, list[Callable[[], None] | None]] = defaultdict(list)
        self._done: Counter[Who] = Counter()
        self._blocks: dict[int, Block] = {}  # by storage
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._queued_writes: dict[int, int] = {}  # by storage: copies into it that are not done yet
        self._queued_reads: dict[int, int] = {}  # by storage: copies out of it that are not done yet
        self._lock = threading.RLock()
        self._here = _ThreadState()

    # ---- what is asked of it by tests

    def assert_in_order(self) -> None:
        """Nothing was reported, and (call it once the engine is destroyed) no memory is page-locked any more."""
        assert not self.order.reports, "\n".join(dict.fromkeys(self.order.reports))
        assert not self.registered, f"{len(self.registered)} buffers are still page-locked"

    @contextmanager
    def watched(self, who: Who) -> Iterator[None]:
        """While open, this thread's torch operations are those of the stream `who` (None: the host's own)."""
        here = self._here
        before, here.who = here.who, who
        if here.watched:
            try:
                yield
            finally:
                here.who = before
            return
        here.watched = True
        try:
            with _Watch(self):
                yield
        finally:
            here.watched, here.who = False, before

    def make_current(self, number: int) -> None:
        """Let this thread's operations be those of the compute stream of device `number`."""
        self._here.who = number, Stream.COMPUTE

    # ---- what costs time

    def _wasted(self, what: str) -> None:
        inner = traceback.extract_stack()[:-1]
        engine = [frame for frame in inner if "harmony_ds" in frame.filename]
        places = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in engine[-4:]]
        self.waste.append(f"{what} ({' > '.join(places)})")

    def _allocated(self, who: Who, nbytes: int, what: str) -> None:
        key = who, -(-nbytes // _GRAIN) * _GRAIN
        if nbytes and not self._spare[key]:
            self._wasted(f"{nbytes} bytes of device memory for {what}")
        self._spare[key] = max(0, self._spare[key] - 1)

    # ---- events

    def record(self, who: Who) -> Event:
        with self._lock:
            return self._event(who)

    def _event(self, who: Who) -> _LateEvent:
        return _LateEvent(self, who, len(self._queues[who]), self.order.snapshot(who))

    def wait(self, who: Who, event: Event) -> None:
        """Let the stream `who` wait for `event`."""
        assert isinstance(event, _LateEvent) and who is not None
        with self._lock:
            self.order.join(who, event.clock)
            if who[1] is Stream.COMPUTE:
                self.run_until(event.who, event.position)
            else:
                self._queues[who].append(lambda: self.run_until(event.who, event.position))

    def host_waits(self, event: _LateEvent) -> None:
        """Let the host wait for `event`."""
        if threading.current_thread().name != _UPDATES:
            self._wasted(f"the host waits for {name_of(event.who)}")
        with self._lock:
            self.run_until(event.who, event.position)
            self.order.join(_HOST, event.clock)

    def has_passed(self, event: _LateEvent) -> bool:
        with self._lock:
            return self._done[event.who] >= event.position

    def run_until(self, who: Who, position: int) -> None:
        """Do all work that was queued on the stream `who` before `position`."""
        with self._lock, self._here.unwatched():
            queue = self._queues[who]
            while self._done[who] < position:
                place = self._done[who]
                self._done[who] += 1
                work, queue[place] = queue[place], None
                assert work is not None
                work()

    def _maybe_run(self) -> None:
        if self._random is not None and self._random.random() < 0.125:
            who = self._random.randrange(self.devices), self._random.choice(list(Stream))
            waiting = len(self._queues[who]) - self._done[who]
            self.run_until(who, self._done[who] + min(waiting, self._random.randrange(4)))

    # ---- memory

    def record_use(self, number: int, tensor: Tensor) -> None:
        block = self._block(tensor)
        assert block is not None
        block.used.add((number, Stream.COMPUTE))

    def copy_in(self, number: int, tensor: Tensor, device: torch.device) -> Tensor:
        """Return a copy of `tensor` on a device that its UPLOAD stream is yet to make."""
        with self._lock, self._here.unwatched():
            staged = tensor.to("cpu", copy=True)  # done when the call returns
            made = poisoned(torch.empty_like(staged, device=device))
        who = number, Stream.UPLOAD
        self._own(who, made, "upload")
        there = TensorRef(made)
        self._queued_writes[there.key] = self._queued_writes.get(there.key, 0) + 1

        def work() -> None:
            self._queued_writes[there.key] -= 1
            target = there.tensor()
            if target is not None:
                target.copy_(staged)

        self._queues[who].append(work)
        return made

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        with self._here.unwatched():
            buffer = torch.empty(numel, dtype=dtype)
            if not numel:
                return buffer
            poisoned(buffer)
        self.host_lock(buffer)
        return buffer

    def host_lock(self, buffer: Tensor) -> None:
        if buffer.numel():
            with self._lock:
                self._wasted(f"{buffer.nbytes} bytes page-locked")
                self._follow(buffer, Block(_HOST, f"a page-locked buffer of {buffer.nbytes} bytes"))
                self.registered[buffer.data_ptr()] = buffer.nbytes

    def host_free(self, buffer: Tensor) -> None:
        if buffer.numel() and self.registered.pop(buffer.data_ptr(), None) is None:
            self.order.reports.append(f"{buffer.nbytes} bytes that are not page-locked were given back as if they were")

    def _follow(self, tensor: Tensor, block: Block) -> None:
        storage = tensor.untyped_storage()
        key, address = storage._cdata, storage.data_ptr()
        allocated = block.owner, -(-storage.nbytes() // _GRAIN) * _GRAIN

        def gone(_: object) -> None:
            del self._blocks[key], self._storages[key]
            if block.owner is not _HOST:
                self.order.free(block)
                self._spare[allocated] += 1
            elif self.registered.pop(address, None) is not None:
                self.order.reports.append(f"{block.what} was dropped and is still page-locked")

        self._blocks[key] = block
        self._storages[key] = weakref.ref(storage, gone)

    def _block(self, tensor: Tensor) -> Block | None:
        return self._blocks.get(tensor.untyped_storage()._cdata)

    def _is_page_locked(self, tensor: Tensor) -> bool:
        block = self._block(tensor)
        return block is not None and block.owner is _HOST

    def _is_on_device(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies on a device; on a CPU device, whatever is not page-locked does."""
        return tensor.device.type == self._device_type and not self._is_page_locked(tensor)

    # ---- operations

    def perform(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation of the calling thread."""
        who = self._here.who
        if not self._here.watched or self._here.unseen:
            return func(*args, **kwargs)
        with self._lock:
            self._maybe_run()
            places = self._places(func, args, kwargs)
            if places and (func is _COPY if who is _HOST else who[1] is Stream.COMPUTE):
                # It runs where its operands are; the host's copies are the engine's answer to a reader.
                who = places[0], Stream.COMPUTE
                if len(set(places)) > 1:
                    self.order.reports.append(f"{func} takes operands on devices {sorted(set(places))}")
            if func is _COPY and who is not _HOST and self._crosses_the_link(args[0], args[1]):
                if args[2] if len(args) > 2 else kwargs.get("non_blocking", False):
                    if not self._is_page_locked(args[0]) and not move_in_one_piece(args[0], args[1]):
                        return self._copy_gathered(who, args[0], args[1])
                    return self._copy_late(who, args[0], args[1])
                self._event(who).synchronize()
            elif who is not _HOST and self._waits_for_pageable(func, args, kwargs):
                self._event(who).synchronize()
            if who is not _HOST and who[1] is Stream.PEER and not func.is_view:
                if func is _TO_COPY and places and places[0] != who[0]:
                    with self._here.unwatched():
                        made = poisoned(func(*args, **kwargs))
                    self._own(who, made, str(func))
                    return self._copy_late(who, made, args[0])
                self.run_until(who, len(self._queues[who]))  # done at once, but not before what it waits for
        result = func(*args, **kwargs)
        if not func.is_view:
            with self._lock:
                self._note(who, func, args, kwargs, result)
        return result

    def _waits_for_pageable(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operation copies between a device and host memory that is not page-locked, and waits for its stream.

        Into the device, such a copy waits unless it is `non_blocking`: what it copies is staged before the call returns.
        """
        if func is _COPY:
            target, source = args[0].device.type, args[1].device.type
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        elif func is _TO_COPY and kwargs.get("device") is not None:
            target, source = torch.device(kwargs["device"]).type, args[0].device.type
            non_blocking = kwargs.get("non_blocking", False)
        else:
            return False
        if target == source or "cpu" not in (target, source):
            return False
        return target == "cpu" or not non_blocking

    def _crosses_the_link(self, target: Tensor, source: Tensor) -> bool:
        """Whether a copy goes between page-locked memory and a device."""
        return (self._is_page_locked(target) and self._is_on_device(source)) or (
            self._is_page_locked(source) and self._is_on_device(target)
        )

    def _places(self, func: Any, args: Any, kwargs: Any) -> list[int]:
        """Return the devices of the operands."""
        blocks = [self._block(tensor) for tensor, _ in operands(func, args, kwargs)]
        return [block.owner[0] for block in blocks if block is not None and block.owner is not _HOST]

    def _own(self, who: Who, tensor: Tensor, name: str) -> None:
        """Note that `tensor` is new, in memory of the stream `who`."""
        what = f"{tuple(tensor.shape)} of {name} on {name_of(who)}"
        self._allocated(who, tensor.untyped_storage().nbytes(), what)
        block = self.order.allocate(who, what)
        self._follow(tensor, block)
        self.order.access(who, block, True, name)

    def _note(self, who: Who, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note what an operation that has run has read, written and made."""
        known, on_device = set(), False
        name = str(func)
        empty = "empty" in name  # made like another tensor, whose values nobody reads
        for tensor, write in operands(func, args, kwargs):
            known.add(tensor.untyped_storage()._cdata)
            block = self._block(tensor)
            on_device |= block is not None and block.owner is not _HOST
            if block is not None and not empty:
                self.order.access(_HOST if block.owner is _HOST else who, block, write, name)
        if func in _READS_A_VALUE and on_device and who is not _HOST:
            self._event(who).synchronize()
        for tensor in tensors_in(result):
            key = tensor.untyped_storage()._cdata
            if isinstance(tensor, FakeTensor):  # of a proof: without memory
                continue
            if key in known or key in self._blocks:
                continue
            if empty:
                poisoned(tensor)
            if who is not _HOST and self._is_on_device(tensor):
                number = who[0] if tensor.device.index is None else tensor.device.index
                self._own((number, who[1]), tensor, name)

    def _copy_gathered(self, who: Who, target: Tensor, source: Tensor) -> Tensor:
        """Copy what lies in several pieces of page-locked memory: the host gathers it before the call returns."""
        for by, tensor, write in ((_HOST, source, False), (who, target, True)):
            block = self._block(tensor)
            if block is not None:
                self.order.access(by, block, write, "a copy that the host gathers")
        with self._here.unwatched():
            return target.copy_(source)

    def _copy_late(self, who: Who, target: Tensor, source: Tensor) -> Tensor:
        """Queue a copy between the device and page-locked memory, or another device."""
        out = self._is_page_locked(target)
        for tensor, write in ((source, False), (target, True)):
            block = self._block(tensor)
            if block is not None:
                self.order.access(who, block, write, "a copy")
        there, here = TensorRef(target), TensorRef(source)
        kept: Tensor | None = None
        with self._here.unwatched():
            filled = not self._queued_writes.get(here.key)
            # Copies of this simulation's own are no memory of the device.
            seen = source.detach().to("cpu", copy=True) if filled else None
            computes = who is not _HOST and who[1] is Stream.COMPUTE
            if computes:
                if out:  # kernels go on and change the source: the copy is what it was
                    kept = source.detach().to("cpu", copy=True)
                else:
                    target.detach().copy_(source)
            in_use = self._queued_writes.get(there.key) or self._queued_reads.get(there.key)
            if out and not in_use and target.is_floating_point():  # else events order this copy after those
                target.detach().fill_(float("nan"))
        self._queued_writes[there.key] = self._queued_writes.get(there.key, 0) + 1
        self._queued_reads[here.key] = self._queued_reads.get(here.key, 0) + 1

        def work() -> None:
            self._queued_writes[there.key] -= 1
            self._queued_reads[here.key] -= 1
            self._do_copy(there, TensorRef(kept) if kept is not None else here, seen, out, computes)

        self._queues[who].append(work)
        torch.autograd.graph.increment_version(target)
        return target

    def _do_copy(self, there: TensorRef, here: TensorRef, seen: Tensor | None, out: bool, done: bool) -> None:
        source, target = here.tensor(), there.tensor()
        direction = "device to host" if out else "host to device"
        if source is None:
            self.order.reports.append(f"the source of a copy ({direction}) was freed before it ran")
        elif seen is not None and not same_bits(seen, source.cpu()):
            self.order.reports.append(f"the source of a copy ({direction}) was overwritten before it ran")
        if target is None:
            if out:  # memory of the device that was given back in order may be written to the end
                self.order.reports.append(f"the target of a copy ({direction}) was freed before it ran")
        elif source is None:
            poisoned(target)
        elif out or not done:
            target.copy_(source)


class OnLateStreams(HostStreamDevice):
    """A device whose streams are late: goes before the class of the device in the list of bases."""

    copies_overlap = True
    pins_host = True
    late: LateStreams
    place: int

    def join_streams(self, seed: int | None, beside: OnLateStreams | None) -> None:
        """Take streams of its own, or share those of `beside`, the first device of its group."""
        self.late = LateStreams(seed, self.torch_device.type) if beside is None else beside.late
        self.place = self.late.devices
        self.late.devices += 1

    @property
    def order(self) -> Order:
        return self.late.order

    @property
    def waste(self) -> list[str]:
        return self.late.waste

    def assert_in_order(self) -> None:
        self.late.assert_in_order()

    def watched(self, stream: Stream | None = Stream.COMPUTE) -> AbstractContextManager[None]:
        """While open, this thread's torch operations are those of `stream` (None: the host's own)."""
        return self.late.watched(None if stream is None else (self.place, stream))

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        context = self.watched(stream)
        return context if self._watch is None else self._watch(stream, context)

    @contextmanager
    def as_current(self) -> Iterator[None]:
        with super().as_current(), self.watched():
            yield

    def set_current(self) -> None:
        super().set_current()
        self.late.make_current(self.place)

    def record(self, stream: Stream) -> Event:
        return self.late.record((self.place, stream))

    def wait(self, stream: Stream, event: Event) -> None:
        self.late.wait((self.place, stream), event)

    def synchronize(self) -> None:
        """Let the host wait for every stream."""
        for stream in Stream:
            self.record(stream).synchronize()

    def record_use(self, tensor: Tensor) -> None:
        self.late.record_use(self.place, tensor)

    def _copy_in(self, tensor: Tensor) -> Tensor:
        return self.late.copy_in(self.place, tensor, self.torch_device)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        with self.watched():
            return super().empty(numel, dtype)

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.late.host_empty(numel, dtype)

    def host_lock(self, buffer: Tensor) -> None:
        self.late.host_lock(buffer)

    def host_free(self, buffer: Tensor) -> None:
        self.synchronize()
        self.late.host_free(buffer)


class LateSimDevice(OnLateStreams, SimDevice):
    """The test device that counts every byte, with late streams."""

    def __init__(
        self, seed: int | None = None, budget_bytes: int | None = None, beside: LateSimDevice | None = None
    ) -> None:
        """`seed`: copies are done at random moments (None: as late as possible). `beside`: the first of its group."""
        super().__init__(budget_bytes, 0 if beside is None else beside.late.devices)
        self.join_streams(seed, beside)


class LateCpuDevice(OnLateStreams, CpuDevice):
    """The CPU device with late streams."""

    def __init__(
        self, seed: int | None = None, budget_bytes: int | None = None, beside: LateCpuDevice | None = None
    ) -> None:
        super().__init__(budget_bytes)
        self.join_streams(seed, beside)


class _LateEvent:
    def __init__(self, late: LateStreams, who: Who, position: int, clock: Clock) -> None:
        self._late = late
        self.who = who
        self.position = position
        self.clock = clock

    def synchronize(self) -> None:
        self._late.host_waits(self)

    def query(self) -> bool:
        return self._late.has_passed(self)


class _ThreadState(threading.local):
    """State of the calling thread."""

    def __init__(self) -> None:
        self.who: Who = (0, Stream.COMPUTE)
        self.watched = False
        self.unseen = 0

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        self.unseen += 1
        try:
            with torch.no_grad():
                yield
        finally:
            self.unseen -= 1


class _Watch(TorchDispatchMode):
    def __init__(self, late: LateStreams) -> None:
        super().__init__()
        self._late = late

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._late.perform(func, args, kwargs or {})
