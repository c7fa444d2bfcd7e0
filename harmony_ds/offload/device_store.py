"""Packs that stay on the device from step to step: their weights, masters and optimizer state, and their updates there.

What enters are the names of each pack's parameters; what leaves are device copies that a pack is run with, as a swap-in
would give them, and true values on the host whenever somebody asks for them. The host's tensors are the same objects as
ever; between two looks they lag behind.

    first use        weights, masters, optimizer state    host -> device
    a step           nothing
    a look           all of it, if a step came before     device -> host, and it waits
    after a look     all of it                            host -> device at the next use: who looks may have written
    let go           all of it, if a step came before     device -> host; the memory is free

A parameter that several resident packs share lies on the device once; each pack gathers gradients of its own for it.
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
from harmony_ds.offload.ledger import Kind, Ledger
from harmony_ds.offload.places import places_of
from harmony_ds.offload.residency import DeviceCopy, Residency

Names = tuple[str, ...]


class DeviceStore(GradientSums):
    """Holds resident packs, and the gradients that wait for their update there. Every method is the engine thread's."""

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
        self._stepped: dict[str, nn.Parameter] = {}  # of those that are trained: the weight, or a master beside it
        self._masters: list[Tensor] = []  # the buffers that masters lie in
        self._state_bytes = 0
        self._is_newer = False  # than the host's
        self._was_shown = False  # somebody may have written into the host's
        self._norm_buffers = HostBuffers(device)
        self._reading: Event | None = None  # behind the last copy out of host memory that may still be queued

    # ---- what is on the device

    def holds(self, packs: Sequence[Names]) -> bool:
        """Whether exactly these packs are here."""
        return tuple(packs) == self._names

    @property
    def nbytes(self) -> int:
        """Device bytes of what is here: weights, masters and optimizer state."""
        buffers = (*(copy.buffer for copy in self._packs), *self._masters)
        return sum(b.numel() * b.element_size() for b in buffers) + self._state_bytes

    def hold(self, packs: Sequence[Names]) -> list[DeviceCopy]:
        """Device copies of exactly these packs' parameters (in forward order), up to date; all others are let go.

        Raises:
            torch.OutOfMemoryError: they do not fit; none is held then.
        """
        if self.holds(packs):
            self.refresh()
        else:
            self.drop()
            try:
                for names in packs:
                    self._settle(names)
                self._names = tuple(packs)
            except BaseException:
                self.drop()
                raise
        return list(self._packs)

    def _settle(self, names: Names) -> None:
        fresh = tuple(name for name in names if name not in self._weights)
        copy = self._residency.swap_in(fresh, Kind.RESIDENT)
        self._packs.append(copy)
        copy.wait(self._device)
        self._weights.update({name: copy.leaves[name].detach() for name in fresh})
        for name in names:
            if name not in copy.leaves:
                trained = self._store.parameters[name].requires_grad
                copy.leaves[name] = nn.Parameter(self._weights[name], requires_grad=trained)
        if self._optimizer is not None:
            self._settle_training([name for name in fresh if self._optimizer.trains(name)], self._optimizer)

    def _settle_training(self, names: Sequence[str], optimizer: DeviceOptimizer) -> None:
        """Masters and optimizer state of `names`, whose weights are there."""
        masters = {name: self._store.masters[name] for name in names if self._store.upload_copy(name) is not None}
        places, numel = places_of(masters, torch.float32.itemsize)
        if masters:
            self._masters.append(self._device.empty(numel, torch.float32))
        for name in names:
            there = places[name].view(self._masters[-1]) if name in masters else self._weights[name]
            state_bytes = optimizer.state_bytes(name, there.numel())
            self._device.charge(state_bytes, f"the optimizer state of {name}")
            self._state_bytes += state_bytes
            self._stepped[name] = nn.Parameter(there)
        self._bring_in([(masters[name], self._stepped[name].detach()) for name in masters], names)

    @torch.no_grad()
    def _bring_in(self, tensors: Iterable[tuple[Tensor, Tensor]], names: Iterable[str]) -> None:
        """Issues the copies of `tensors` (the host's and the device's), and of the optimizer's state of `names`."""
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
        """The host's and the device's, of all that is here."""
        for name, weight in self._weights.items():
            yield self._store.parameters[name], weight
        for name, stepped in self._stepped.items():
            if self._store.upload_copy(name) is not None:
                yield self._store.masters[name], stepped.detach()

    def refresh(self) -> None:
        """Brings to the device what may have changed on the host."""
        self._notice_replaced_state()
        if self._was_shown:
            self._bring_in(self._tensors(), self._stepped)
        self._was_shown = False

    def finish_reads(self) -> None:
        """Waits until nothing queued reads host memory any more: afterwards it may be written."""
        self._residency.finish_reads()
        if self._reading is not None:
            self._reading.synchronize()
            self._reading = None

    def leaves(self, names: Iterable[str]) -> Mapping[str, nn.Parameter]:
        """Those of `names` that are here, to compute with."""
        return {
            name: next(copy.leaves[name] for copy in self._packs if name in copy.leaves)
            for name in names
            if name in self._weights
        }

    def drop(self) -> None:
        """Copies what changed to the host, and frees everything on the device."""
        self.show()
        self.forget_gradients()
        for copy in self._packs:
            self._residency.evict(copy)
        for buffer in self._masters:
            self._device.free(buffer)
        if self._optimizer is not None:
            self._optimizer.state.clear()
        self._device.discharge(self._state_bytes)
        self._state_bytes, self._was_shown = 0, False
        self._names = ()
        for held in (self._packs, self._masters, self._weights, self._stepped):
            held.clear()

    def destroy(self) -> None:
        """As `drop`, and gives page-locked memory back."""
        self.drop()
        self._norm_buffers.destroy()

    # ---- looks from the host

    @torch.no_grad()
    def show(self, to_be_read: bool = False) -> None:
        """Makes everything on the host true: weights, masters, optimizer state. `to_be_read`: nobody will write there."""
        self._notice_replaced_state()
        self._was_shown |= bool(self._weights) and not to_be_read
        if not self._is_newer:
            return
        self._is_newer = False
        moved = 0
        with ungated():
            for host, there in self._tensors():
                moved += host.data.copy_(there, non_blocking=True).nbytes
        for name, stepped in self._stepped.items():
            assert self._optimizer is not None
            moved += self._optimizer.copy_state_to_host(name, stepped)
        self._ledger.book_out(Kind.RESIDENT, moved)
        self._device.record(Stream.COMPUTE).synchronize()

    def _notice_replaced_state(self) -> None:
        """When the host's optimizer has been given another state, what is here of the old one is out of date."""
        if self._optimizer is not None and self._optimizer.was_replaced():
            self._bring_in((), self._stepped)

    # ---- gradients and updates

    @torch.no_grad()
    def gradient(self, name: str) -> Tensor | None:
        """Its packs' sums are added up in the order of the backward pass, in the first of them."""
        total: Tensor | None = None
        for copy in reversed(self._packs):
            part = self._residency.gradient(copy, name)
            if total is None:
                total = part
            elif part is not None:
                total.add_(part)
                self._residency.forget_gradient(copy, name)
        return total

    @torch.no_grad()
    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Adds to the gradient of `name`, which is here."""
        copy = next(copy for copy in reversed(self._packs) if name in copy.leaves)
        self._residency.add_gradient(copy, name, gradient)

    def take_gradients(self) -> dict[str, Tensor]:
        """Everything that waits for its update here, as copies on the host; nothing waits here any more."""
        taken = self.copied(self._weights)
        self.forget_gradients()
        return taken

    def take_norms(self) -> Callable[[], Mapping[str, Tensor]]:
        """All norms taken so far, in one transfer; the result waits for it, and may be called on any thread."""
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
            self._norm_buffers.give_back(buffer, arrived)
            return norms

        return read

    @torch.no_grad()
    def update(self, names: Iterable[str], hyper: Hyper, coefficient: Tensor | None, measured: bool) -> None:
        """Updates `names` from their gradients, which go; see `for_update`."""
        assert self._optimizer is not None
        gradients = self.for_update(names, coefficient, measured)
        self._came.update(gradients)
        self._is_newer, self._was_shown = True, False
        stepped = {name: self._stepped[name] for name in gradients}
        self._optimizer.step(stepped, gradients, hyper)
        for name, parameter in stepped.items():
            if self._store.upload_copy(name) is not None:
                self._weights[name].copy_(parameter)
        self.forget_gradients(names)

    def forget_gradients(self, names: Iterable[str] | None = None) -> None:
        if names is None:
            self.norms.clear()
        chosen = list(self._weights if names is None else names)
        for copy in self._packs:
            for name in chosen:
                self._residency.forget_gradient(copy, name)
