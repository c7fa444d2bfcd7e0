"""Gradients on the host: the buffers that packs' gradients are swapped out into, and what waits there for its update.

With updates as early as possible, a transfer lives until the host optimizer has used it, and a few buffers serve all
packs in turn. With updates deferred until the norm is known, every pack keeps one of its own. Either way, norms of
gradients that are all there when they leave are taken on the device, and travel behind them.
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
from harmony_ds.offload.gradient_sums import GradientSums
from harmony_ds.offload.host_buffers import HostBuffer, HostBuffers
from harmony_ds.offload.layout import layout_of
from harmony_ds.offload.ledger import Kind, Ledger
from harmony_ds.parallel import SingleProcess, World
from harmony_ds.parallel.slots import HostSum

_ALONE = SingleProcess()
_NORMS_BYTES = 2**16
"""Of the norms of one pack's gradients, as a rule."""


@dataclass(slots=True, eq=False)
class GradientTransfer:
    """The gradients of one pack on the host, valid once `arrived` has passed.

    Attributes:
        gradients: by canonical name, in the accumulation dtype; a name goes when its gradient has been used.
        buffer: what they lie in; None if that is not the engine's.
        norms: of those that were measured before they left, as long as nothing has been added to them.
    """

    gradients: dict[str, Tensor]
    arrived: Event
    buffer: HostBuffer | None
    norms: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PostedGradients:
    """What this process has left for all others to add up.

    Attributes:
        elements: of the memory where they are, for every parameter that could have a gradient.
        here: the parameters that have one.
        arrived: behind the copies.
    """

    elements: Mapping[str, slice]
    here: tuple[str, ...]
    arrived: Event


class HostGradients(GradientSums):
    """Swaps gradients out, and adds up what transfers carry."""

    def __init__(
        self,
        device: Device,
        ledger: Ledger,
        dtype: torch.dtype,
        limit: int | None,
        trains: Callable[[str], bool],
        world: SingleProcess = _ALONE,
    ) -> None:
        """`limit` transfers at most are kept at a time (None: any number)."""
        super().__init__(trains, world)
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
        """Of all buffers, in use or not."""
        return self._buffers.nbytes + self.world.slot_bytes

    def reserve(self, packs: Sequence[int], extra: int) -> None:
        """Page-locks what steps take that send such `packs` (bytes each); `extra` as in `swap_out`.

        Otherwise a step would do so that happens to keep more of them at one time than any before, its host being slow.
        """
        if self._limit is not None:
            most = self._limit + extra
            sizes = [self._room(nbytes) for nbytes in packs]
            self._buffers.reserve(sizes if len(sizes) <= most else [max(sizes)] * most)

    def _room(self, nbytes: int) -> int:
        """Of a buffer for gradients of so many bytes, and for the norms behind them that the device may have taken."""
        return nbytes + (_NORMS_BYTES if self._takes_norms else 0)

    @property
    def _takes_norms(self) -> bool:
        """Whether the device can: the host would have to read gradients again, and this process's are all there are."""
        return self._device.copies_overlap and self.world.size == 1

    def norms_of(self, gradients: Mapping[str, Tensor]) -> Tensor | None:
        """On the device, behind what the compute stream has done to them; None if that is left to the host."""
        if not gradients or not self._takes_norms:
            return None
        return torch.stack(torch._foreach_norm(list(gradients.values()), 2, dtype=torch.float32))

    def swap_out(
        self,
        gradients: dict[str, Tensor],
        extra: int | None,
        behind: Stream = Stream.COMPUTE,
        norms: Tensor | None = None,
    ) -> GradientTransfer:
        """Issues the copies of a pack's gradients to the host, behind what the stream `behind` does to them.

        Waits while as many transfers are kept as may be, and `extra` more for those that wait for something else than
        their update (None: any number). `norms`: of `norms_of`; they and `gradients` are kept by the caller meanwhile.
        """
        device = self._device
        places, numel = layout_of(gradients, self._dtype.itemsize)
        nbytes = numel * self._dtype.itemsize
        device.wait(Stream.SWAP_OUT, device.record(behind))
        room = max(self._room(nbytes), nbytes + (0 if norms is None else norms.nbytes))
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
                self._ledger.book_out(Kind.RESIDENT, norms.nbytes)
        self._ledger.book_out(Kind.GRADIENTS, nbytes)
        return GradientTransfer(on_host, device.record(Stream.SWAP_OUT), buffer, taken)

    def reserve_slots(self, packs: int, nbytes: int) -> None:
        """Has what steps take that reduce gradients on the host: of so many packs at a time, of `nbytes` at most."""
        assert isinstance(self.world, World)
        self.world.make_slots(self._device, packs, nbytes)

    def post(
        self, gradients: dict[str, Tensor], like: Mapping[str, Tensor], check: Callable[[], None]
    ) -> PostedGradients:
        """Issues the copies of a pack's gradients to where all processes see them. `like`: all that it could have.

        `check` raises what has ended the thread of the updates.
        """
        assert isinstance(self.world, World)
        device, places = self._device, layout_of(like, self._dtype.itemsize)[0]
        slot = self.world.begin_on_host(check).view(self._dtype)
        device.wait(Stream.SWAP_OUT, device.record(Stream.COMPUTE))
        with torch.no_grad(), device.on(Stream.SWAP_OUT):
            for name, gradient in gradients.items():
                places[name].view(slot).copy_(gradient, non_blocking=True)
        nbytes = sum(slab_bytes(gradient.numel(), self._dtype.itemsize) for gradient in gradients.values())
        self._ledger.book_out(Kind.GRADIENTS, nbytes)
        elements = {name: slice(place.start, place.start + place.shape.numel()) for name, place in places.items()}
        return PostedGradients(elements, tuple(gradients), device.record(Stream.SWAP_OUT))

    def reduce_posted(
        self, kind: str, left: PostedGradients, extra: int | None
    ) -> tuple[GradientTransfer, Callable[[], None]]:
        """This process's pieces of the means of what all have left, as `swap_out` would have brought them, and what
        writes them: to be run by the thread of the updates, before it uses them.
        """
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
        """The same, given back where copies into it fail."""
        buffer = self._take(nbytes, extra)
        try:
            yield buffer
        except BaseException:
            self._give_back(buffer, self._device.record(Stream.SWAP_OUT))
            raise

    def stop_waiting(self) -> None:
        """Let nobody wait for room from now on: the update thread has failed, and releases no transfer any more."""
        with self._released:
            self._limit = None
            self._released.notify_all()

    def on_host(self, gradients: Mapping[str, Tensor]) -> GradientTransfer:
        """What is on the host already, such as the gradients of a penalty that the user's loss adds."""
        converted = {name: gradient.to(self._dtype).contiguous() for name, gradient in gradients.items()}
        return GradientTransfer(converted, self._device.record(Stream.COMPUTE), None)

    def add(self, transfer: GradientTransfer) -> tuple[str, ...]:
        """Takes a transfer over; returns the parameters that now have several."""
        if not transfer.gradients:  # no micro-batch came through that pack
            self._release(transfer)
        several = tuple(name for name in transfer.gradients if name in self._transfers)
        self._received.update(transfer.gradients)
        for name in transfer.gradients:
            self._transfers.setdefault(name, []).append(transfer)
        return several

    # ---- called by the update thread

    def wait_arrived(self, names: Iterable[str]) -> None:
        """Waits for all that carries a gradient of `names`."""
        for name in names:
            for transfer in self._transfers.get(name, ()):
                transfer.arrived.synchronize()

    def _norm_of(self, name: str, total: Tensor) -> Tensor:
        # Whoever asks for the second time may have changed the gradient.
        norm = self._transfers[name][0].norms.pop(name, None)
        return super()._norm_of(name, total) if norm is None else norm.clone()

    def gradient(self, name: str) -> Tensor | None:
        """What transfers carry is added up in their order of arrival, in the first one."""
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
            self._give_back(transfer.buffer, transfer.arrived)

    def _give_back(self, buffer: HostBuffer, done: Event) -> None:
        self._buffers.release(buffer, done)
        with self._released:
            self._kept -= 1
            self._released.notify_all()

    def destroy(self) -> None:
        """Gives every buffer back, also those of transfers that nobody will use."""
        self._buffers.destroy()
