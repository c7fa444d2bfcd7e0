"""Resident packs: weights, masters and optimizer state that stay on the device from step to step, and their updates there.

The names of each pack's parameters enter; device copies leave, like those of a swap-in. The host's tensors stay the same
objects, and are out of date until they are synchronized:

    first use                 weights, masters, optimizer state    host -> device
    a step                    nothing
    the host's are read       all, if a step came before           device -> host, and the reader waits
    next use after a read     all                                  host -> device: the reader may have written
    drop                      all, if a step came before           device -> host; the memory is freed

A parameter that several resident packs share is on the device once; each pack accumulates its own gradient of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from harmony_ds.device.base import Device, Event, Stream
from harmony_ds.offload.device_optimizer import DeviceOptimizer
from harmony_ds.offload.gradient_sums import GradientSums
from harmony_ds.offload.host_buffers import HostBuffers
from harmony_ds.offload.host_optimizer import Hyper
from harmony_ds.offload.host_store import HostStore, ungated
from harmony_ds.offload.layout import layout_of
from harmony_ds.offload.ledger import Kind, Ledger
from harmony_ds.offload.residency import DeviceCopy, Residency, leaf_over

Names = tuple[str, ...]


class DeviceStore(GradientSums):
    """Resident packs, and the gradients that wait there for their update. To be called on the engine's thread."""

    def __init__(
        self, device: Device, store: HostStore, ledger: Ledger, residency: Residency, optimizer: DeviceOptimizer | None
    ) -> None:
        super().__init__(lambda name: optimizer is not None and optimizer.trains(name))
        self._device = device
        self._store = store
        self._ledger = ledger
        self._residency = residency
        self._optimizer = optimizer
        self._names: tuple[Names, ...] = ()
        self._packs: list[DeviceCopy] = []  # in the same order; packs may have the same names
        self._weights: dict[str, Tensor] = {}
        self._stepped: dict[str, nn.Parameter] = {}  # of each trained weight: itself, or its master
        self._masters: list[Tensor] = []  # buffers of masters
        self._state_bytes = 0
        self._device_is_newer = False
        self._host_may_be_newer = False
        self._norm_buffers = HostBuffers(device)
        self._reading: Event | None = None  # after the last copy out of host memory that may still be queued

    def holds(self, packs: Sequence[Names]) -> bool:
        """Return whether exactly these packs are resident."""
        return tuple(packs) == self._names

    @property
    def nbytes(self) -> int:
        buffers = (*(copy.buffer for copy in self._packs), *self._masters)
        return sum(b.numel() * b.element_size() for b in buffers) + self._state_bytes

    def make_resident(self, packs: Sequence[Names]) -> list[DeviceCopy]:
        """Return up-to-date device copies of exactly these packs (in forward order); if they do not fit, hold none."""
        if self.holds(packs):
            self.sync_to_device()
        else:
            self.drop()
            try:
                for names in packs:
                    self._load_pack(names)
                self._names = tuple(packs)
            except BaseException:
                self.drop()
                raise
        return list(self._packs)

    def _load_pack(self, names: Names) -> None:
        fresh = tuple(name for name in names if name not in self._weights)
        copy = self._residency.swap_in(fresh, Kind.RESIDENT)
        self._packs.append(copy)
        copy.wait(self._device)
        self._weights.update({name: copy.leaves[name].detach() for name in fresh})
        for name in names:
            if name not in copy.leaves:
                copy.leaves[name] = leaf_over(self._weights[name], self._store.parameters[name])
        if self._optimizer is not None:
            self._load_training_state([name for name in fresh if self._optimizer.trains(name)], self._optimizer)

    def _load_training_state(self, names: Sequence[str], optimizer: DeviceOptimizer) -> None:
        """Load masters and optimizer state of `names`, whose weights are loaded."""
        masters = {name: self._store.masters[name] for name in names if self._store.compute_copy(name) is not None}
        places, numel = layout_of(masters, torch.float32.itemsize)
        if masters:
            self._masters.append(self._device.empty(numel, torch.float32))
        for name in names:
            there = places[name].view(self._masters[-1]) if name in masters else self._weights[name]
            state_bytes = optimizer.state_bytes(name, there.numel())
            self._device.charge(state_bytes, f"the optimizer state of {name}")
            self._state_bytes += state_bytes
            self._stepped[name] = nn.Parameter(there)
        self._copy_in([(masters[name], self._stepped[name].detach()) for name in masters], names)

    @torch.no_grad()
    def _copy_in(self, tensors: Iterable[tuple[Tensor, Tensor]], names: Iterable[str]) -> None:
        """Issue the copies of `tensors` (from the host's to the device's), and of the optimizer's state of `names`."""
        moved = 0
        with ungated():
            for host, there in tensors:
                moved += there.copy_(host, non_blocking=True).nbytes
        for name in names:
            assert self._optimizer is not None
            moved += self._optimizer.copy_state_to_device(name, self._stepped[name])
        if moved:
            self._ledger.book_in(Kind.RESIDENT, moved)
            self._reading = self._device.record(Stream.COMPUTE)

    def _tensors(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all pairs of the host's and the device's tensor."""
        for name, weight in self._weights.items():
            yield self._store.parameters[name], weight
        for name, stepped in self._stepped.items():
            if self._store.compute_copy(name) is not None:
                yield self._store.masters[name], stepped.detach()

    @torch.inference_mode(False)  # optimizer state that is made meanwhile will be stepped in place
    def sync_to_device(self) -> None:
        """Copy to the device what may have changed on the host."""
        self._notice_replaced_state()
        if self._host_may_be_newer:
            self._copy_in(self._tensors(), self._stepped)
        self._host_may_be_newer = False

    def finish_reads(self) -> None:
        """Wait until no queued copy reads host memory any more: then it may be written."""
        self._residency.finish_reads()
        if self._reading is not None:
            self._reading.synchronize()
            self._reading = None

    def leaves(self, names: Iterable[str]) -> Mapping[str, nn.Parameter]:
        resident = [name for name in names if name in self._weights]
        return {name: next(copy.leaves[name] for copy in self._packs if name in copy.leaves) for name in resident}

    def drop(self) -> None:
        """Copy what changed to the host, and free everything on the device."""
        self.sync_to_host()
        self.clear_gradients()
        for copy in self._packs:
            self._residency.evict(copy)
        for buffer in self._masters:
            self._device.free(buffer)
        if self._optimizer is not None:
            self._optimizer.state.clear()
        self._device.discharge(self._state_bytes)
        self._state_bytes, self._host_may_be_newer = 0, False
        self._names = ()
        for held in (self._packs, self._masters, self._weights, self._stepped):
            held.clear()

    def destroy(self) -> None:
        """Drop all packs, and free page-locked memory."""
        self.drop()
        self._norm_buffers.destroy()

    @torch.inference_mode(False)
    @torch.no_grad()
    def sync_to_host(self, to_be_read: bool = False) -> None:
        """Bring the host's weights, masters and optimizer state up to date. `to_be_read`: they will not be written."""
        self._notice_replaced_state()
        if self._device_is_newer:
            moved = 0
            with ungated():
                for host, there in self._tensors():
                    moved += host.data.copy_(there, non_blocking=True).nbytes
            for name, stepped in self._stepped.items():
                assert self._optimizer is not None
                moved += self._optimizer.copy_state_to_host(name, stepped)
            self._ledger.book_out(Kind.RESIDENT, moved)
            self._device.record(Stream.COMPUTE).synchronize()
        self._device_is_newer = False  # only now: a program that is interrupted meanwhile may go on
        self._host_may_be_newer |= bool(self._weights) and not to_be_read

    def _notice_replaced_state(self) -> None:
        """Copy the optimizer's state to the device if the host's optimizer has been given another one."""
        if self._optimizer is not None and self._optimizer.watch_replaced_state():
            self._copy_in((), self._stepped)

    @torch.no_grad()
    def gradient(self, name: str) -> Tensor | None:
        """Return the gradient of `name`: its packs' sums, added up in the order of the backward pass, in the first one."""
        total: Tensor | None = None
        for copy in reversed(self._packs):
            part = self._residency.gradient(copy, name)
            if total is None:
                total = part
            elif part is not None:
                total.add_(part)
                self._residency.clear_gradient(copy, name)
        return total

    @torch.no_grad()
    def add_gradient(self, name: str, gradient: Tensor) -> None:
        copy = next(copy for copy in reversed(self._packs) if name in copy.leaves)
        self._residency.add_gradient(copy, name, gradient)

    def take_gradients(self) -> dict[str, Tensor]:
        """Remove all gradients that wait here, and return copies of them on the host."""
        taken = self.copies_of(self._weights)
        self.clear_gradients()
        return taken

    def take_norms(self) -> Callable[[], Mapping[str, Tensor]]:
        """Send all norms taken so far to the host; return a function that waits for them, for any thread."""
        names = tuple(self.norms)
        if not names:
            return dict
        buffer = self._norm_buffers.take(self, len(names) * torch.float32.itemsize)
        host = buffer.tensor(torch.Size((len(names),)), (1,), torch.float32)
        host.copy_(torch.stack(list(self.norms.values())), non_blocking=True)
        self._ledger.book_out(Kind.RESIDENT, host.numel() * host.element_size())
        arrived = self._device.record(Stream.COMPUTE)
        self.norms.clear()

        def read() -> Mapping[str, Tensor]:
            arrived.synchronize()
            norms = dict(zip(names, host.clone().unbind(), strict=True))
            self._norm_buffers.release(buffer, arrived)
            return norms

        return read

    @torch.no_grad()
    def update(self, names: Iterable[str], hyper: Hyper, coefficient: Tensor | None, measured: bool) -> None:
        """Update `names` from their gradients, which are dropped; see `for_update`."""
        assert self._optimizer is not None
        gradients = self.for_update(names, coefficient, measured)
        self.received.update(gradients)
        self._device_is_newer, self._host_may_be_newer = True, False
        stepped = {name: self._stepped[name] for name in gradients}
        self._optimizer.step(stepped, gradients, hyper)
        for name, parameter in stepped.items():
            if self._store.compute_copy(name) is not None:
                self._weights[name].copy_(parameter)
        self.clear_gradients(names)

    def clear_gradients(self, names: Iterable[str] | None = None) -> None:
        if names is None:
            self.norms.clear()
        chosen = list(self._weights if names is None else names)
        for copy in self._packs:
            for name in chosen:
                self._residency.clear_gradient(copy, name)
