"""Device copies of weights, and their gradients: who is on the device now.

A pack's weights are one device buffer, filled by the swap-in stream, with a leaf per parameter that a layer call is run
with. Gradients gather on those leaves (or beside them, in the accumulation dtype) until they are swapped out.

    swapped in     weights            from SWAP_IN to EVICT
    computing      weights, gradients of this pack
    swapped out    gradients          from SWAP_OUT to FREE_GRADIENTS, while the copy to the host is under way
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from harmony_ds.device.base import Device, Event, Stream
from harmony_ds.offload.host_store import HostStore
from harmony_ds.offload.ledger import Kind, Ledger


class DeviceCopy:
    """The parameters of one pack on the device.

    Attributes:
        leaves: by canonical name; autograd gathers each one's gradient of the running micro-batch in `.grad`.
        gradients: sums over micro-batches in the accumulation dtype, where that is not the leaf's own.
    """

    def __init__(self, buffer: Tensor, leaves: dict[str, nn.Parameter], arrived: Event) -> None:
        self.buffer = buffer
        self.leaves = leaves
        self.gradients: dict[str, Tensor] = {}
        self._arrived: Event | None = arrived

    def wait(self, device: Device) -> None:
        """Lets the compute stream wait for the swap-in, once."""
        if self._arrived is not None:
            device.wait(Stream.COMPUTE, self._arrived)
            self._arrived = None


class Residency:
    """Swaps packs in and out."""

    def __init__(self, device: Device, store: HostStore, ledger: Ledger, accumulation_dtype: torch.dtype) -> None:
        self._device = device
        self._store = store
        self._ledger = ledger
        self._accumulation_dtype = accumulation_dtype
        self._reading: Event | None = None  # behind the last copy out of host memory that may still be queued

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self._store.dtype

    @property
    def accumulates_in_place(self) -> bool:
        """Whether autograd's own addition into a leaf's `.grad` is the sum over micro-batches."""
        return self._accumulation_dtype == self._store.dtype

    def swap_in(self, names: Iterable[str], kind: Kind = Kind.WEIGHTS) -> DeviceCopy:
        """Issues the copies of `names` on the swap-in stream, booked as `kind`; nothing waits for them yet."""
        pieces = self._store.pieces(names)
        total = sum(piece.memory.numel() for piece in pieces)
        with torch.no_grad(), self._device.on(Stream.SWAP_IN):
            buffer = self._device.empty(total, self._store.dtype)
            views: dict[str, Tensor] = {}
            offset = 0
            for piece in pieces:
                target = buffer[offset : offset + piece.memory.numel()]
                target.copy_(piece.memory, non_blocking=True)
                self._ledger.book_in(kind, piece.memory.numel() * piece.memory.element_size())
                for name, start, place in piece.parameters:
                    views[name] = target[start : start + place.numel].view(place.shape)
                offset += piece.memory.numel()
        arrived = self._reading = self._device.record(Stream.SWAP_IN)
        leaves = {
            name: nn.Parameter(views[name], requires_grad=self._store.parameters[name].requires_grad) for name in views
        }
        return DeviceCopy(buffer, leaves, arrived)

    def finish_reads(self) -> None:
        """Waits until no swap-in reads host memory any more: afterwards it may be written."""
        if self._reading is not None:
            self._reading.synchronize()
            self._reading = None

    def accumulate(self, copy: DeviceCopy) -> None:
        """Adds what autograd left on the leaves to the sums, if those have another dtype than the leaves."""
        if self.accumulates_in_place:
            return
        for name, leaf in copy.leaves.items():
            if leaf.grad is None:
                continue
            known = copy.gradients.get(name)
            if known is None:
                copy.gradients[name] = leaf.grad.to(self._accumulation_dtype)
            else:
                known.add_(leaf.grad)
            leaf.grad = None

    def gradients(self, copy: DeviceCopy) -> dict[str, Tensor]:
        """The sums of all micro-batches so far, by name; a parameter that took no part in any has none."""
        if not self.accumulates_in_place:
            return copy.gradients
        return {name: leaf.grad for name, leaf in copy.leaves.items() if leaf.grad is not None}

    def gradient(self, copy: DeviceCopy, name: str) -> Tensor | None:
        """The sum of `name` alone."""
        if name not in copy.leaves:
            return None
        return copy.leaves[name].grad if self.accumulates_in_place else copy.gradients.get(name)

    def forget_gradient(self, copy: DeviceCopy, name: str) -> None:
        """Drops the sum of `name`, and what autograd left of the running micro-batch."""
        copy.gradients.pop(name, None)
        if name in copy.leaves:
            copy.leaves[name].grad = None

    def evict(self, copy: DeviceCopy) -> None:
        """Frees the weights once the compute stream is done with them."""
        done = self._device.record(Stream.COMPUTE)
        # The buffer belongs to the swap-in stream, which may reuse it only behind the last kernel that read it.
        self._device.wait(Stream.SWAP_IN, done)
        self._device.free(copy.buffer)
