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

from harmony_ds.decomposer.graph import slab_bytes
from harmony_ds.device.base import Device, Event, Stream
from harmony_ds.offload.device_optimizer import DeviceOptimizer
from harmony_ds.offload.device_twin import HeldParameter, Twin
from harmony_ds.offload.host_optimizer import Hyper
from harmony_ds.offload.host_store import HostStore
from harmony_ds.offload.ledger import Kind, Ledger
from harmony_ds.offload.residency import DeviceCopy, Residency

Names = tuple[str, ...]


class DeviceStore:
    """Holds resident packs. Every method is the engine thread's."""

    def __init__(
        self,
        device: Device,
        store: HostStore,
        ledger: Ledger,
        residency: Residency,
        optimizer: DeviceOptimizer | None,
    ) -> None:
        self._device = device
        self._store = store
        self._ledger = ledger
        self._residency = residency
        self._optimizer = optimizer
        self._names: tuple[Names, ...] = ()
        self._packs: list[DeviceCopy] = []  # in the same order; packs may have the same names
        self._held: dict[str, HeldParameter] = {}
        self._masters: list[Tensor] = []
        self._norms: dict[str, Tensor] = {}
        self._norm_buffers: list[Tensor] = []  # every one
        self._norm_spares: list[Tensor] = []
        self._reading: Event | None = None  # behind the last refresh, while that may still be queued

    # ---- being there

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
            self._held[name] = HeldParameter(Twin(self._store.parameters[name], copy.leaves[name].detach()))
        for name in names:
            if name not in copy.leaves:
                shared = self._held[name].weight
                copy.leaves[name] = nn.Parameter(shared.device, requires_grad=shared.host.requires_grad)
        if self._optimizer is not None:
            self._settle_training(tuple(name for name in fresh if self._optimizer.trains(name)))

    def _settle_training(self, names: Names) -> None:
        """Masters and optimizer state of `names`, whose weights are there."""
        assert self._optimizer is not None
        apart = [name for name in names if self._store.upload_copy(name) is not None]
        masters = self._bring_masters(apart)
        for name in names:
            held = self._held[name]
            held.stepped = nn.Parameter(masters.get(name, held.weight.device))
            if name in masters:
                held.master = Twin(self._store.masters[name], held.stepped.detach())
            state_bytes = self._optimizer.footprint(name, held.stepped.shape).state_bytes
            self._device.charge(state_bytes, f"the optimizer state of {name}")
            held.state_bytes, held.state_shown = state_bytes, True

    def _bring_masters(self, names: Iterable[str]) -> dict[str, Tensor]:
        masters = {name: self._store.masters[name] for name in names}
        counts = {name: slab_bytes(m.numel(), m.element_size()) // m.element_size() for name, m in masters.items()}
        views: dict[str, Tensor] = {}
        if not masters:
            return views
        with torch.no_grad():
            buffer = self._device.empty(sum(counts.values()), torch.float32)
            self._masters.append(buffer)
            offset = 0
            for name, master in masters.items():
                views[name] = buffer[offset : offset + master.numel()].view(master.shape)
                views[name].copy_(master, non_blocking=True)
                offset += counts[name]
                self._ledger.book_in(Kind.RESIDENT, master.numel() * master.element_size())
        return views

    @torch.no_grad()
    def refresh(self) -> None:
        """Brings to the device what may have changed on the host."""
        self._notice_replaced_state()
        moved = 0
        for name, held in self._held.items():
            moved += held.weight.to_device()
            if held.master is not None:
                moved += held.master.to_device()
            if held.state_shown and held.stepped is not None and self._optimizer is not None:
                moved += self._optimizer.take(name, held.stepped)
                held.state_shown = held.state_ahead = False
        self._ledger.book_in(Kind.RESIDENT, moved)
        if moved:
            self._reading = self._device.record(Stream.COMPUTE)

    def finish_reads(self) -> None:
        """Waits until nothing queued reads host memory any more: afterwards it may be written."""
        self._residency.finish_reads()
        if self._reading is not None:
            self._reading.synchronize()
            self._reading = None

    def leaves(self, names: Iterable[str]) -> Mapping[str, nn.Parameter]:
        """Those of `names` that are here, to compute with."""
        found: dict[str, nn.Parameter] = {}
        for name in names:
            if name in self._held:
                found[name] = next(copy.leaves[name] for copy in self._packs if name in copy.leaves)
        return found

    def drop(self) -> None:
        """Copies what changed to the host, and frees everything on the device."""
        self.show()
        self.forget_gradients()
        for copy in self._packs:
            self._residency.evict(copy)
        for buffer in self._masters:
            self._device.free(buffer)
        for held in self._held.values():
            if held.stepped is not None and self._optimizer is not None:
                self._optimizer.forget(held.stepped)
            self._device.discharge(held.state_bytes)
        self._names = ()
        self._packs.clear()
        self._masters.clear()
        self._held.clear()

    def destroy(self) -> None:
        """As `drop`, and gives page-locked memory back."""
        self.drop()
        for buffer in self._norm_buffers:
            self._device.host_free(buffer)
        self._norm_buffers.clear()
        self._norm_spares.clear()

    # ---- looks from the host

    @torch.no_grad()
    def show(self) -> None:
        """Makes everything on the host true: weights, masters, optimizer state."""
        self._notice_replaced_state()
        moved = 0
        for name, held in self._held.items():
            moved += held.weight.to_host()
            if held.master is not None:
                moved += held.master.to_host()
            moved += self._give_state(name, held)
        self._arrive(moved)

    @torch.no_grad()
    def read(self) -> None:
        """Makes weights and masters on the host true, for somebody who does not write into them."""
        moved = 0
        for held in self._held.values():
            moved += held.weight.to_host(read_only=True)
            if held.master is not None:
                moved += held.master.to_host(read_only=True)
        self._arrive(moved)

    def state_ahead(self, name: str) -> dict[str, Any] | None:
        """The optimizer state of `name` with tensors of the device, under the host's keys; None: the host's is true."""
        self._notice_replaced_state()
        held = self._held.get(name)
        if held is None or not held.state_ahead or held.stepped is None or self._optimizer is None:
            return None
        return self._optimizer.peek(name, held.stepped)

    @torch.no_grad()
    def show_weights(self, names: Iterable[str]) -> None:
        """Makes the host's weights `names` true."""
        self._arrive(sum(self._held[name].weight.to_host() for name in names if name in self._held))

    @torch.no_grad()
    def show_state(self, name: str) -> None:
        """Makes the host's optimizer state of `name` true."""
        self._notice_replaced_state()
        if name in self._held:
            self._arrive(self._give_state(name, self._held[name]))

    def _notice_replaced_state(self) -> None:
        """When the host's optimizer has been given another state, what is here of the old one is out of date."""
        if self._optimizer is not None and self._optimizer.was_replaced():
            for held in self._held.values():
                held.state_ahead, held.state_shown = False, True

    def _give_state(self, name: str, held: HeldParameter) -> int:
        moved = 0
        if held.state_ahead and held.stepped is not None and self._optimizer is not None:
            moved = self._optimizer.give(name, held.stepped)
        held.state_ahead, held.state_shown = False, True
        return moved

    def _arrive(self, nbytes: int) -> None:
        if nbytes:
            self._ledger.book_out(Kind.RESIDENT, nbytes)
            self._device.record(Stream.COMPUTE).synchronize()

    # ---- gradients and updates

    @torch.no_grad()
    def gradient(self, name: str) -> Tensor | None:
        """The gradient of `name` that waits for its update here; the tensor itself."""
        return self._sum(name)

    @torch.no_grad()
    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Adds to the gradient of `name`, which is here."""
        copy = next(copy for copy in reversed(self._packs) if name in copy.leaves)
        self._residency.add_gradient(copy, name, gradient)

    @torch.no_grad()
    def take_gradients(self) -> dict[str, Tensor]:
        """Everything that waits for its update here, as copies on the host; nothing waits here any more."""
        gradients = {name: total for name in self._held if (total := self._sum(name)) is not None}
        taken = {name: total.to("cpu", copy=True) for name, total in gradients.items()}
        self.forget_gradients()
        return taken

    @torch.no_grad()
    def measure(self, names: Iterable[str]) -> None:
        """Takes the norms of the gradients of `names`, whose backward passes are finished."""
        for name in names:
            total = self._sum(name)
            if total is not None and self._held[name].stepped is not None:
                self._norms[name] = torch.linalg.vector_norm(total, 2, dtype=torch.float32)

    def take_norms(self) -> Callable[[], Mapping[str, Tensor]]:
        """All norms taken so far, in one transfer; the result waits for it, and may be called on any thread."""
        device, names = self._device, tuple(self._norms)
        if not names:
            return dict
        buffer = self._norm_buffer(len(names))
        host = buffer[: len(names)]
        host.copy_(torch.stack(list(self._norms.values())), non_blocking=True)
        self._ledger.book_out(Kind.RESIDENT, host.numel() * host.element_size())
        arrived = device.record(Stream.COMPUTE)
        self._norms.clear()

        def read() -> Mapping[str, Tensor]:
            arrived.synchronize()
            norms = dict(zip(names, host.clone().unbind(), strict=True))
            self._norm_spares.append(buffer)
            return norms

        return read

    def _norm_buffer(self, count: int) -> Tensor:
        """Page-locked, for `count` norms or more. One serves every step, but where the thread that reads it lags behind."""
        while self._norm_spares:
            spare = self._norm_spares.pop()
            if spare.numel() >= count:
                return spare
            self._norm_buffers = [known for known in self._norm_buffers if known is not spare]
            self._device.host_free(spare)
        self._norm_buffers.append(self._device.host_empty(max(count, len(self._held)), torch.float32))
        return self._norm_buffers[-1]

    @torch.no_grad()
    def update(self, names: Iterable[str], hyper: Hyper, coefficient: Tensor | None, measured: bool) -> None:
        """Updates `names` from their gradients, which go.

        Args:
            coefficient: what gradients are multiplied with (on the host, 0-dim).
            measured: whether their norms are known; if not, they are taken.
        """
        assert self._optimizer is not None
        parameters: dict[str, nn.Parameter] = {}
        gradients: dict[str, Tensor] = {}
        for name in names:
            total, stepped = self._sum(name), self._held[name].stepped
            if total is None or stepped is None:
                continue
            gradient = total.to(stepped.dtype)
            if not measured:
                self._norms[name] = torch.linalg.vector_norm(gradient, 2)
            parameters[name] = stepped
            gradients[name] = gradient if coefficient is None else gradient.mul_(coefficient.item())
        for name in gradients:
            held = self._held[name]
            held.weight.ahead = held.state_ahead = True
            held.weight.shown = held.state_shown = False
        self._optimizer.step(parameters, gradients, hyper)
        for name in gradients:
            held = self._held[name]
            if held.master is not None:
                held.master.ahead, held.master.shown = True, False
                held.weight.device.copy_(held.master.device)
        self.forget_gradients(names)

    def forget_gradients(self, names: Iterable[str] | None = None) -> None:
        """Drops the gradients of `names`, or (after a failure, or an overflow) all of them and their norms."""
        if names is None:
            self._norms.clear()
        chosen = list(self._held if names is None else names)
        for copy in self._packs:
            for name in chosen:
                self._residency.forget_gradient(copy, name)

    def _sum(self, name: str) -> Tensor | None:
        """The gradient of `name`: its packs' sums, added up in the order of the backward pass, in the first of them."""
        parts = [
            (copy, gradient)
            for copy in reversed(self._packs)
            if (gradient := self._residency.gradient(copy, name)) is not None
        ]
        if not parts:
            return None
        total = parts[0][1]
        for copy, gradient in parts[1:]:
            total.add_(gradient)
            self._residency.forget_gradient(copy, name)
        return total
