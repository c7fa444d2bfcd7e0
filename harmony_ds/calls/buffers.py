"""Buffers of a model's modules: their copies on the device, what forward passes do to them, and whoever looks at them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harmony_ds.calls.patching import patched
from harmony_ds.calls.sameness import equal
from harmony_ds.device.base import HOME, Device
from harmony_ds.offload.ledger import Kind, Ledger

Buffers = list[tuple[nn.Module, dict[str, Tensor | None]]]


def updates_statistics(module: nn.Module) -> bool:
    """Whether a forward pass updates buffers without raising their version, as torch's batch_norm does."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.training


def reads_statistics(module: nn.Module) -> bool:
    """Whether a forward pass computes with statistics that others have gathered."""
    return (
        isinstance(module, nn.modules.batchnorm._NormBase) and not module.training and module.running_mean is not None
    )


def buffers_of(modules: Sequence[nn.Module]) -> list[Tensor]:
    """Every buffer of `modules`."""
    return [b for module in modules for b in module._buffers.values() if b is not None]


def versions(modules: Sequence[nn.Module]) -> list[tuple[Tensor, int]]:
    """Buffers whose changes are seen by their versions. Normalization's own do not matter to what it gives."""
    return [(b, b._version) for b in buffers_of([m for m in modules if not updates_statistics(m)])]


def clone_buffers(modules: Sequence[nn.Module]) -> Buffers:
    """What the buffers of `modules` hold, for `substituted_buffers`."""
    return [(m, {key: None if b is None else b.clone() for key, b in m._buffers.items()}) for m in modules]


def substituted_buffers(own: Buffers) -> patched:
    """While open, modules hold `own` buffers; what is done to them is done to nobody else's."""
    return patched([(module.__dict__, "_buffers", buffers) for module, buffers in own])


_COMPARED_BYTES = 1 << 20
"""What the program writes by `.data` between steps is seen in buffers of at most so many."""


@dataclass(slots=True, eq=False)
class _Copy:
    """A host buffer and its copy on device `number`, with the versions, and what a small one held, when both were alike."""

    host: Tensor
    host_version: int
    device: Tensor
    device_version: int
    number: int
    values: Tensor | None = None

    def note(self, host: Tensor) -> None:
        """`host` and the copy are the same now."""
        self.host_version, self.device_version = host._version, self.device._version
        self.values = host.clone() if host.nbytes <= _COMPARED_BYTES and not host.is_meta else None

    def is_fresh(self, host: Tensor) -> bool:
        """Whether nobody has written to `host` since."""
        return self.host_version == host._version and (self.values is None or torch.equal(self.values, host))


class DeviceBuffers:
    """The buffers of a model on the device: copied once, brought back where the forward pass changed them.

    Attributes:
        are_written: whether forward passes have been seen to change any.
    """

    def __init__(self, modules: Sequence[nn.Module], device: Device, ledger: Ledger) -> None:
        self._owners = [module for module in modules if buffers_of([module])]
        self._device = device
        self._ledger = ledger
        self._copies: dict[int, _Copy] = {}  # by the id of the host's
        self._unseen: set[nn.Module] = (
            set()
        )  # whose forward was seen to write to them without raising a version (`.data`)
        self._places: Mapping[nn.Module, int] = {}
        self.are_written = False
        self.nbytes = sum(b.nbytes for b in {id(b): b for b in buffers_of(self._owners)}.values())

    @property
    def copied_bytes(self) -> int:
        """Of the copies that are there now."""
        return sum(copy.device.nbytes for copy in self._copies.values())

    @contextmanager
    def installed(self, keep: bool, places: Mapping[nn.Module, int]) -> Iterator[None]:
        """While open, modules hold the copies. What is done to them is kept if `keep` and nothing was raised.

        Args:
            places: of several devices, the number of the one that a module's buffers are on, if not HOME.
        """
        if places != self._places:
            self.drop()
            self._places = places
        self._forget(buffer for module in self._owners if not self._is_fresh(module) for buffer in buffers_of([module]))
        owned = [(module, module._buffers, self._copies_of(module)) for module in self._owners]
        self._device.enter(HOME)
        finished = False
        with substituted_buffers(
            [(m, {**host, **{k: c.device for k, c in copies.items()}}) for m, host, copies in owned]
        ):
            try:
                yield
                finished = True
            finally:
                for module, host, copies in owned:
                    if module in self._unseen or _changed(module, copies):
                        if finished and keep:
                            self._take_back(module, host, copies)
                        else:
                            self._forget(host.values())

    def find_unversioned_writes(self) -> set[nn.Module]:
        """After a forward pass, while they are installed: modules that it has written to unseen, known from now on."""
        copies = {id(copy.device): copy for copy in self._copies.values()}
        for module in self._owners:
            known = [
                copy for b in buffers_of([module]) if (copy := copies.get(id(b))) and b._version == copy.device_version
            ]
            same = all(c.device.is_meta or equal(c.device.cpu(), c.host) for c in known)
            if not same and not updates_statistics(module):
                self._unseen.add(module)
        return self._unseen

    def _is_fresh(self, module: nn.Module) -> bool:
        """Whether nobody has written to its host buffers since; normalization raises the version of one of its own."""
        known = [(self._copies.get(id(buffer)), buffer) for buffer in buffers_of([module])]
        return all(copy is not None and copy.is_fresh(buffer) for copy, buffer in known)

    def _copies_of(self, module: nn.Module) -> dict[str, _Copy]:
        self._device.enter(self._places.get(module, HOME))
        return {key: self._copy(host) for key, host in module._buffers.items() if host is not None}

    def _copy(self, host: Tensor) -> _Copy:
        known = self._copies.get(id(host))
        if known is None:
            self._device.charge(host.nbytes, "a buffer of the model")
            device = self._device.upload(host)
            known = self._copies[id(host)] = _Copy(host, host._version, device, device._version, self._device.number)
            known.note(host)
            self._ledger.book_in(Kind.DATA, host.nbytes)
        return known

    def _take_back(self, module: nn.Module, host: dict[str, Tensor | None], copies: dict[str, _Copy]) -> None:
        """Copies what is on the device into the host buffers (or in their place, if it was replaced)."""
        self.are_written = True
        for key, now in module._buffers.items():
            if now is None:
                continue
            self._ledger.book_out(Kind.DATA, now.nbytes)
            target, copy = host.get(key), copies.get(key)
            if target is None or target.shape != now.shape or target.dtype != now.dtype:
                self._forget([target])
                host[key] = now.detach().to("cpu", copy=True)
                continue
            with torch.no_grad():
                target.copy_(now)
            if copy is not None and copy.device is now:
                copy.note(target)

    def drop(self) -> None:
        """Drops every device copy."""
        self._forget([copy.host for copy in self._copies.values()])

    def _forget(self, hosts: Iterable[Tensor | None]) -> None:
        for host in hosts:
            known = self._copies.pop(id(host), None)
            if known is not None:
                self._device.enter(known.number)
                self._device.discharge(known.device.nbytes)
                self._device.enter(HOME)


def _changed(module: nn.Module, copies: dict[str, _Copy]) -> bool:
    """Whether a forward pass has changed or replaced the buffers that `module` holds now, which were `copies`."""
    return updates_statistics(module) or any(
        buffer is not None
        and (key not in copies or buffer is not copies[key].device or buffer._version != copies[key].device_version)
        for key, buffer in module._buffers.items()
    )
