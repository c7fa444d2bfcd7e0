"""Buffers of a model's modules: their copies on the device, what forward passes do to them, and whoever looks at them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.calls.held import held
from harmony_ds.calls.sameness import equal
from harmony_ds.device.base import Device
from harmony_ds.offload.ledger import Kind, Ledger

_COMPARED_BYTES = 1 << 20
"""So large buffers are compared with what they were; what writes to larger ones by `.data` is not seen."""

Buffers = list[tuple[nn.Module, dict[str, Tensor | None]]]


def changes_buffers_unseen(module: nn.Module) -> bool:
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
    return [(b, b._version) for b in buffers_of([m for m in modules if not changes_buffers_unseen(m)])]


def copied_buffers(modules: Sequence[nn.Module]) -> Buffers:
    """What the buffers of `modules` hold, for `buffers_apart`."""
    return [(m, {key: None if b is None else b.clone() for key, b in m._buffers.items()}) for m in modules]


@contextmanager
def buffers_apart(own: Buffers) -> Iterator[None]:
    """While open, modules hold `own` buffers; what is done to them is done to nobody else's."""
    with held((module.__dict__, "_buffers", buffers) for module, buffers in own):
        yield


@dataclass(slots=True, eq=False)
class _Copy:
    """A host buffer and its copy on the device, with the versions at which they were the same.

    Attributes:
        values: of a small one, what it held then: `.data` is written to without a rise of the version.
    """

    host: Tensor
    host_version: int
    device: Tensor
    device_version: int
    values: Tensor | None = None

    def note(self, host: Tensor) -> None:
        """They are the same now."""
        self.host_version, self.device_version = host._version, self.device._version
        compared = host.nbytes <= _COMPARED_BYTES and not host.is_meta
        self.values = host.clone() if compared else None

    def is_fresh(self) -> bool:
        """Whether nobody has written to the host buffer since."""
        same = self.values is None or torch.equal(self.host, self.values)
        return same and self.host_version == self.host._version


class DeviceBuffers:
    """The buffers of a model on the device: copied once, brought back where the forward pass changed them.

    Attributes:
        written_unseen: modules whose forward pass was seen to write to buffers without raising their version (`.data`).
    """

    def __init__(self, modules: Sequence[nn.Module], device: Device, ledger: Ledger) -> None:
        self._owners = [module for module in modules if buffers_of([module])]
        self._device = device
        self._ledger = ledger
        self._copies: dict[int, _Copy] = {}  # by the id of the host's
        self._installed: list[tuple[nn.Module, dict[str, Any], dict[str, _Copy]]] = []
        self.written_unseen: set[nn.Module] = set()
        self._written = False
        self.nbytes = sum(b.nbytes for b in {id(b): b for b in buffers_of(self._owners)}.values())

    @property
    def are_written(self) -> bool:
        """Whether forward passes have been seen to change any."""
        return self._written

    @property
    def copied_bytes(self) -> int:
        """Of the copies that are there now."""
        return sum(copy.device.nbytes for copy in self._copies.values())

    def install(self) -> None:
        """Modules hold the copies."""
        for module in self._owners:
            host = module.__dict__["_buffers"]
            copies = {key: self._copy(buffer) for key, buffer in host.items() if buffer is not None}
            self._installed.append((module, host, copies))
            module.__dict__["_buffers"] = {
                key: copies[key].device if key in copies else None for key in dict.keys(host)
            }

    def _copy(self, host: Tensor) -> _Copy:
        known = self._copies.get(id(host))
        if known is not None and known.is_fresh():
            return known
        if known is None:
            self._device.charge(host.nbytes, "a buffer of the model")
        copy = self._device.upload(host)
        self._ledger.book_in(Kind.DATA, host.nbytes)
        made = self._copies[id(host)] = _Copy(host, host._version, copy, copy._version)
        made.note(host)
        return made

    def look_for_unseen(self) -> set[nn.Module]:
        """Behind a forward pass: the modules that it has written to unseen, which are known from now on."""
        found = {
            module
            for module, _, copies in self._installed
            if not self._changed(module, copies)
            and any(not (c.device.is_meta or equal(c.device.cpu(), c.host)) for c in copies.values())
        }
        self.written_unseen |= found
        return found

    def take_back(self) -> None:
        """Copies what changed on the device into the host buffers (or in their place, if it was replaced)."""
        for module, host, copies in self._installed:
            if not self._changed(module, copies):
                continue
            self._written = True
            for key, now in module.__dict__["_buffers"].items():
                if now is not None:
                    self._ledger.book_out(Kind.DATA, now.nbytes)
                    self._take_back(host, key, now, copies.get(key))
            copies.clear()

    def _take_back(self, host: dict[str, Any], key: str, now: Tensor, copy: _Copy | None) -> None:
        target = host.get(key)
        if target is None or target.shape != now.shape or target.dtype != now.dtype:
            self._forget(target)
            host[key] = now.detach().to("cpu", copy=True)
            return
        with torch.no_grad():
            target.copy_(now)
        if copy is not None and copy.device is now:
            copy.note(target)
            self._copies[id(target)] = copy

    def restore(self) -> None:
        """Puts the host buffers back. Device copies that were changed but not taken back are made anew next time."""
        for module, host, copies in self._installed:
            if copies and self._changed(module, copies):
                for buffer in host.values():
                    self._forget(buffer)
            module.__dict__["_buffers"] = host
        self._installed.clear()

    def drop(self) -> None:
        """Drops every device copy."""
        for copy in list(self._copies.values()):
            self._forget(copy.host)

    def _forget(self, host: Tensor | None) -> None:
        known = self._copies.pop(id(host), None)
        if known is not None:
            self._device.discharge(known.device.nbytes)

    def _changed(self, module: nn.Module, copies: dict[str, _Copy]) -> bool:
        if changes_buffers_unseen(module) or module in self.written_unseen:
            return True
        now = module.__dict__["_buffers"]
        return any(
            buffer is not None
            and (key not in copies or buffer is not copies[key].device or buffer._version != copies[key].device_version)
            for key, buffer in now.items()
        )
