"""Packs that stay on the device from step to step: their weights, masters and optimizer state, and their updates there.

What enters are the names of each pack's parameters; what leaves are device copies that a pack is run with, as a swap-in
would give them, and true values on the host whenever somebody asks for them. The host's tensors are the same objects as
ever; between two looks they lag behind.

    first use        weights, masters, optimizer state    host -> device
    a step           nothing
    a look           what changed since the last look     device -> host, and it waits
    after a look     what was looked at                   host -> device at the next use: who looks may have written
    let go           what changed                         device -> host; the memory is free

A parameter that several resident packs share lies on the device once; each pack gathers gradients of its own for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.device.base import Device, Event, Stream
from harmony_ds.offload.device_optimizer import DeviceOptimizer
from harmony_ds.offload.device_twin import HeldParameter, StateTwin, TensorTwin, Twin
from harmony_ds.offload.gradient_sums import GradientSums
from harmony_ds.offload.host_buffers import HostBuffers
from harmony_ds.offload.host_optimizer import Hyper
from harmony_ds.offload.host_store import HostStore
from harmony_ds.offload.ledger import Kind, Ledger
from harmony_ds.offload.places import places_of
from harmony_ds.offload.residency import DeviceCopy, Residency

Names = tuple[str, ...]


class DeviceStore(GradientSums):
    """Holds resident packs, and the gradients that wait for their update there. Every method is the engine thread's."""

    def __init__(
        self,
        device: Device,
        store: HostStore,
        ledger: Ledger,
        residency: Residency,
        optimizer: DeviceOptimizer | None,
    ) -> None:
        super().__init__(lambda name: optimizer is not None and optimizer.trains(name))
        self._device = device
        self._store = store
        self._ledger = ledger
        self._residency = residency
        self._optimizer = optimizer
        self._names: tuple[Names, ...] = ()
        self._packs: list[DeviceCopy] = []  # in the same order; packs may have the same names
        self._held: dict[str, HeldParameter] = {}
        self._masters: list[Tensor] = []
        self._norm_buffers = HostBuffers(device)
        self._reading: Event | None = None  # behind the last refresh, while that may still be queued

    # ---- what is on the device

    def holds(self, packs: Sequence[Names]) -> bool:
        """Whether exactly these packs are here."""
        return tuple(packs) == self._names

    @property
    def nbytes(self) -> int:
        """Device bytes of what is here: weights, masters and optimizer state."""
        buffers = (*(copy.buffer for copy in self._packs), *self._masters)
        return sum(b.numel() * b.element_size() for b in buffers) + sum(h.state_bytes for h in self._held.values())

    def hold(self, packs: Sequence[Names]) -> list[DeviceCopy]:
        """Device copies of exactly these packs' parameters (in forward order), up to date; all others are let go.

        Raises:
            DeviceOutOfMemoryError: they do not fit; none is held then.
        """
        if not self.holds(packs):
            self.drop()
            try:
                for names in packs:
                    self._settle(names)
                self._names = tuple(packs)
            except BaseException:
                self.drop()
                raise
        self.refresh()
        return list(self._packs)

    def _settle(self, names: Names) -> None:
        fresh = tuple(name for name in names if name not in self._held)
        copy = self._residency.swap_in(fresh, Kind.RESIDENT)
        self._packs.append(copy)
        copy.wait(self._device)
        for name in fresh:
            self._held[name] = HeldParameter(TensorTwin(self._store.parameters[name], copy.leaves[name].detach()))
        for name in names:
            if name not in copy.leaves:
                shared = self._held[name].weight
                copy.leaves[name] = nn.Parameter(shared.device, requires_grad=shared.host.requires_grad)
        if self._optimizer is not None:
            self._settle_training(tuple(name for name in fresh if self._optimizer.trains(name)), self._optimizer)

    def _settle_training(self, names: Names, optimizer: DeviceOptimizer) -> None:
        """Masters and optimizer state of `names`, whose weights are there."""
        masters = self._bring_masters([name for name in names if self._store.upload_copy(name) is not None])
        for name in names:
            held = self._held[name]
            stepped = nn.Parameter(masters.get(name, held.weight.device))
            if name in masters:
                held.master = TensorTwin(self._store.masters[name], stepped.detach())
            held.state = StateTwin(name, stepped, optimizer)
            state_bytes = optimizer.footprint(name, stepped.shape).state_bytes
            self._device.charge(state_bytes, f"the optimizer state of {name}")
            held.state_bytes = state_bytes

    @torch.no_grad()
    def _bring_masters(self, names: Sequence[str]) -> dict[str, Tensor]:
        if not names:
            return {}
        masters = {name: self._store.masters[name] for name in names}
        places, numel = places_of(masters, torch.float32.itemsize)
        buffer = self._device.empty(numel, torch.float32)
        self._masters.append(buffer)
        views = {name: place.view(buffer) for name, place in places.items()}
        for name, master in masters.items():
            views[name].copy_(master, non_blocking=True)
            self._ledger.book_in(Kind.RESIDENT, master.numel() * master.element_size())
        return views

    @torch.no_grad()
    def refresh(self) -> None:
        """Brings to the device what may have changed on the host."""
        self._notice_replaced_state()
        moved = sum(twin.to_device() for held in self._held.values() for twin in held.twins)
        if moved:
            self._ledger.book_in(Kind.RESIDENT, moved)
            self._reading = self._device.record(Stream.COMPUTE)

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
            if name in self._held
        }

    def drop(self) -> None:
        """Copies what changed to the host, and frees everything on the device."""
        self.show()
        self.forget_gradients()
        for copy in self._packs:
            self._residency.evict(copy)
        for buffer in self._masters:
            self._device.free(buffer)
        for held in self._held.values():
            if held.state is not None and self._optimizer is not None:
                self._optimizer.forget(held.state.parameter)
            self._device.discharge(held.state_bytes)
        self._names = ()
        self._packs.clear()
        self._masters.clear()
        self._held.clear()

    def destroy(self) -> None:
        """As `drop`, and gives page-locked memory back."""
        self.drop()
        self._norm_buffers.destroy()

    # ---- looks from the host

    def show(self) -> None:
        """Makes everything on the host true: weights, masters, optimizer state."""
        self._notice_replaced_state()
        self._copy_to_host(twin for held in self._held.values() for twin in held.twins)

    def read(self) -> None:
        """Makes weights and masters on the host true, for somebody who does not write into them."""
        self._copy_to_host((twin for held in self._held.values() for twin in held.tensors), read_only=True)

    def show_weights(self, names: Iterable[str]) -> None:
        """Makes the host's weights `names` true."""
        self._copy_to_host(self._held[name].weight for name in names if name in self._held)

    def show_state(self, name: str) -> None:
        """Makes the host's optimizer state of `name` true."""
        self._notice_replaced_state()
        state = self._held[name].state if name in self._held else None
        self._copy_to_host([] if state is None else [state])

    def newer_state(self, name: str) -> dict[str, Any] | None:
        """The optimizer state of `name` with tensors of the device, under the host's keys; None: the host's is true."""
        self._notice_replaced_state()
        state = self._held[name].state if name in self._held else None
        return None if state is None else state.newer()

    def _notice_replaced_state(self) -> None:
        """When the host's optimizer has been given another state, what is here of the old one is out of date."""
        if self._optimizer is not None and self._optimizer.was_replaced():
            for held in self._held.values():
                if held.state is not None:
                    held.state.replaced()

    @torch.no_grad()
    def _copy_to_host(self, twins: Iterable[Twin], read_only: bool = False) -> None:
        moved = sum(twin.to_host(read_only) for twin in twins)
        if moved:
            self._ledger.book_out(Kind.RESIDENT, moved)
            self._device.record(Stream.COMPUTE).synchronize()

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
        taken = self.copied(self._held)
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
        held = {name: self._held[name] for name in gradients}
        for parameter in held.values():
            for twin in parameter.twins:
                twin.stepped()
        parameters = {name: one.state.parameter for name, one in held.items() if one.state is not None}
        self._optimizer.step(parameters, gradients, hyper)
        for parameter in held.values():
            if parameter.master is not None:
                parameter.weight.device.copy_(parameter.master.device)
        self.forget_gradients(names)

    def forget_gradients(self, names: Iterable[str] | None = None) -> None:
        if names is None:
            self.norms.clear()
        chosen = list(self._held if names is None else names)
        for copy in self._packs:
            for name in chosen:
                self._residency.forget_gradient(copy, name)
