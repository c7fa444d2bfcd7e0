"""A CPU device whose copies are as late as its events allow, and which reports accesses that no event orders.

    swap and upload  copies wait in a queue until some stream or the host waits for a later event, or (with a seed) until
                     a random time before that; copies that nothing waits for are never done
    compute          kernels run at once, since torch runs them so; late are their effects on the host: their
                     copies into page-locked memory, and the passing of their events
    device memory    NaN until it is written; gone for a queued copy once it was dropped; memory that a stream
                     gave back may be handed out to it by its next allocation (as CUDA's caching allocator would), so
                     every other stream's use must be ordered before that
    host memory      page-locked buffers must be given back before they are dropped, and be left alone while a queued
                     copy reads or writes them

Several of them (`beside`) make a DeviceGroup: a kernel runs on the device of its operands, which must be one; copies from
another one on a PEER stream are as late as those of the swap streams.

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
from torch.utils._python_dispatch import TorchDispatchMode

from harmony_ds.device import CpuDevice, Event, Stream
from tests.late_device.order import Block, Clock, Order, Who, name_of
from tests.late_device.tensors import TensorRef, operands, poisoned, same_bits, tensors_in

_GRAIN = 512
"""Bytes; CUDA's caching allocator hands out multiples of it."""
_UPDATES = "harmony-update"  # the thread that may wait
_COPY = torch.ops.aten.copy_.default
_TO_COPY = torch.ops.aten._to_copy.default
_READS_A_VALUE = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}
_HOST = None
_SHARED = (
    *("order", "registered", "waste", "_spare", "_chance", "_queues", "_done", "_blocks", "_storages"),
    *("_queued_writes", "_queued_reads", "_lock", "_here", "_group"),
)
"""Attributes that the devices of a group share."""


class LateDevice(CpuDevice):
    """The late device: to be used under `watched`, and checked by `assert_in_order`."""

    copies_overlap = True
    pins_host = True

    def __init__(
        self, seed: int | None = None, budget_bytes: int | None = None, beside: LateDevice | None = None
    ) -> None:
        """`seed`: copies are done at random moments (None: as late as possible). `beside`: the first of its group."""
        super().__init__(budget_bytes)
        self.name = "late"
        self.place = 0
        if beside is not None:
            self.place = len(beside._group)
            self.__dict__.update({name: beside.__dict__[name] for name in _SHARED})
            self._group.append(self)
            return
        self._group = [self]
        self.order = Order()
        self.registered: dict[int, int] = {}  # address to bytes
        self.waste: list[str] = []
        """What a step should do once and no more, and where: memory taken that no stream had given back (of its size), host
        memory page-locked, and the host waiting for a stream, but on the thread of updates.
        """
        self._spare: Counter[tuple[Who, int]] = Counter()  # device memory given back, by stream and bytes
        self._chance = None if seed is None else random.Random(seed)
        self._queues: defaultdict[Who, list[Callable[[], None] | None]] = defaultdict(list)
        self._done: Counter[Who] = Counter()
        self._blocks: dict[int, Block] = {}  # by storage
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._queued_writes: dict[int, int] = {}  # by storage: copies into it that are not done yet
        self._queued_reads: dict[int, int] = {}  # by storage: copies out of it that are not done yet
        self._lock = threading.RLock()
        self._here = _ThreadState()

    def assert_in_order(self) -> None:
        """Nothing was reported, and (call it once the engine is destroyed) no memory is page-locked any more."""
        assert not self.order.reports, "\n".join(dict.fromkeys(self.order.reports))
        assert not self.registered, f"{len(self.registered)} buffers are still page-locked"

    # ---- what costs time

    def _wasted(self, what: str) -> None:
        inner = traceback.extract_stack()[:-1]
        engine = [frame for frame in inner if "harmony_ds" in frame.filename]
        places = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in engine[-4:]]
        self.waste.append(f"{what} ({' > '.join(places)})")

    def _take(self, who: Who, nbytes: int, what: str) -> None:
        key = who, -(-nbytes // _GRAIN) * _GRAIN
        if nbytes and not self._spare[key]:
            self._wasted(f"{nbytes} bytes of device memory for {what}")
        self._spare[key] = max(0, self._spare[key] - 1)

    # ---- threads

    @contextmanager
    def watched(self, stream: Stream | None = Stream.COMPUTE) -> Iterator[None]:
        """While open, this thread's torch operations are those of `stream` (None: the host's own)."""
        before, self._here.who = self._here.who, None if stream is None else (self.place, stream)
        if self._here.watched:
            try:
                yield
            finally:
                self._here.who = before
            return
        self._here.watched = True
        try:
            with _Watch(self):
                yield
        finally:
            self._here.watched, self._here.who = False, before

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        context = self.watched(stream)
        return context if self._watch is None else self._watch(stream, context)

    def as_current(self) -> AbstractContextManager[object]:
        return self.watched()

    def set_current(self) -> None:
        self._here.who = self.place, Stream.COMPUTE

    # ---- events

    def record(self, stream: Stream) -> Event:
        with self._lock:
            who = self.place, stream
            return _LateEvent(self, who, len(self._queues[who]), self.order.snapshot(who))

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, _LateEvent)
        with self._lock:
            self.order.join((self.place, stream), event.clock)
            if stream is Stream.COMPUTE:
                self.pass_to(event.who, event.position)
            else:
                self._queues[self.place, stream].append(lambda: self.pass_to(event.who, event.position))

    def pass_to(self, who: Who, position: int) -> None:
        """Do all work that was queued on the stream `who` before `position`."""
        with self._lock, self._here.unwatched():
            queue = self._queues[who]
            while self._done[who] < position:
                place = self._done[who]
                self._done[who] += 1
                work, queue[place] = queue[place], None
                assert work is not None
                work()

    def _maybe_pass(self) -> None:
        if self._chance is not None and self._chance.random() < 0.125:
            who = self._chance.randrange(len(self._group)), self._chance.choice(list(Stream))
            ahead = len(self._queues[who]) - self._done[who]
            self.pass_to(who, self._done[who] + min(ahead, self._chance.randrange(4)))

    def synchronize(self) -> None:
        """Let the host wait for every stream."""
        for stream in Stream:
            self.record(stream).synchronize()

    # ---- memory

    def record_use(self, tensor: Tensor) -> None:
        block = self._block(tensor)
        assert block is not None
        block.used.add((self.place, Stream.COMPUTE))

    def _copy_in(self, tensor: Tensor) -> Tensor:
        with self._lock, self._here.unwatched():
            staged = tensor.clone()  # done when the call returns
            made = poisoned(torch.empty_like(staged))
        self._own((self.place, Stream.UPLOAD), made, "upload")
        there = TensorRef(made)
        self._queued_writes[there.key] = self._queued_writes.get(there.key, 0) + 1

        def work() -> None:
            self._queued_writes[there.key] -= 1
            target = there.tensor()
            if target is not None:
                target.copy_(staged)

        self._queues[self.place, Stream.UPLOAD].append(work)
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
        self.synchronize()
        if buffer.numel() and self.registered.pop(buffer.data_ptr(), None) is None:
            self.order.reports.append(f"{buffer.nbytes} bytes that are not page-locked were given back as if they were")

    def _follow(self, tensor: Tensor, block: Block) -> None:
        storage = tensor.untyped_storage()
        key, address = storage._cdata, storage.data_ptr()
        taken = block.owner, -(-storage.nbytes() // _GRAIN) * _GRAIN

        def gone(_: object) -> None:
            del self._blocks[key], self._storages[key]
            if block.owner is not _HOST:
                self.order.free(block)
                self._spare[taken] += 1
            elif self.registered.pop(address, None) is not None:
                self.order.reports.append(f"{block.what} was dropped and is still page-locked")

        self._blocks[key] = block
        self._storages[key] = weakref.ref(storage, gone)

    def _block(self, tensor: Tensor) -> Block | None:
        return self._blocks.get(tensor.untyped_storage()._cdata)

    def _is_host(self, tensor: Tensor) -> bool:
        block = self._block(tensor)
        return block is not None and block.owner is _HOST

    # ---- operations

    def perform(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operation of the calling thread."""
        who = self._here.who
        if not self._here.watched or self._here.aside:
            return func(*args, **kwargs)
        with self._lock:
            self._maybe_pass()
            places = self._places(func, args, kwargs)
            if places and (func is _COPY if who is _HOST else who[1] is Stream.COMPUTE):
                # It runs where its operands are; the host's copies are the engine's answer to a look.
                who = places[0], Stream.COMPUTE
                if len(set(places)) > 1:
                    self.order.reports.append(f"{func} takes operands on devices {sorted(set(places))}")
            if func is _COPY and who is not _HOST and self._is_host(args[0]) != self._is_host(args[1]):
                if args[2] if len(args) > 2 else kwargs.get("non_blocking", False):
                    return self._copy_late(who, args[0], args[1])
                self._synchronize(who)
            if who is not _HOST and who[1] is Stream.PEER and not func.is_view:
                if func is _TO_COPY and places and places[0] != who[0]:
                    with self._here.unwatched():
                        made = poisoned(func(*args, **kwargs))
                    self._own(who, made, str(func))
                    return self._copy_late(who, made, args[0])
                self.pass_to(who, len(self._queues[who]))  # done at once, but not before what it waits for
        result = func(*args, **kwargs)
        if not func.is_view:
            with self._lock:
                self._note(who, func, args, kwargs, result)
        return result

    def _places(self, func: Any, args: Any, kwargs: Any) -> list[int]:
        """Return the devices of the operands."""
        blocks = [self._block(tensor) for tensor, _ in operands(func, args, kwargs)]
        return [block.owner[0] for block in blocks if block is not None and block.owner is not _HOST]

    def _own(self, who: Who, tensor: Tensor, name: str) -> None:
        """Note that `tensor` is new, in memory of the stream `who`."""
        what = f"{tuple(tensor.shape)} of {name} on {name_of(who)}"
        self._take(who, tensor.untyped_storage().nbytes(), what)
        block = self.order.allocate(who, what)
        self._follow(tensor, block)
        self.order.access(who, block, True, name)

    def _synchronize(self, who: Who) -> None:
        with self._lock:
            _LateEvent(self, who, len(self._queues[who]), self.order.snapshot(who)).synchronize()

    def _note(self, who: Who, func: Any, args: Any, kwargs: Any, result: Any) -> None:
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
            self._synchronize(who)
        for tensor in tensors_in(result):
            key = tensor.untyped_storage()._cdata
            if key in known or key in self._blocks:
                continue
            if empty:
                poisoned(tensor)
            if who is not _HOST:
                self._own(who, tensor, name)

    def _copy_late(self, who: Who, target: Tensor, source: Tensor) -> Tensor:
        """Queues a copy between the device and page-locked memory, or another device."""
        out = self._is_host(target)
        for tensor, write in ((source, False), (target, True)):
            block = self._block(tensor)
            if block is not None:
                self.order.access(who, block, write, "a copy")
        there, here = TensorRef(target), TensorRef(source)
        with self._here.unwatched():
            filled = not self._queued_writes.get(here.key)
            seen = source.detach().clone() if filled else None
            computes = who is not _HOST and who[1] is Stream.COMPUTE
            if computes:
                if out:  # kernels go on and change the source: the copy is what it was
                    source = source.detach().clone()
                else:
                    target.detach().copy_(source)
            in_use = self._queued_writes.get(there.key) or self._queued_reads.get(there.key)
            if out and not in_use and target.is_floating_point():  # else events order this copy after those
                target.detach().fill_(float("nan"))
        self._queued_writes[there.key] = self._queued_writes.get(there.key, 0) + 1
        self._queued_reads[here.key] = self._queued_reads.get(here.key, 0) + 1
        kept = source if computes and out else None

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
        elif seen is not None and not same_bits(seen, source):
            self.order.reports.append(f"the source of a copy ({direction}) was overwritten before it ran")
        if target is None:
            if out:  # memory of the device that was given back in order may be written to the end
                self.order.reports.append(f"the target of a copy ({direction}) was freed before it ran")
        elif source is None:
            poisoned(target)
        elif out or not done:
            target.copy_(source)


class _LateEvent:
    def __init__(self, device: LateDevice, who: Who, position: int, clock: Clock) -> None:
        self._device = device
        self.who = who
        self.position = position
        self.clock = clock

    def synchronize(self) -> None:
        if threading.current_thread().name != _UPDATES:
            self._device._wasted(f"the host waits for {name_of(self.who)}")
        with self._device._lock:
            self._device.pass_to(self.who, self.position)
            self._device.order.join(_HOST, self.clock)

    def query(self) -> bool:
        with self._device._lock:
            return self._device._done[self.who] >= self.position


class _ThreadState(threading.local):
    """State of the calling thread."""

    def __init__(self) -> None:
        self.who: Who = (0, Stream.COMPUTE)
        self.watched = False
        self.aside = 0

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        self.aside += 1
        try:
            with torch.no_grad():
                yield
        finally:
            self.aside -= 1


class _Watch(TorchDispatchMode):
    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._device.perform(func, args, kwargs or {})
