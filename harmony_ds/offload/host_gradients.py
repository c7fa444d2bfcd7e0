"""Gradients on the host: the buffers that packs' gradients are swapped out into, and what waits there for its update.

With updates as early as possible, a transfer lives until the host optimizer has used it, and a few buffers serve all
packs in turn. With updates deferred until the norm is known, every pack keeps one of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harmony_ds.device.base import Device, Event, Stream
from harmony_ds.offload.gradient_sums import GradientSums
from harmony_ds.offload.host_buffers import HostBuffer, HostBuffers
from harmony_ds.offload.ledger import Kind, Ledger
from harmony_ds.offload.places import places_of
from harmony_ds.parallel import Alone

_ALONE = Alone()


@dataclass(slots=True, eq=False)
class GradientTransfer:
    """The gradients of one pack on the host, valid once `arrived` has passed.

    Attributes:
        gradients: by canonical name, in the accumulation dtype; a name goes when its gradient has been used.
        buffer: what they lie in; None if that is not the engine's.
    """

    gradients: dict[str, Tensor]
    arrived: Event
    buffer: HostBuffer | None


class HostGradients(GradientSums):
    """Swaps gradients out, and adds up what transfers carry."""

    def __init__(
        self,
        device: Device,
        ledger: Ledger,
        dtype: torch.dtype,
        limit: int | None,
        trains: Callable[[str], bool],
        world: Alone = _ALONE,
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
        return self._buffers.nbytes

    def reserve(self, packs: Sequence[int], beyond: int) -> None:
        """Page-locks what steps take that send such `packs` (bytes each); `beyond` as in `swap_out`.

        Otherwise a step would do so that happens to keep more of them at one time than any before, its host being slow.
        """
        if self._limit is not None:
            most = self._limit + beyond
            self._buffers.reserve(list(packs) if len(packs) <= most else [max(packs)] * most)

    def swap_out(
        self, gradients: dict[str, Tensor], beyond: int | None, behind: Stream = Stream.COMPUTE
    ) -> GradientTransfer:
        """Issues the copies of a pack's gradients to the host, behind what the stream `behind` does to them.

        Waits while as many transfers are kept as may be, and `beyond` more for those that wait for something else than
        their update (None: any number).
        """
        with self._released:
            if self._limit is not None and beyond is not None:
                most = self._limit + beyond
                self._released.wait_for(lambda: self._kept < most)
            self._kept += 1
        device = self._device
        places, numel = places_of(gradients, self._dtype.itemsize)
        buffer = self._buffers.take(self, numel * self._dtype.itemsize)
        memory = buffer.memory.view(self._dtype)
        on_host = {name: place.view(memory) for name, place in places.items()}
        device.wait(Stream.SWAP_OUT, device.record(behind))
        with torch.no_grad(), device.on(Stream.SWAP_OUT):
            for name, gradient in gradients.items():
                on_host[name].copy_(gradient, non_blocking=True)
        self._ledger.book_out(Kind.GRADIENTS, numel * self._dtype.itemsize)
        return GradientTransfer(on_host, device.record(Stream.SWAP_OUT), buffer)

    def on_host(self, gradients: Mapping[str, Tensor]) -> GradientTransfer:
        """What is on the host already, such as the gradients of a penalty that the user's loss adds."""
        converted = {name: gradient.to(self._dtype).contiguous() for name, gradient in gradients.items()}
        return GradientTransfer(converted, self._device.record(Stream.COMPUTE), None)

    def add(self, transfer: GradientTransfer) -> tuple[str, ...]:
        """Takes a transfer over; returns the parameters that now have several."""
        if not transfer.gradients:  # no micro-batch came through that pack
            self._release(transfer)
        several = tuple(name for name in transfer.gradients if name in self._transfers)
        self._came.update(transfer.gradients)
        for name in transfer.gradients:
            self._transfers.setdefault(name, []).append(transfer)
        return several

    # ---- called by the update thread

    def arrive(self, names: Iterable[str]) -> None:
        """Waits for all that carries a gradient of `names`."""
        for name in names:
            for transfer in self._transfers.get(name, ()):
                transfer.arrived.synchronize()

    def gradient(self, name: str) -> Tensor | None:
        """What transfers carry is added up in their order of arrival, in the first one."""
        transfers = self._transfers.get(name)
        if not transfers:
            return None
        self.arrive((name,))
        total = transfers[0].gradients[name]
        while len(transfers) > 1:
            later = transfers.pop(1)
            total.add_(later.gradients[name])
            self._used(name, later)
        return total

    def forget_gradients(self, names: Iterable[str] | None = None) -> None:
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
            self._buffers.give_back(transfer.buffer, transfer.arrived)
            with self._released:
                self._kept -= 1
                self._released.notify_all()

    def destroy(self) -> None:
        """Gives every buffer back, also those of transfers that nobody will use."""
        self._buffers.destroy()
