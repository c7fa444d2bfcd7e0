"""Resident packs: those that stay on the device from step to step, with masters and optimizer state, and are updated there.

`make_resident` returns device copies like those of a swap-in. The host's tensors stay the same objects, and are out of date
until they are synchronized. What is copied when:

    first use                 weights, masters, optimizer state    host -> device; state that the host has not got is made
    a step                    nothing but norms, if it clips       device -> host
    one of the host's is read that one, if a step came before      device -> host, and the reader waits
    next use after a read     nothing; of state that was handed out, that state: host -> device
    next use after a write    what was written                     host -> device
    drop                      all that a step has changed          device -> host; the memory is freed

Writes into packed weights are found by versions. The program may hold another tensor over the memory of a weight
(`p.data`, a state dict), and write through that tensor unseen. A copy of such a weight is kept on the host, and compared
before the next use. Optimizer state that was handed out counts as written.

A parameter that several resident packs share is on the device once; each pack accumulates its own gradient of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum

import torch
from torch import Tensor, nn

from harmony_ds.device.base import Device, Event, Stream
from harmony_ds.offload.device_copies import DeviceCopies, DeviceCopy, Leaves, same_bits
from harmony_ds.offload.gradient_sums import GradientSums
from harmony_ds.offload.host_buffers import HostBuffers
from harmony_ds.offload.host_store import HostStore
from harmony_ds.offload.layout import layout_of
from harmony_ds.offload.ledger import Ledger, TrafficKind
from harmony_ds.optim.device_optimizer import DeviceOptimizer
from harmony_ds.optim.host_optimizer import Hyper

ParameterNames = tuple[str, ...]


class TensorRole(Enum):
    """What a resident parameter has both on the host and on the device.

    A parameter that is trained in its own dtype has no master beside its weight.
    """

    WEIGHT = "weight"
    MASTER = "master"
    STATE = "optimizer state"


class ResidentPacks(GradientSums):
    """The resident packs of a model, and the gradients that wait there for their update; for the engine's thread alone."""

    def __init__(
        self,
        device: Device,
        store: HostStore,
        ledger: Ledger,
        device_copies: DeviceCopies,
        optimizer: DeviceOptimizer | None,
    ) -> None:
        super().__init__(lambda name: optimizer is not None and optimizer.trains(name))
        self._device = device
        self._store = store
        self._ledger = ledger
        self._device_copies = device_copies
        self._optimizer = optimizer
        self._names: tuple[ParameterNames, ...] = ()
        self._packs: list[DeviceCopy] = []  # in the order of `_names`; packs may share parameters
        self._weights: dict[str, Tensor] = {}
        self._stepped: dict[str, nn.Parameter] = {}  # what the optimizer steps: a trained weight itself, or its master
        self._masters: list[Tensor] = []  # buffers of masters
        self._state_bytes = 0
        self._newer_on_device: dict[TensorRole, set[str]] = {role: set() for role in TensorRole}
        self._newer_on_host: dict[TensorRole, set[str]] = {role: set() for role in TensorRole}
        self._watched: dict[str, Tensor | None] = {}  # weights that may be written unseen; a copy of each resident one
        self._versions: dict[str, int] = {}  # of packed weights, as they are on the device
        self._written: set[str] = set()  # weights that the program may have written since `pop_written`
        self._norm_buffers = HostBuffers(device)
        self._last_read: Event | None = None  # after the last copy from host memory; None: it is done

    def holds(self, packs: Sequence[ParameterNames]) -> bool:
        """Return whether exactly these packs (the names of each one's parameters) are resident."""
        return tuple(packs) == self._names

    @property
    def nbytes(self) -> int:
        """Device bytes of weights, masters and optimizer state."""
        buffers = (*(copy.buffer for copy in self._packs), *self._masters)
        return sum(b.numel() * b.element_size() for b in buffers) + self._state_bytes

    def make_resident(self, packs: Sequence[ParameterNames]) -> list[DeviceCopy]:
        """Return up-to-date device copies of exactly these packs, in forward order; if they do not fit, no pack stays."""
        if self.holds(packs):
            self.sync_to_device()
        else:
            self.evict_all()
            try:
                for names in packs:
                    self._load_pack(names)
                self._names = tuple(packs)
            except BaseException:
                self.evict_all()
                raise
        return list(self._packs)

    def _load_pack(self, names: ParameterNames) -> None:
        fresh = tuple(name for name in names if name not in self._weights)
        copy = self._device_copies.swap_in(fresh, TrafficKind.RESIDENT)
        self._packs.append(copy)
        copy.wait(self._device)
        for name in fresh:
            self._weights[name] = copy.memory[name] if name in self._store.packed else copy.leaves[name].detach()
        self._written.update(fresh)  # they were not watched so far
        self._versions |= {name: self._store.packed[name].version for name in fresh if name in self._store.packed}
        for name in fresh:
            if name in self._watched:
                self._watched[name] = self._store.weight(name).clone()
        present = {name: self._weights[name] for name in names if name not in copy.memory}
        if present:
            copy.leaves.add(self._device_copies.leaves_over(present))
            copy.memory.update(present)
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
        for host, there in tensors:
            moved += there.copy_(host, non_blocking=True).nbytes
        for name in names:
            assert self._optimizer is not None
            moved += self._optimizer.copy_state_to_device(name, self._stepped[name])
        if moved:
            self._ledger.book_in(TrafficKind.RESIDENT, moved)
            self._last_read = self._device.record(Stream.COMPUTE)

    def _pair(self, role: TensorRole, name: str) -> tuple[Tensor, Tensor]:
        """Return the host's tensor and the device's, of a weight or a master."""
        if role is TensorRole.WEIGHT:
            return self._store.weight(name), self._weights[name]
        return self._store.masters[name].detach(), self._stepped[name].detach()

    def _has_own_master(self, name: str) -> bool:
        return name in self._stepped and self._store.compute_copy(name) is not None

    @torch.inference_mode(False)  # optimizer state that is made meanwhile will be stepped in place
    def sync_to_device(self) -> None:
        """Copy to the device what has been written on the host."""
        self.notice_replaced_state()
        for name in self._watched:
            self._find_write(name)
        for name, before in self._versions.items():
            version = self._store.packed[name].version
            if version != before:
                self._versions[name] = version
                self.note_weight_written(name)
        tensors = []
        for role in (TensorRole.WEIGHT, TensorRole.MASTER):
            tensors += [self._pair(role, name) for name in self._weights if name in self._newer_on_host[role]]
        self._copy_in(tensors, [name for name in self._stepped if name in self._newer_on_host[TensorRole.STATE]])
        for names in self._newer_on_host.values():
            names.clear()

    def finish_reads(self) -> None:
        """Wait until no queued copy reads host memory any more, so that it may be written."""
        self._device_copies.finish_reads()
        if self._last_read is not None:
            self._last_read.synchronize()
            self._last_read = None

    @property
    def held(self) -> Collection[str]:
        """The names of all weights that are resident."""
        return self._weights

    def leaves(self, names: Iterable[str]) -> Leaves:
        """Return the device's leaf tensors of those of `names` that are resident."""
        leaves = Leaves({})
        packed: dict[str, Tensor] = {}
        for name in names:
            if name not in self._weights:
                continue
            if name in self._store.packed:
                packed[name] = self._weights[name]
            else:
                leaves[name] = next(copy.leaves[name] for copy in self._packs if name in copy.leaves)
        if packed:
            leaves.add(self._device_copies.leaves_over(packed))
        return leaves

    def evict_all(self) -> None:
        """Copy what changed to the host, and free everything on the device."""
        self.sync_to_host()
        for name in self._watched:
            self._find_write(name)
            self._watched[name] = None
        self.clear_gradients()
        for copy in self._packs:
            self._device_copies.evict(copy)
        for buffer in self._masters:
            self._device.free(buffer)
        if self._optimizer is not None:
            self._optimizer.state.clear()
        self._device.discharge(self._state_bytes)
        self._state_bytes = 0
        self._names = ()
        for names in self._newer_on_host.values():
            names.clear()
        self._packs.clear()
        self._masters.clear()
        self._weights.clear()
        self._versions.clear()
        self._stepped.clear()

    def destroy(self) -> None:
        """Drop all packs, and free page-locked memory."""
        self.evict_all()
        self._norm_buffers.destroy()

    # ---- what the program reads and writes on the host

    def sync_to_host(self) -> None:
        """Bring all weights, masters and optimizer state on the host up to date."""
        for role in TensorRole:
            self._to_host(role, tuple(self._weights))

    def weight_to_host(self, name: str) -> None:
        """Bring the weight of `name` on the host up to date."""
        self._to_host(TensorRole.WEIGHT, (name,))

    def master_to_host(self, name: str) -> None:
        """Bring the master of `name` on the host up to date, which may be the weight itself."""
        self._to_host(TensorRole.MASTER if self._has_own_master(name) else TensorRole.WEIGHT, (name,))

    def state_to_host(self, name: str) -> None:
        """Bring the optimizer's state of `name` on the host up to date."""
        self._to_host(TensorRole.STATE, (name,))

    def hand_out_state(self, names: Iterable[str]) -> None:
        """Bring the optimizer's state of `names` on the host up to date, for a program that may write into it."""
        resident = tuple(name for name in names if name in self._stepped)
        self._to_host(TensorRole.STATE, resident)
        self._newer_on_host[TensorRole.STATE].update(resident)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _to_host(self, role: TensorRole, names: ParameterNames) -> None:
        self.notice_replaced_state()
        stale = [name for name in names if name in self._newer_on_device[role]]
        if not stale:
            return
        moved = 0
        for name in stale:
            if role is TensorRole.STATE:
                assert self._optimizer is not None
                moved += self._optimizer.copy_state_to_host(name, self._stepped[name])
            else:
                on_host, on_device = self._pair(role, name)
                moved += on_host.copy_(on_device, non_blocking=True).nbytes
        self._ledger.book_out(TrafficKind.RESIDENT, moved)
        # The program reads the host's tensors right after this.
        self._device.record(Stream.COMPUTE).synchronize()
        # Noted only now: the wait may be interrupted, and the program may go on.
        self._newer_on_device[role].difference_update(stale)

    def notice_replaced_state(self) -> None:
        """Count the optimizer's state as written on the host if the program has replaced it."""
        if self._optimizer is not None and self._optimizer.watch_replaced_state():
            self._newer_on_device[TensorRole.STATE].clear()
            self._newer_on_host[TensorRole.STATE].update(self._stepped)

    def note_weight_written(self, name: str) -> None:
        """Note that the program writes into the weight of `name`, which is up to date on the host."""
        self._written.add(name)
        if name in self._weights:
            self._newer_on_host[TensorRole.WEIGHT].add(name)

    def note_master_written(self, name: str) -> None:
        """Note that the master of `name` has been written on the host, where it is up to date."""
        if name in self._weights:
            self._newer_on_host[TensorRole.MASTER if self._has_own_master(name) else TensorRole.WEIGHT].add(name)

    def note_state_written(self, name: str) -> None:
        """Note that the optimizer's state of `name` has been written on the host, where it is up to date."""
        if name in self._stepped:
            self._newer_on_host[TensorRole.STATE].add(name)

    def note_all_written(self) -> None:
        """Count everything as written on the host, where it is up to date."""
        for name in self._weights:
            self.note_weight_written(name)
            self.note_master_written(name)
            self.note_state_written(name)

    @torch.inference_mode(False)  # what is watched will be written in place
    def watch(self, name: str) -> None:
        """Watch for writes into the weight of `name`, which is up to date on the host, from now on."""
        if self._watched.get(name) is None:
            self._watched[name] = self._store.weight(name).clone() if name in self._weights else None

    def unwatch(self, name: str) -> None:
        """Note whether the weight of `name` has been written, and stop watching it."""
        if name in self._watched:
            self._find_write(name)
            del self._watched[name]

    def pop_written(self, name: str) -> bool:
        """Return whether the program may have written into the weight of `name` since this was asked before."""
        if name not in self._weights:
            return True
        self._find_write(name)
        found = name in self._written
        self._written.discard(name)
        return found

    @torch.no_grad()
    def _find_write(self, name: str) -> None:
        """Note a write into a watched weight on the host, by comparing it with the copy of it, if there is one."""
        before, weight = self._watched.get(name), self._store.weight(name)
        if before is not None and not same_bits(before, weight):
            before.copy_(weight)
            self.note_weight_written(name)

    # ---- gradients and updates

    @torch.no_grad()
    def gradient(self, name: str) -> Tensor | None:
        """Return the gradient of `name`: the first pack's sum in backward order, to which the other packs' are added."""
        total: Tensor | None = None
        for copy in reversed(self._packs):
            part = self._device_copies.gradient(copy, name)
            if total is None:
                total = part
            elif part is not None:
                total.add_(part)
                self._device_copies.clear_gradient(copy, name)
        return total

    @torch.no_grad()
    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Add `gradient` (on any device) to the gradient of `name` on the device."""
        copy = next(copy for copy in reversed(self._packs) if name in copy.leaves)
        self._device_copies.add_gradient(copy, name, gradient)

    def pop_all(self) -> dict[str, Tensor]:
        """Remove all gradients and their norms, and return copies of the gradients on the host."""
        on_host = self.copy_to_host(self._weights)
        self.clear_gradients()
        return on_host

    def send_norms(self) -> Callable[[], Mapping[str, Tensor]]:
        """Issue the copy of all norms so far to the host; return a function, for any thread, that waits for them."""
        names = tuple(self.norms)
        if not names:
            return dict
        buffer = self._norm_buffers.acquire(self, len(names) * torch.float32.itemsize)
        host = buffer.tensor(torch.Size((len(names),)), (1,), torch.float32)
        host.copy_(torch.stack(list(self.norms.values())), non_blocking=True)
        self._ledger.book_out(TrafficKind.RESIDENT, host.numel() * host.element_size())
        arrived = self._device.record(Stream.COMPUTE)
        self.norms.clear()

        def read() -> Mapping[str, Tensor]:
            arrived.synchronize()
            norms = dict(zip(names, host.clone().unbind(), strict=True))
            self._norm_buffers.release(buffer, arrived)
            return norms

        return read

    @torch.no_grad()
    def update(self, names: Iterable[str], hyper: Hyper, coefficient: Tensor | None, norms_known: bool) -> None:
        """Update `names` from their gradients, which are dropped; `coefficient` and `norms_known` as in `_scale`."""
        assert self._optimizer is not None
        gradients: dict[str, Tensor] = {}
        for name, total in self._trained(names):
            gradients[name] = total.to(torch.float32)
            self._scale(name, gradients[name], coefficient, norms_known)
        self.received.update(gradients)
        stepped = {name: self._stepped[name] for name in gradients}
        for name in stepped:
            self._note_updated(name)
        self._optimizer.step(stepped, gradients, hyper)
        for name, parameter in stepped.items():
            if self._store.compute_copy(name) is not None:
                self._weights[name].copy_(parameter)
        self.clear_gradients(names)

    def _note_updated(self, name: str) -> None:
        """Note that the host's weight, master and optimizer state of `name` are out of date."""
        for role in TensorRole:
            if role is TensorRole.MASTER and not self._has_own_master(name):
                continue
            self._newer_on_device[role].add(name)
            self._newer_on_host[role].discard(name)
        self._watched.pop(name, None)
        self._written.discard(name)

    def clear_gradients(self, names: Iterable[str] | None = None) -> None:
        if names is None:
            self.norms.clear()
        chosen = list(self._weights if names is None else names)
        for copy in self._packs:
            for name in chosen:
                self._device_copies.clear_gradient(copy, name)
