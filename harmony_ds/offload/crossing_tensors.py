"""Crossing tensors, which a micro-batch holds between two packs: they leave the device, and come back for the next pack.

    forward     run through pack 0 | out ... in | run through pack 1        outputs of pack 0
    backward    run through pack 1 | out ... in | run through pack 0        gradients with respect to them

Tensors of the model's code stay what they are: they lose their memory while they are on the host (their size is 0 then),
and get new memory of the same strides and values. An input that a later call stashes leaves once: the stash takes over the
copy on the host.

Copies out run beside the next run of the device, after which their memory is free; copies in fill memory of the compute
stream, which must have done with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from harmony_ds.device.base import Device, Event, Stream
from harmony_ds.offload.ledger import Ledger, TrafficKind
from harmony_ds.offload.stash import HostCopy, Stash, StashEntry


class GradientHolder(Protocol):
    """What keeps the gradient of one tensor until it is propagated further."""

    gradient: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class CrossingMemory:
    """Memory of the model's code, and all tensors that have it: `whole`, which fills it, and `views` of that."""

    whole: Tensor
    views: list[Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where a tensor was in its memory."""

    tensor: Tensor
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor) -> _Place:
        return _Place(tensor, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


@dataclass(slots=True, eq=False, weakref_slot=True)
class _GradientOnHost:
    """A gradient that has left the device, and who keeps it."""

    holder: GradientHolder
    host: HostCopy | None = None


@dataclass(slots=True, eq=False)
class CrossingOnHost:
    """What one micro-batch has on the host between two packs.

    Attributes:
        values: stash entries with the copies on the host, and the places of their tensors.
        gradients: the gradients.
        left: event after the copies out.
        arrived: event after the copies back in; None: they have not been issued.
    """

    values: list[tuple[StashEntry, list[_Place]]] = field(default_factory=list)
    gradients: list[_GradientOnHost] = field(default_factory=list)
    left: Event | None = None
    arrived: Event | None = None


class CrossingTensors:
    """Moves what micro-batches hold between packs to the host and back."""

    def __init__(self, device: Device, ledger: Ledger, stash: Stash) -> None:
        self._device = device
        self._ledger = ledger
        self._stash = stash
        # Device number -> (event after the copy to the host, the tensor that is copied).
        self._leaving: defaultdict[int, list[tuple[Event, Tensor]]] = defaultdict(list)
        self._empty: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def swap_out(self, values: Iterable[CrossingMemory], holders: Iterable[GradientHolder]) -> CrossingOnHost:
        """Issue the copies to the host of `values`, and of the gradients of `holders`, which have none meanwhile."""
        device, held = self._device, CrossingOnHost()
        # The copies are to read what compute has finished.
        device.wait(Stream.SWAP_OUT, device.record(Stream.COMPUTE))
        leaving: list[Tensor] = []
        for value in values:
            entry, is_copied = self._stash.copy_for_crossing(value.whole)
            if is_copied:
                leaving.append(value.whole.detach())
            held.values.append((entry, [_Place.of(tensor) for tensor in (value.whole, *value.views)]))
            for tensor in (value.whole, *value.views):
                tensor.data = self._without_memory(tensor)
        for holder in holders:
            gradient = holder.gradient
            if gradient is None or not is_dense(gradient):
                continue
            on_host = _GradientOnHost(holder)
            on_host.host = self._stash.copy_out(on_host, gradient)
            held.gradients.append(on_host)
            leaving.append(gradient)
            holder.gradient = None
        held.left = device.record(Stream.SWAP_OUT)
        self._leaving[device.number] += [(held.left, tensor) for tensor in leaving]
        return held

    def _without_memory(self, tensor: Tensor) -> Tensor:
        key = tensor.dtype, tensor.device
        if key not in self._empty:
            self._empty[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return self._empty[key]

    def swap_in(self, held: CrossingOnHost) -> None:
        """Issue the copies back; `wait` waits for them."""
        device = self._device
        hosts = [entry.host for entry, _ in held.values] + [one.host for one in held.gradients]
        made = [torch.empty_like(host.tensor, device=device.torch_device) for host in hosts if host is not None]
        assert len(made) == len(hosts), "crossing tensors came back whose copy on the host was released"
        # The memory belongs to the compute stream, which may still use it for what had it before.
        device.wait(Stream.SWAP_IN, device.record(Stream.COMPUTE))
        if held.left is not None:
            # The host tensors are read only after the swap-out has written them.
            device.wait(Stream.SWAP_IN, held.left)
        for host, tensor in zip(hosts, made, strict=True):
            assert host is not None
            with torch.no_grad(), device.on(Stream.SWAP_IN):
                tensor.copy_(host.tensor, non_blocking=True)
            self._ledger.book_in(TrafficKind.ACTIVATIONS, tensor.nbytes)
        held.arrived = device.record(Stream.SWAP_IN)
        for tensor, (_, places) in zip(made, held.values, strict=False):
            for place in places:
                place.tensor.data = tensor.as_strided(place.shape, place.strides, place.offset)
        for tensor, on_host in zip(made[len(held.values) :], held.gradients, strict=True):
            if on_host.holder.gradient is not None:  # of a later backward pass of the program
                device.wait(Stream.COMPUTE, held.arrived)
                on_host.holder.gradient = tensor + on_host.holder.gradient
            else:
                on_host.holder.gradient = tensor
            assert on_host.host is not None
            self._stash.release_buffer(on_host.host.buffer, held.arrived)

    def wait(self, held: CrossingOnHost) -> None:
        """Let computing wait for what comes back; bring it back first if that has not been issued."""
        if held.arrived is None:
            self.swap_in(held)
        assert held.arrived is not None
        self._device.wait(Stream.COMPUTE, held.arrived)

    def free_leaving(self) -> None:
        """Free the device memory of what has left; to be called after the run under which the copies were issued."""
        for copied, _ in self._leaving.pop(self._device.number, ()):
            # The memory belongs to the compute stream, which may reuse it only after the copy.
            self._device.wait(Stream.COMPUTE, copied)

    def discard_leaving(self) -> None:
        """Discard copies under way after a failed step; to be called when the stash has ordered all streams."""
        self._leaving.clear()


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of `tensor` fill a piece of memory, so that a copy has the same strides."""
    if tensor.layout is not torch.strided or type(tensor) is not Tensor or tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()
