"""Inputs of layer calls, kept from forward to backward: on the device while they fit there, else on the host.

A tensor that several calls take (an encoder's output) is stashed once. Entries move between device and host as the plan
says; a tensor that something else still holds is freed on the device only when that lets go of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from harmony_ds.device.base import HOME, Device, Event, Stream
from harmony_ds.errors import ModelError
from harmony_ds.offload.host_buffers import HostBuffer, HostBuffers
from harmony_ds.offload.ledger import Kind, Ledger

_ENTRY = "_harmony_stash_entry"


class StashEntry:
    """One stashed tensor. Either `device_tensor` or `host_tensor` is set, or both while it moves."""

    __slots__ = ("__weakref__", "arrived", "buffer", "device_tensor", "host_tensor", "users", "version", "what")

    def __init__(self, tensor: Tensor, what: str) -> None:
        self.device_tensor: Tensor | None = tensor
        self.host_tensor: Tensor | None = None
        self.buffer: HostBuffer | None = None  # that the host tensor lies in
        self.arrived: Event | None = None
        self.users = 0
        self.version = tensor._version
        self.what = what

    @property
    def nbytes(self) -> int:
        tensor = self.device_tensor if self.device_tensor is not None else self.host_tensor
        return 0 if tensor is None else tensor.numel() * tensor.element_size()

    def check(self) -> None:
        """Raises ModelError if it has been changed in place on the device, so that a layer cannot be run again over it."""
        if self.device_tensor is not None and self.device_tensor._version != self.version:
            raise ModelError(
                f"the input of layer {self.what} was changed in place after the layer was called, so it cannot be "
                "recomputed. Make the operation out of place (x = x + y instead of x += y), or let harmony.layers name "
                "the module around both."
            )


class Stash:
    """Puts, moves and releases entries."""

    def __init__(self, device: Device, ledger: Ledger) -> None:
        self._device = device
        self._ledger = ledger
        self._buffers = HostBuffers(device)
        self._leaving: defaultdict[int, list[tuple[Event, Tensor]]] = defaultdict(list)  # by device

    @property
    def host_bytes(self) -> int:
        """Of the buffers, in use or kept for the next step."""
        return self._buffers.nbytes

    def put(self, tensor: Tensor, what: str) -> StashEntry:
        """The entry of `tensor` (made at its first use); `what` names it in errors."""
        entry: StashEntry | None = getattr(tensor, _ENTRY, None)
        if entry is None or entry.device_tensor is None or entry.version != tensor._version:
            entry = StashEntry(tensor.detach(), what)
            setattr(tensor, _ENTRY, entry)
        entry.users += 1
        return entry

    def swap_out(self, entries: Iterable[StashEntry]) -> None:
        """Issues the copies to the host. The device tensors go when the next ones move, so that compute never waits."""
        device = self._device
        self._let_go()
        device.wait(Stream.SWAP_OUT, device.record(Stream.COMPUTE))
        for entry in entries:
            tensor = entry.device_tensor
            if tensor is None:
                continue
            entry.check()
            if entry.host_tensor is None:
                entry.buffer = self._buffers.take(entry, tensor.numel() * tensor.element_size())
                entry.host_tensor = self._copy_out(tensor, entry.buffer)
                entry.arrived = device.record(Stream.SWAP_OUT)
                self._leaving[device.number].append((entry.arrived, tensor))
            entry.device_tensor = None

    def _copy_out(self, tensor: Tensor, buffer: HostBuffer) -> Tensor:
        # Kernels round differently for other strides: they are part of what is stashed.
        strides = torch.empty_like(tensor, device="meta").stride()
        host = buffer.tensor(tensor.shape, strides, tensor.dtype)
        with torch.no_grad(), self._device.on(Stream.SWAP_OUT):
            host.copy_(tensor, non_blocking=True)
        self._ledger.book_out(Kind.ACTIVATIONS, tensor.numel() * tensor.element_size())
        return host

    def _let_go(self) -> None:
        for copied, _ in self._leaving.pop(self._device.number, ()):
            # Their memory belongs to the compute stream: its next owner there comes behind the copy.
            self._device.wait(Stream.COMPUTE, copied)

    def swap_in(self, entries: Iterable[StashEntry]) -> None:
        """Issues the copies back; `tensor` waits for them."""
        device = self._device
        self._let_go()
        for entry in entries:
            if entry.device_tensor is not None:
                continue
            host = entry.host_tensor
            assert host is not None, "a released stash entry was asked for"
            if entry.arrived is not None:
                device.wait(Stream.SWAP_IN, entry.arrived)
            with torch.no_grad(), device.on(Stream.SWAP_IN):
                tensor = torch.empty_like(host, device=device.torch_device)
                tensor.copy_(host, non_blocking=True)
            self._ledger.book_in(Kind.ACTIVATIONS, host.numel() * host.element_size())
            entry.device_tensor = tensor
            entry.version = tensor._version
            entry.arrived = device.record(Stream.SWAP_IN)

    def tensor(self, entry: StashEntry) -> Tensor:
        """The tensor on the device, ready for the compute stream; shares its memory with the entry."""
        if entry.device_tensor is None:
            self.swap_in([entry])
        tensor = entry.device_tensor
        assert tensor is not None
        if entry.arrived is not None:
            self._device.wait(Stream.COMPUTE, entry.arrived)
            entry.arrived = None
        entry.check()
        return tensor

    def release(self, entry: StashEntry) -> None:
        """One call is done with `entry`. The device copy goes, the host copy with the last user."""
        entry.users -= 1
        host = entry.host_tensor
        if host is not None:
            # Brought in by the swap-in stream, read by compute: free it behind the read.
            self._device.wait(Stream.SWAP_IN, self._device.record(Stream.COMPUTE))
            entry.device_tensor = None
        if entry.users == 0:
            entry.device_tensor = None
            if entry.buffer is not None:
                self._buffers.release(entry.buffer, self._device.record(Stream.SWAP_IN))
            entry.host_tensor = entry.buffer = None

    def abandon(self) -> None:
        """After a failed step: what is dropped from now on, on its way or not, is dropped behind its last use."""
        for number in range(self._device.count):
            self._device.enter(number)
            self._let_go()
            self._device.wait(Stream.COMPUTE, self._device.record(Stream.SWAP_OUT))
            self._device.wait(Stream.SWAP_IN, self._device.record(Stream.COMPUTE))
        self._device.enter(HOME)

    def destroy(self) -> None:
        """Gives the host buffers back."""
        self._buffers.destroy()
