"""Gradients on their way from the device to the host optimizer.

A pack's gradients take this way, once a step:

    1. leaf      autograd adds up each micro-batch's gradient on the pack's device copy (`device_copies`)
    2. sum       or in a tensor beside it, where gradients accumulate in another dtype than the weights'
    3. norm      computed on the device, if nothing will be added on the host (`norms_of`)
    4. copy      SWAP_OUT copies sums and norms to a page-locked host buffer (`swap_out`)
    5. deposit   the update thread keeps the transfer, and adds up those that share a parameter (`add`, `gradient`)
    6. cast      to the dtype of the masters, if that is another one, and scaled by clipping (`for_update`)
    7. update    the optimizer steps with them; then the buffer is free for another pack (`clear_gradients`)

With several processes, step 4 copies to memory that a server's processes share (`copy_to_slot`), and the update thread
adds up this process's pieces from there (`sum_slots`).

With immediate updates, a few buffers serve all packs in turn. With updates that wait for the norm, every pack keeps a
buffer until its update.

Each pack that uses a tied weight sends a gradient of it. The first comes from the pack that runs last in forward; the
others are added to it as they arrive (`gradient`), and the pack that owns the weight, whose gradient comes last, has it
updated (`Pack.owned`). Those of resident packs are added up by `ResidentPacks.gradient` in the same order.

Where the gradient of a parameter is, and who may read it there:

    place                       from                     until                 who reads it
    leaf.grad                   a backward pass (1)      SWAP_OUT, or (2)      autograd; the engine's thread
    DeviceCopy.gradients        the sum after it (2)     SWAP_OUT              the engine's thread
    DeviceCopy.earlier_sums     a shared loss begins     it ends               nobody: it goes back to the leaf
    these, of resident packs    a backward pass          UPDATE_ON_DEVICE      the engine's thread
    GradientTasks._reduced,     REDUCE                   SWAP_OUT              SWAP_OUT
      ._in_slots                SWAP_OUT                 REDUCE                REDUCE
    GradientTasks._leaving      SWAP_OUT (4)             FREE_GRADIENTS        the copies that are under way
    HostGradients._transfers    the deposit (5)          UPDATE (7)            the update thread; others ask it
    .grad on the host           the program's backward   SWAP_OUT, or UPDATE   the program (`UserGradients`)
    the same, while updated     UPDATE                   its end               the optimizer (`is_updating`)
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
from harmony_ds.distributed import SINGLE_PROCESS, SingleProcess, World
from harmony_ds.distributed.slots import HostSum
from harmony_ds.offload.gradient_sums import GradientSums
from harmony_ds.offload.host_buffers import HostBuffer, HostBuffers
from harmony_ds.offload.layout import Region, layout_of
from harmony_ds.offload.ledger import Ledger, TrafficKind

_NORMS_BYTES = 2**16
"""Room in each buffer for the norms of one pack's gradients; usually enough."""


@dataclass(slots=True, eq=False)
class GradientTransfer:
    """The gradients of one pack on the host, valid once `arrived` has passed.

    Attributes:
        gradients: by canonical name, in the accumulation dtype; each is removed when it has been used.
        arrived: event after the copies.
        buffer: the memory of the gradients; None: they are tensors of their own.
        norms: computed on the device, of gradients that nothing has been added to since.
    """

    gradients: dict[str, Tensor]
    arrived: Event
    buffer: HostBuffer | None
    norms: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SlotGradients:
    """One pack's gradients in a slot of this process (`distributed.slots`): each process adds up its pieces of all slots.

    Attributes:
        elements: the place in that memory of every parameter that could have a gradient.
        here: the parameters that this process has a gradient of.
        arrived: event after the copies.
    """

    elements: Mapping[str, slice]
    here: tuple[str, ...]
    arrived: Event


class HostGradients(GradientSums):
    """Gradients on the host, in page-locked buffers, from their swap-out to their update."""

    def __init__(
        self,
        device: Device,
        ledger: Ledger,
        dtype: torch.dtype,
        limit: int | None,
        trains: Callable[[str], bool],
        world: SingleProcess = SINGLE_PROCESS,
        casts: Tensor | None = None,
    ) -> None:
        """Begin without buffers.

        Args:
            dtype: the accumulation dtype, of gradients that wait.
            limit: the most transfers kept at a time (None: any number).
            trains, world: see `GradientSums`.
            casts: a flat buffer in the masters' dtype that the largest gradient fits in (None: masters have `dtype`).
        """
        super().__init__(trains, world)
        self.casts = casts
        self._device = device
        self._ledger = ledger
        self._dtype = dtype
        # By names and shapes of gradients: where they lie in a buffer, and how many elements it has.
        self._layouts: dict[tuple[tuple[str, torch.Size], ...], tuple[dict[str, Region], int]] = {}
        self._limit = limit
        self._buffers = HostBuffers(device, exact=True)
        self._transfers: dict[str, list[GradientTransfer]] = {}  # parameter -> transfers that have a gradient of it
        self._buffers_in_use = 0
        self._released = threading.Condition()  # notified when that decreases

    @property
    def host_bytes(self) -> int:
        """Bytes of all buffers, in use or not."""
        return self._buffers.nbytes + self.world.slot_bytes

    def reserve(self, packs: Sequence[int], extra: int) -> None:
        """Page-lock all buffers that steps may need, so that none is made during a step.

        These are as many of the largest pack's size as there may be transfers, or one for each pack if that takes less.

        Args:
            packs: bytes of gradients of each pack.
            extra: as in `swap_out`.
        """
        limit = self._limit  # read once: the update thread sets it to None when it fails
        if limit is not None:
            of_each_pack = [self._room(nbytes) for nbytes in packs]
            largest = [max(of_each_pack)] * (limit + extra)
            self._buffers.reserve(of_each_pack if sum(of_each_pack) <= sum(largest) else largest)

    def _room(self, nbytes: int) -> int:
        """Return the bytes of a buffer for gradients of `nbytes`, and for their norms, if the device computes these."""
        return nbytes + (_NORMS_BYTES if self._takes_norms else 0)

    @property
    def _takes_norms(self) -> bool:
        """Whether the device computes norms, which saves the host a pass over them; several processes have to sum first."""
        return self._device.copies_overlap and self.world.size == 1

    def norms_of(self, gradients: Mapping[str, Tensor]) -> Tensor | None:
        """Compute the norms of `gradients` on the device's compute stream; None: the host will compute them."""
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
        """Issue the copies of a pack's gradients to the host.

        Blocks while the limit of transfers is reached. The caller keeps `gradients` and `norms` until they have arrived.

        Args:
            extra: how many transfers the plan keeps on the host for a later update, which do not count against the limit;
                None: there is no limit.
            after: the stream whose work so far makes the gradients.
            norms: result of `norms_of`, or None.
            pack_bytes: bytes of all gradients that the pack can have. The buffer is chosen for so many, even if some
                parameters have no gradient now, so that each pack finds the buffer that `reserve` made for it.
        """
        device = self._device
        places, numel = self._layout_of(gradients)
        nbytes = numel * self._dtype.itemsize
        # The copies are to read finished sums.
        device.wait(Stream.SWAP_OUT, device.record(after))
        room = max(self._room(max(nbytes, pack_bytes)), nbytes + (0 if norms is None else norms.nbytes))
        with self._buffer_for(room, extra) as buffer, torch.no_grad(), device.on(Stream.SWAP_OUT):
            memory = buffer.memory[:nbytes].view(self._dtype)
            on_host = {name: place.view(memory) for name, place in places.items()}
            for name, gradient in gradients.items():
                on_host[name].copy_(gradient, non_blocking=True)
            norms_on_host: dict[str, Tensor] = {}
            if norms is not None:
                there = buffer.memory[nbytes : nbytes + norms.nbytes].view(norms.dtype)
                there.copy_(norms, non_blocking=True)
                norms_on_host = dict(zip(gradients, there.unbind(), strict=True))
                self._ledger.book_out(TrafficKind.RESIDENT, norms.nbytes)
        self._ledger.book_out(TrafficKind.GRADIENTS, nbytes)
        return GradientTransfer(on_host, device.record(Stream.SWAP_OUT), buffer, norms_on_host)

    def _layout_of(self, gradients: dict[str, Tensor]) -> tuple[dict[str, Region], int]:
        """Return where `gradients` lie in a buffer, and its number of elements: of a pack, the same in each step."""
        key = tuple([(name, gradient.shape) for name, gradient in gradients.items()])
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = layout_of(gradients, self._dtype.itemsize)
        return layout

    def copy_to_slot(
        self, gradients: dict[str, Tensor], leaves: Mapping[str, Tensor], check: Callable[[], None]
    ) -> SlotGradients:
        """Issue the copies of a pack's gradients to memory that the server's processes share.

        Args:
            leaves: the pack's parameters on the device.
            check: see `GradientSlots.begin`.
        """
        assert isinstance(self.world, World)
        # Trained parameters that are frozen now have a place, too: in other processes they may not be frozen in this step.
        could = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad or self._trains(name)}
        device, places = self._device, layout_of(could, self._dtype.itemsize)[0]
        slot = self.world.wait_free_slot(check).view(self._dtype)
        # The copies are to read finished sums.
        device.wait(Stream.SWAP_OUT, device.record(Stream.COMPUTE))
        with torch.no_grad(), device.on(Stream.SWAP_OUT):
            for name, gradient in gradients.items():
                places[name].view(slot).copy_(gradient, non_blocking=True)
        nbytes = sum(slab_bytes(gradient.numel(), self._dtype.itemsize) for gradient in gradients.values())
        self._ledger.book_out(TrafficKind.GRADIENTS, nbytes)
        elements = {name: slice(place.start, place.start + place.shape.numel()) for name, place in places.items()}
        return SlotGradients(elements, tuple(gradients), device.record(Stream.SWAP_OUT))

    def sum_slots(
        self, kind: str, in_slots: SlotGradients, extra: int | None
    ) -> tuple[GradientTransfer, Callable[[], None]]:
        """Return a transfer for this process's pieces of the gradients' means, and a function that computes them.

        Args:
            kind: what is summed, as all processes call it.
            extra: as in `swap_out`.
        """
        assert isinstance(self.world, World)
        total: HostSum = self.world.reduce_on_host(kind, in_slots.elements, in_slots.here)
        sizes = {name: torch.Size([numel]) for name, numel in total.pieces.items()}
        places, numel = layout_of(sizes, self._dtype.itemsize)
        buffer = self._acquire_buffer(numel * self._dtype.itemsize, extra)
        memory = buffer.memory[: numel * self._dtype.itemsize].view(self._dtype)
        pieces = {name: place.view(memory) for name, place in places.items()}
        transfer = GradientTransfer(pieces, in_slots.arrived, buffer)
        means = dict(pieces)

        def write() -> None:
            in_slots.arrived.synchronize()
            total.write(means)

        return transfer, write

    def _acquire_buffer(self, nbytes: int, extra: int | None) -> HostBuffer:
        """Wait until the limit admits another transfer, and return a buffer for it; `extra` as in `swap_out`."""
        with self._released:
            if extra is not None:
                self._released.wait_for(lambda: self._limit is None or self._buffers_in_use < self._limit + extra)
            buffer = self._buffers.acquire(self, nbytes)
            self._buffers_in_use += 1  # only now: a buffer that could not be allocated is none
        return buffer

    @contextmanager
    def _buffer_for(self, nbytes: int, extra: int | None) -> Iterator[HostBuffer]:
        """Acquire a buffer, and release it if the copies into it cannot be issued."""
        buffer = self._acquire_buffer(nbytes, extra)
        try:
            yield buffer
        except BaseException:
            self._release_buffer(buffer, self._device.record(Stream.SWAP_OUT))
            raise

    def stop_waiting(self) -> None:
        """Lift the limit of transfers: the update thread has failed, and will release none."""
        with self._released:
            self._limit = None
            self._released.notify_all()

    def wrap(self, gradients: Mapping[str, Tensor]) -> GradientTransfer:
        """Return a transfer of gradients that are on the host already, such as those of a penalty in the user's loss."""
        converted = {name: gradient.to(self._dtype).contiguous() for name, gradient in gradients.items()}
        return GradientTransfer(converted, self._device.record(Stream.COMPUTE), None)

    # ---- called by the update thread, which runs one job after the other: gradients of the next step come after an update

    def begin_thread(self) -> None:
        """Make the device the thread's current one. To wait for an event, CUDA makes a context (half a GiB) on that."""
        self._device.current_member().set_current()

    def add(self, transfer: GradientTransfer) -> tuple[str, ...]:
        """Keep a transfer until its gradients are used; return the parameters that several transfers have a gradient of."""
        if not transfer.gradients:  # no micro-batch has used the pack's parameters
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
        # The norm from the device is used once: the program may change the gradient before its norm is computed again.
        norm = self._transfers[name][0].norms.pop(name, None)
        return super()._norm_of(name, total) if norm is None else norm.clone()

    def gradient(self, name: str) -> Tensor | None:
        """Return the gradient of `name`: the first transfer's tensor, to which the others are added in order of arrival."""
        transfers = self._transfers.get(name)
        if not transfers:
            return None
        self.wait_arrived((name,))
        total = transfers[0].gradients[name]
        while len(transfers) > 1:
            later = transfers.pop(1)
            transfers[0].norms.pop(name, None)
            total.add_(later.gradients[name])
            self._remove(name, later)
        return total

    def for_update(
        self, names: Iterable[str], coefficient: Tensor | None, norms_known: bool
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the gradients of `names`, scaled and in the masters' dtype; `coefficient` and `norms_known` as in `_scale`.

        All are yielded at once, or as many at a time as the buffer for casts holds: these are overwritten by the next ones.
        """
        if self.casts is None:
            gradients = dict(self._trained(names))
            for name, gradient in gradients.items():
                self._scale(name, gradient, coefficient, norms_known)
            yield gradients
            return
        batch: dict[str, Tensor] = {}
        begin = 0  # of the next gradient in the buffer
        for name, total in self._trained(names):
            if begin + total.numel() > self.casts.numel():
                yield batch
                batch, begin = {}, 0
            gradient = self.casts[begin : begin + total.numel()].view(total.shape).copy_(total)
            self._scale(name, gradient, coefficient, norms_known)
            batch[name] = gradient
            begin += slab_bytes(total.numel(), gradient.element_size()) // gradient.element_size()
        yield batch

    def clear_gradients(self, names: Iterable[str] | None = None) -> None:
        if names is None:
            self.norms.clear()
        for name in tuple(self._transfers) if names is None else names:
            for transfer in self._transfers.pop(name, []):
                self._remove(name, transfer)

    def _remove(self, name: str, transfer: GradientTransfer) -> None:
        """Remove a gradient from a transfer, and release the transfer with its last one."""
        del transfer.gradients[name]
        if not transfer.gradients:
            self._release(transfer)

    def _release(self, transfer: GradientTransfer) -> None:
        if transfer.buffer is not None:
            self._release_buffer(transfer.buffer, transfer.arrived)

    def _release_buffer(self, buffer: HostBuffer, done: Event) -> None:
        self._buffers.release(buffer, done)
        with self._released:
            self._buffers_in_use -= 1
            self._released.notify_all()

    def destroy(self) -> None:
        """Free every buffer, also those of unused transfers."""
        self._buffers.destroy()
