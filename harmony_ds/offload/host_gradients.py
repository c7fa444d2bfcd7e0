"""Gradients on the host: swapped out into buffers, where they wait for their update.

With immediate updates, a transfer lives until the host optimizer has used it, and a few buffers serve all packs in turn.
With updates deferred until the norm is known, every pack keeps one. Norms of gradients that are complete when they leave
are computed on the device, and sent after them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harmony_ds.decomposer.graph import slab_bytes
from harmony_ds.device.base import Device, Event, Stream
from harmony_ds.distributed import ALONE, SingleProcess, World
from harmony_ds.distributed.slots import HostSum
from harmony_ds.offload.gradient_sums import GradientSums
from harmony_ds.offload.host_buffers import HostBuffer, HostBuffers
from harmony_ds.offload.layout import layout_of
from harmony_ds.offload.ledger import Ledger, TrafficKind

_NORMS_BYTES = 2**16
"""Room for the norms of one pack's gradients, which is usually enough."""


@dataclass(slots=True, eq=False)
class GradientTransfer:
    """The gradients of one pack on the host, valid once `arrived` has passed.

    Attributes:
        gradients: by canonical name, in the accumulation dtype; each is removed when it has been used.
        buffer: that they are in; None: their memory is not the engine's.
        norms: computed on the device, of gradients that nothing has been added to since.
    """

    gradients: dict[str, Tensor]
    arrived: Event
    buffer: HostBuffer | None
    norms: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PostedGradients:
    """Gradients that this process has copied to shared memory, for all to add up.

    Attributes:
        elements: of that memory, for every parameter that could have a gradient.
        here: the parameters that have one.
        arrived: event after the copies.
    """

    elements: Mapping[str, slice]
    here: tuple[str, ...]
    arrived: Event


class HostGradients(GradientSums):
    """Swaps gradients out, and adds up those of several transfers."""

    def __init__(
        self,
        device: Device,
        ledger: Ledger,
        dtype: torch.dtype,
        limit: int | None,
        trains: Callable[[str], bool],
        world: SingleProcess = ALONE,
        casts: Tensor | None = None,
    ) -> None:
        """Begin without buffers.

        Args:
            dtype: of the gradients that wait.
            limit: the most transfers kept at a time (None: any number).
            casts: a flat buffer in the dtype of the parameters that the optimizer steps, which has room for the largest
                (None: they have `dtype`).
        """
        super().__init__(trains, world)
        self.casts = casts
        self._device = device
        self._ledger = ledger
        self._dtype = dtype
        self._limit = limit
        self._buffers = HostBuffers(device, exact=True)
        self._transfers: dict[str, list[GradientTransfer]] = {}  # that carry a gradient, by parameter
        self._kept = 0
        self._released = threading.Condition()

    @property
    def host_bytes(self) -> int:
        """Bytes of all buffers, in use or not."""
        return self._buffers.nbytes + self.world.slot_bytes

    def reserve(self, packs: Sequence[int], extra: int) -> None:
        """Page-lock all buffers that steps with such `packs` (bytes each) may need; `extra` as in `swap_out`.

        These are as many of the largest pack's size as there may be transfers, or one for each pack where that is less.
        """
        limit = self._limit  # None from one moment to the next, when the update thread has failed
        if limit is not None:
            own = [self._room(nbytes) for nbytes in packs]
            largest = [max(own)] * (limit + extra)
            self._buffers.reserve(own if sum(own) <= sum(largest) else largest)

    def _room(self, nbytes: int) -> int:
        """Return the bytes of a buffer for gradients of `nbytes`, and for their norms if the device computes them."""
        return nbytes + (_NORMS_BYTES if self._takes_norms else 0)

    @property
    def _takes_norms(self) -> bool:
        """Whether the device computes norms: it saves the host a pass over them, but needs the sum of all processes."""
        return self._device.copies_overlap and self.world.size == 1

    def norms_of(self, gradients: Mapping[str, Tensor]) -> Tensor | None:
        """Compute the norms on the device's compute stream; None: the host computes them."""
        if not gradients or not self._takes_norms:
            return None
        return torch.stack(torch._foreach_norm(list(gradients.values()), 2, dtype=torch.float32))

    def swap_out(
        self,
        gradients: dict[str, Tensor],
        extra: int | None,
        after: Stream = Stream.COMPUTE,
        norms: Tensor | None = None,
        pack_bytes: int = 0,
    ) -> GradientTransfer:
        """Issue the copies of a pack's gradients to the host, after the work of the stream `after`.

        Waits while the limit of transfers is reached. The caller keeps `gradients` and `norms` until they have arrived.

        Args:
            extra: raises the limit, by transfers that do not wait for an update (None: no limit).
            norms: of `norms_of`.
            pack_bytes: those of all gradients that the pack may have: its buffer is reserved for these, and one for fewer
                may be another pack's.
        """
        device = self._device
        places, numel = layout_of(gradients, self._dtype.itemsize)
        nbytes = numel * self._dtype.itemsize
        device.wait(Stream.SWAP_OUT, device.record(after))
        room = max(self._room(max(nbytes, pack_bytes)), nbytes + (0 if norms is None else norms.nbytes))
        with self._buffer_for(room, extra) as buffer, torch.no_grad(), device.on(Stream.SWAP_OUT):
            memory = buffer.memory[:nbytes].view(self._dtype)
            on_host = {name: place.view(memory) for name, place in places.items()}
            for name, gradient in gradients.items():
                on_host[name].copy_(gradient, non_blocking=True)
            taken: dict[str, Tensor] = {}
            if norms is not None:
                there = buffer.memory[nbytes : nbytes + norms.nbytes].view(norms.dtype)
                there.copy_(norms, non_blocking=True)
                taken = dict(zip(gradients, there.unbind(), strict=True))
                self._ledger.book_out(TrafficKind.RESIDENT, norms.nbytes)
        self._ledger.book_out(TrafficKind.GRADIENTS, nbytes)
        return GradientTransfer(on_host, device.record(Stream.SWAP_OUT), buffer, taken)

    def post(
        self, gradients: dict[str, Tensor], like: Mapping[str, Tensor], check: Callable[[], None]
    ) -> PostedGradients:
        """Copy a pack's gradients to shared memory. `like`: its parameters; `check`: see `GradientSlots.begin`."""
        assert isinstance(self.world, World)
        # Frozen ones too: other calls of the step may not have been made with them frozen.
        could = {name: leaf for name, leaf in like.items() if leaf.requires_grad or self._trains(name)}
        device, places = self._device, layout_of(could, self._dtype.itemsize)[0]
        slot = self.world.begin_on_host(check).view(self._dtype)
        device.wait(Stream.SWAP_OUT, device.record(Stream.COMPUTE))
        with torch.no_grad(), device.on(Stream.SWAP_OUT):
            for name, gradient in gradients.items():
                places[name].view(slot).copy_(gradient, non_blocking=True)
        nbytes = sum(slab_bytes(gradient.numel(), self._dtype.itemsize) for gradient in gradients.values())
        self._ledger.book_out(TrafficKind.GRADIENTS, nbytes)
        elements = {name: slice(place.start, place.start + place.shape.numel()) for name, place in places.items()}
        return PostedGradients(elements, tuple(gradients), device.record(Stream.SWAP_OUT))

    def reduce_posted(
        self, kind: str, left: PostedGradients, extra: int | None
    ) -> tuple[GradientTransfer, Callable[[], None]]:
        """Return a transfer of this process's pieces of the posted gradients' means, and a function that writes them."""
        assert isinstance(self.world, World)
        total: HostSum = self.world.reduce_on_host(kind, left.elements, left.here)
        sizes = {name: torch.Size([numel]) for name, numel in total.pieces.items()}
        places, numel = layout_of(sizes, self._dtype.itemsize)
        buffer = self._take(numel * self._dtype.itemsize, extra)
        memory = buffer.memory[: numel * self._dtype.itemsize].view(self._dtype)
        transfer = GradientTransfer({name: place.view(memory) for name, place in places.items()}, left.arrived, buffer)
        means = dict(transfer.gradients)

        def write() -> None:
            left.arrived.synchronize()
            total.write(means)

        return transfer, write

    def _take(self, nbytes: int, extra: int | None) -> HostBuffer:
        """Return a buffer for one more transfer, once there is room for it; `extra` as in `swap_out`."""
        with self._released:
            if extra is not None:
                self._released.wait_for(lambda: self._limit is None or self._kept < self._limit + extra)
            buffer = self._buffers.take(self, nbytes)
            self._kept += 1  # only now: a buffer that could not be allocated takes no room
        return buffer

    @contextmanager
    def _buffer_for(self, nbytes: int, extra: int | None) -> Iterator[HostBuffer]:
        """Return such a buffer, and release it if copies into it fail."""
        buffer = self._take(nbytes, extra)
        try:
            yield buffer
        except BaseException:
            self._release_buffer(buffer, self._device.record(Stream.SWAP_OUT))
            raise

    def stop_waiting(self) -> None:
        """Let nobody wait for room from now on: the update thread has failed, and releases no transfer any more."""
        with self._released:
            self._limit = None
            self._released.notify_all()

    def on_host(self, gradients: Mapping[str, Tensor]) -> GradientTransfer:
        """Wrap gradients that are on the host already, such as those of a penalty that the user's loss adds."""
        converted = {name: gradient.to(self._dtype).contiguous() for name, gradient in gradients.items()}
        return GradientTransfer(converted, self._device.record(Stream.COMPUTE), None)

    # ---- called by the update thread: what is kept for one update is not changed by gradients of the next

    def begin_thread(self) -> None:
        """Make the device the thread's current one: CUDA makes a context (half a GiB) on that, to wait for an event."""
        self._device.current_member().set_current()

    def add(self, transfer: GradientTransfer) -> tuple[str, ...]:
        """Keep a transfer until its gradients are used; return the parameters that now have several."""
        if not transfer.gradients:  # no micro-batch has passed that pack
            self._release(transfer)
        several = tuple(name for name in transfer.gradients if name in self._transfers)
        for name in transfer.gradients:
            self._transfers.setdefault(name, []).append(transfer)
        return several

    def wait_arrived(self, names: Iterable[str]) -> None:
        """Wait for all transfers that have a gradient of `names`."""
        for name in names:
            for transfer in self._transfers.get(name, ()):
                transfer.arrived.synchronize()

    def _norm_of(self, name: str, total: Tensor) -> Tensor:
        # Used once: the gradient may have changed before it is measured again.
        norm = self._transfers[name][0].norms.pop(name, None)
        return super()._norm_of(name, total) if norm is None else norm.clone()

    def gradient(self, name: str) -> Tensor | None:
        """Return the gradient of `name`: those of its transfers, added up in the order of arrival, in the first one."""
        transfers = self._transfers.get(name)
        if not transfers:
            return None
        self.wait_arrived((name,))
        total = transfers[0].gradients[name]
        while len(transfers) > 1:
            later = transfers.pop(1)
            transfers[0].norms.pop(name, None)
            total.add_(later.gradients[name])
            self._used(name, later)
        return total

    def for_update(
        self, names: Iterable[str], coefficient: Tensor | None, measured: bool
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the gradients of `names` for the optimizer; `coefficient` and `measured` as in `_scale`.

        They come all at once, or as many at a time as the buffer for casts has room for: use them before the next ones.
        """
        if self.casts is None:
            gradients = dict(self._trained(names))
            for name, gradient in gradients.items():
                self._scale(name, gradient, coefficient, measured)
            yield gradients
            return
        batch: dict[str, Tensor] = {}
        begin = 0  # of the next one in the buffer
        for name, total in self._trained(names):
            if begin + total.numel() > self.casts.numel():
                yield batch
                batch, begin = {}, 0
            gradient = self.casts[begin : begin + total.numel()].view(total.shape).copy_(total)
            self._scale(name, gradient, coefficient, measured)
            batch[name] = gradient
            begin += slab_bytes(total.numel(), gradient.element_size()) // gradient.element_size()
        yield batch

    def clear_gradients(self, names: Iterable[str] | None = None) -> None:
        if names is None:
            self.norms.clear()
        for name in tuple(self._transfers) if names is None else names:
            for transfer in self._transfers.pop(name, []):
                self._used(name, transfer)

    def _used(self, name: str, transfer: GradientTransfer) -> None:
        del transfer.gradients[name]
        if not transfer.gradients:
            self._release(transfer)

    def _release(self, transfer: GradientTransfer) -> None:
        if transfer.buffer is not None:
            self._release_buffer(transfer.buffer, transfer.arrived)

    def _release_buffer(self, buffer: HostBuffer, done: Event) -> None:
        self._buffers.release(buffer, done)
        with self._released:
            self._kept -= 1
            self._released.notify_all()

    def destroy(self) -> None:
        """Free every buffer, also those of unused transfers."""
        self._buffers.destroy()
