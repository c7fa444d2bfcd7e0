"""Gradients on the host: slabs that packs' gradients are swapped out into, and the deliveries that lie in them.

With updates as early as possible, a delivery lives until the host optimizer has used it, and a few slabs serve all
packs in turn. With updates deferred until the norm is known, every pack keeps a slab of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harmony_ds.decomposer.graph import slab_bytes
from harmony_ds.device.base import Device, Event, Stream
from harmony_ds.offload.ledger import Kind, Ledger


@dataclass(slots=True, eq=False)
class Delivery:
    """The gradients of one pack on the host, valid once `arrived` has passed.

    Attributes:
        gradients: by canonical name, in the accumulation dtype; a name goes when its gradient has been used.
        slab: what they lie in; None if that is not the engine's.
    """

    gradients: dict[str, Tensor]
    arrived: Event
    slab: Tensor | None


class HostGradients:
    """Hands out slabs and fills them."""

    def __init__(self, device: Device, ledger: Ledger, dtype: torch.dtype, limit: int | None) -> None:
        """`limit` slabs at most are handed out at a time (None: any number)."""
        self._device = device
        self._ledger = ledger
        self._dtype = dtype
        self._limit = limit
        self._slabs: list[Tensor] = []
        self._spare: list[Tensor] = []
        self._out = 0
        self._freed = threading.Condition()

    @property
    def host_bytes(self) -> int:
        """Of all slabs, handed out or not."""
        return sum(slab.numel() * slab.element_size() for slab in list(self._slabs))

    def swap_out(self, gradients: dict[str, Tensor], beyond: int | None) -> Delivery:
        """Issues the copies of a pack's gradients to the host, behind what the compute stream does to them.

        Waits for a slab while all are in use, and `beyond` more for deliveries that wait for something else than their
        update (None: any number).
        """
        device = self._device
        counts = {
            name: slab_bytes(g.numel(), self._dtype.itemsize) // self._dtype.itemsize for name, g in gradients.items()
        }
        slab = self._acquire(sum(counts.values()), beyond)
        device.wait(Stream.SWAP_OUT, device.record(Stream.COMPUTE))
        views: dict[str, Tensor] = {}
        offset = 0
        with torch.no_grad(), device.on(Stream.SWAP_OUT):
            for name, gradient in gradients.items():
                view = slab[offset : offset + gradient.numel()].view(gradient.shape)
                view.copy_(gradient, non_blocking=True)
                views[name] = view
                offset += counts[name]
                self._ledger.book_out(Kind.GRADIENTS, counts[name] * self._dtype.itemsize)
        return Delivery(views, device.record(Stream.SWAP_OUT), slab)

    def on_host(self, gradients: Mapping[str, Tensor]) -> Delivery:
        """A delivery of what is on the host already, such as the gradients of a penalty that the user's loss adds."""
        there = {name: gradient.to(self._dtype).contiguous() for name, gradient in gradients.items()}
        return Delivery(there, self._device.record(Stream.COMPUTE), None)

    def _acquire(self, numel: int, beyond: int | None) -> Tensor:
        with self._freed:
            if self._limit is not None and beyond is not None:
                most = self._limit + beyond
                self._freed.wait_for(lambda: self._out < most)
            fitting = [slab for slab in self._spare if slab.numel() >= numel]
            if fitting:
                best = min(fitting, key=Tensor.numel)
                self._spare = [slab for slab in self._spare if slab is not best]
                self._out += 1
                return best
            if self._spare and self._limit is not None:
                self._forget(self._spare.pop())  # too small for this pack: a larger one takes its place
        slab = self._device.host_empty(numel, self._dtype)
        with self._freed:
            self._slabs.append(slab)
            self._out += 1
        return slab

    def release(self, delivery: Delivery) -> None:
        """Nothing of `delivery` is needed any more; called from the update thread."""
        if delivery.slab is None:
            return
        with self._freed:
            self._out -= 1
            self._spare.append(delivery.slab)
            self._freed.notify_all()

    def _forget(self, slab: Tensor) -> None:
        self._slabs = [known for known in self._slabs if known is not slab]
        self._device.host_free(slab)

    def destroy(self) -> None:
        """Gives every slab back, also those of deliveries that nobody will use."""
        with self._freed:
            self._spare.clear()
            while self._slabs:
                self._forget(self._slabs[-1])
