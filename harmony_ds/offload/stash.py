"""The stash: inputs of layer calls, kept from forward to backward, on the device or the host as the plan says.

Inputs that require no gradient (masks, position ids, rotary tables: small, and used by every layer) stay on the device.
A tensor that several calls use is stashed once. A tensor that was on the host between two packs (`crossing_tensors`) has
a copy there already, which its calls' stash takes over. Device memory of a tensor that something else still refers to is
freed only with its last reference.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harmony_ds.device.base import HOME, Device, Event, Stream
from harmony_ds.errors import ModelError
from harmony_ds.offload.host_buffers import HostBuffer, HostBuffers
from harmony_ds.offload.ledger import Ledger, TrafficKind

_ENTRY = "_harmony_stash_entry"


@dataclass(slots=True, eq=False)
class HostCopy:
    """The copy of a tensor on the host.

    Attributes:
        tensor: the copy, in the memory of `buffer`.
        left: event after the copy out.
        is_crossing: whether it is the copy of a crossing tensor, too, which comes back to the device without the stash.
        is_cut: whether slices of it have been copied to the device.
    """

    buffer: HostBuffer
    tensor: Tensor
    left: Event
    is_crossing: bool = False
    is_cut: bool = False


class StashEntry:
    """A stashed tensor, an input of a layer call. Where it is, `device_tensor`, `host` and `arrived` tell:

    device_tensor  host  arrived
    set            None  None     on the device alone
    None           set   set      on the host, and nothing has waited for the copy to it yet
    None           set   None     on the host
    set            set   set      on both, and nothing has waited for the copy to the device yet
    set            set   None     on both
    None           None  None     nowhere: no call will be recomputed with it

    Attributes:
        arrived: event after the last copy.
        stays: whether it stays on the device from forward to backward.
        users: how many layer calls will be recomputed with it.
        users_by_pack: of these, how many each pack has that a swap-in was issued for; first the pack that runs first.
        version: of the device tensor, by which a later write into it is found.
        layer: the name of the layer that it is an input of.
    """

    __slots__ = (
        "__weakref__",
        "arrived",
        "device_tensor",
        "host",
        "layer",
        "stays",
        "users",
        "users_by_pack",
        "version",
    )

    def __init__(self, tensor: Tensor, layer: str) -> None:
        self.device_tensor: Tensor | None = tensor.detach()
        self.host: HostCopy | None = None
        self.arrived: Event | None = None
        self.stays = not tensor.requires_grad
        self.users = 0
        self.users_by_pack: list[int] = []
        self.version = tensor._version
        self.layer = layer

    @property
    def host_tensor(self) -> Tensor | None:
        """The copy on the host; None: there is none."""
        return None if self.host is None else self.host.tensor

    @property
    def nbytes(self) -> int:
        tensor = self.host_tensor if self.device_tensor is None else self.device_tensor
        return 0 if tensor is None else tensor.numel() * tensor.element_size()

    def check(self) -> None:
        """Raise ModelError if the tensor was changed in place on the device, so that its layer cannot be recomputed."""
        if self.device_tensor is not None and self.device_tensor._version != self.version:
            raise ModelError(
                f"the input of layer {self.layer} was changed in place after the layer was called: it cannot be "
                "recomputed. Use an operation out of place (x = x + y), or let harmony.layers name the module around both."
            )


class Stash:
    """Store of the inputs of layer calls that will be recomputed."""

    def __init__(self, device: Device, ledger: Ledger) -> None:
        self._device = device
        self._ledger = ledger
        self._buffers = HostBuffers(device)
        # Device number -> (event after the copy to the host, the tensor that is copied).
        self._copies_out: defaultdict[int, list[tuple[Event, Tensor]]] = defaultdict(list)

    @property
    def host_bytes(self) -> int:
        return self._buffers.nbytes

    def put(self, tensor: Tensor, layer: str) -> StashEntry:
        """Return the entry of `tensor`, an input of `layer`; all layers that have it as an input share the entry."""
        entry: StashEntry | None = getattr(tensor, _ENTRY, None)
        if entry is None or entry.version != tensor._version:
            entry = StashEntry(tensor, layer)
            setattr(tensor, _ENTRY, entry)
        elif entry.device_tensor is None:
            if entry.host is not None and entry.host.is_crossing:  # it was on the host between two packs, and is back
                entry.device_tensor = tensor.detach()
            else:  # its calls have been recomputed, or wait on the host: it cannot be shared
                entry = StashEntry(tensor, layer)
                setattr(tensor, _ENTRY, entry)
        if not entry.users:
            entry.layer = layer
        entry.users += 1
        return entry

    def swap_out(self, entries: Iterable[StashEntry]) -> None:
        """Issue the copies to the host; device tensors are freed at the next swap, so that compute does not wait."""
        device = self._device
        self.free_copied()
        # The copies are to read what compute has finished.
        device.wait(Stream.SWAP_OUT, device.record(Stream.COMPUTE))
        for entry in entries:
            tensor = entry.device_tensor
            if tensor is None:
                continue
            entry.check()
            if entry.host is None:
                entry.host = self.copy_out(entry, tensor)
                entry.arrived = entry.host.left
                self._copies_out[device.number].append((entry.arrived, tensor))
            elif entry.arrived is not None:
                self._wait_for(entry.arrived, entry)
            entry.device_tensor = None

    def copy_for_crossing(self, tensor: Tensor) -> tuple[StashEntry, bool]:
        """Return the entry of a tensor that is to wait on the host between two packs, and whether it is copied there now.

        The copies are issued on the swap-out stream, which has to wait for what makes the tensor.
        """
        entry: StashEntry | None = getattr(tensor, _ENTRY, None)
        host = None if entry is None or entry.version != tensor._version else entry.host
        is_copied = entry is None or host is None
        if entry is None or host is None:
            entry = StashEntry(tensor, "")
            setattr(tensor, _ENTRY, entry)
            entry.host = host = self.copy_out(entry, tensor.detach())
            entry.arrived = host.left
        entry.device_tensor, host.is_crossing = None, True
        return entry, is_copied

    def holds_on_device(self, tensor: Tensor) -> bool:
        """Return whether calls will be recomputed with `tensor`, which waits for them on the device."""
        entry: StashEntry | None = getattr(tensor, _ENTRY, None)
        return entry is not None and entry.device_tensor is not None

    def copies_leaving(self, storage: torch.UntypedStorage) -> int:
        """Return how many tensors with the memory `storage` are kept here alone until they are on the host."""
        leaving = self._copies_out.get(self._device.number, ())
        return sum(tensor.untyped_storage()._cdata == storage._cdata for _, tensor in leaving)

    def release_buffer(self, buffer: HostBuffer, read: Event) -> None:
        """Give a buffer of `copy_out` back; `read`: an event after the copy out of it."""
        self._buffers.release(buffer, read)

    def copy_out(self, user: object, tensor: Tensor) -> HostCopy:
        """Issue a copy of `tensor` to the host, in a buffer that is kept for `user`."""
        buffer = self._buffers.acquire(user, tensor.nbytes)
        with torch.no_grad(), self._device.on(Stream.SWAP_OUT):
            # The strides are kept, too: for others, kernels may round differently.
            strides = torch.empty_like(tensor, device="meta").stride()
            host = buffer.tensor(tensor.shape, strides, tensor.dtype)
            host.copy_(tensor, non_blocking=True)
        self._ledger.book_out(TrafficKind.ACTIVATIONS, tensor.nbytes)
        return HostCopy(buffer, host, self._device.record(Stream.SWAP_OUT))

    def free_copied(self) -> None:
        """Drop the device tensors whose copies to the host were issued by earlier swap-outs."""
        for copied, _ in self._copies_out.pop(self._device.number, ()):
            # The tensor's memory belongs to the compute stream, which may reuse it only after the copy.
            self._device.wait(Stream.COMPUTE, copied)

    def swap_in(self, entries: Sequence[StashEntry]) -> None:
        """Issue the copies back to the device of what the calls of one pack, or some, will be recomputed with.

        Args:
            entries: of all those calls. `tensor` waits for the copies.
        """
        for entry, calls in Counter(entries).items():  # several calls may share one
            entry.users_by_pack.append(calls)
        self._copy_in(entries)

    def _copy_in(self, entries: Iterable[StashEntry]) -> None:
        device = self._device
        self.free_copied()
        coming: list[tuple[StashEntry, Tensor, Tensor]] = []  # with the tensors on the host and on the device
        for entry in dict.fromkeys(entries):
            if entry.device_tensor is not None:
                continue
            host = entry.host_tensor
            assert host is not None, "a released stash entry was asked for"
            coming.append((entry, host, torch.empty_like(host, device=device.torch_device)))
            if entry.arrived is not None:
                # The host tensor is read only after the swap-out has written it.
                device.wait(Stream.SWAP_IN, entry.arrived)
        # Work that compute was given before may still use the memory.
        device.wait(Stream.SWAP_IN, device.record(Stream.COMPUTE))
        for entry, host, tensor in coming:
            with torch.no_grad(), device.on(Stream.SWAP_IN):
                tensor.copy_(host, non_blocking=True)
            self._ledger.book_in(TrafficKind.ACTIVATIONS, host.numel() * host.element_size())
            entry.device_tensor = tensor
            entry.version = tensor._version
            entry.arrived = device.record(Stream.SWAP_IN)

    def tensor(self, entry: StashEntry) -> Tensor:
        """Return an alias of the entry's tensor on the device, ready for the compute stream."""
        if entry.device_tensor is None:  # the pack before has released it, or its pack's stash is not on the host
            self._copy_in([entry])
        tensor = entry.device_tensor
        assert tensor is not None
        if entry.arrived is not None:
            self._wait_for(entry.arrived, entry)
        entry.check()
        return tensor if entry.stays else tensor.detach()

    def tensor_to_cut(self, entry: StashEntry) -> Tensor:
        """Return an alias of the entry's tensor, which `copy_slice` copies parts of: on the host, if it has left."""
        if entry.device_tensor is not None or entry.host is None:
            return self.tensor(entry)
        if entry.arrived is not None:
            self._wait_for(entry.arrived, entry)
        entry.host.is_cut = True
        return entry.host.tensor

    def copy_slice(self, entry: StashEntry, part: Tensor) -> Tensor:
        """Return a part of `tensor_to_cut(entry)` on the device, in memory of the compute stream, which copies it."""
        if entry.device_tensor is not None:
            return part
        copied = torch.empty_like(part, device=self._device.torch_device)
        if entry.host is not None and copied.stride() != part.stride():
            # A part in several pieces (rows in the second dimension) is gathered by the host, when the copy is issued.
            entry.host.left.synchronize()
        with torch.no_grad():
            copied.copy_(part, non_blocking=True)
        self._ledger.book_in(TrafficKind.ACTIVATIONS, copied.nbytes)
        return copied

    def _wait_for(self, arrived: Event, entry: StashEntry) -> None:
        """Let the compute stream read or reuse the memory of a tensor only after the swap-in has written it."""
        self._device.wait(Stream.COMPUTE, arrived)
        entry.arrived = None

    def release(self, entry: StashEntry) -> None:
        """Release `entry` for one of the calls that use it.

        The last call of a pack frees the device tensor, if there is a copy on the host. The last call of all frees both.
        """
        entry.users -= 1
        if entry.users_by_pack:
            entry.users_by_pack[0] -= 1
            if entry.users_by_pack[0] and entry.users:
                return
            del entry.users_by_pack[0]
        host, was_swapped_in = entry.host, entry.device_tensor is not None
        if host is not None:
            if was_swapped_in and entry.arrived is not None:
                self._wait_for(entry.arrived, entry)
            entry.device_tensor = None
        if entry.users == 0:
            entry.device_tensor = entry.host = None
            if host is not None:
                self._release_host(host, was_swapped_in)

    def _release_host(self, host: HostCopy, was_swapped_in: bool) -> None:
        """Give a buffer back after the last copies to the device that read it."""
        # Without one, no copy back to the device has waited for the copy out, which may still be queued on its stream.
        read: Event | None = None
        if host.is_cut:
            read = self._device.record(Stream.COMPUTE)
        elif was_swapped_in:
            read = self._device.record(Stream.SWAP_IN)
        self._buffers.release(host.buffer, read)

    def order_streams(self) -> None:
        """Order all streams after a failed step, so that tensors may be dropped that copies or kernels still use."""
        for number in range(self._device.count):
            self._device.enter(number)
            self.free_copied()
            # Memory of the compute stream is dropped that copies may still read or write.
            for stream in (Stream.SWAP_IN, Stream.SWAP_OUT, Stream.PEER):
                self._device.wait(Stream.COMPUTE, self._device.record(stream))
        self._device.enter(HOME)

    def destroy(self) -> None:
        """Free the host buffers."""
        self._buffers.destroy()
