"""Buffers of a model's modules: their copies on the device, and the changes that forward passes make to them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harmony_ds.device.base import HOME, Device
from harmony_ds.model.patching import patched
from harmony_ds.model.sameness import equal
from harmony_ds.offload.ledger import Ledger, TrafficKind

Buffers = list[tuple[nn.Module, dict[str, Tensor | None]]]


def updates_statistics(module: nn.Module) -> bool:
    """Return whether a forward pass updates buffers without raising their version, as torch's batch_norm does."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.training


def reads_statistics(module: nn.Module) -> bool:
    """Return whether a forward pass normalizes by running statistics."""
    is_norm = isinstance(module, nn.modules.batchnorm._NormBase)
    return is_norm and not module.training and module.running_mean is not None


def buffers_of(modules: Sequence[nn.Module]) -> list[Tensor]:
    return [b for module in modules for b in module._buffers.values() if b is not None]


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers in the module's state dict."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    }


def versions(modules: Sequence[nn.Module]) -> list[tuple[Tensor, int]]:
    """Return each buffer whose changes its version shows, and that version; not those of training normalization."""
    return [(b, b._version) for b in buffers_of([m for m in modules if not updates_statistics(m)])]


def clone_buffers(modules: Sequence[nn.Module]) -> Buffers:
    """Return copies of the buffers of `modules`, for `substituted_buffers`."""
    return [(m, {key: None if b is None else b.clone() for key, b in m._buffers.items()}) for m in modules]


def substituted_buffers(own: Buffers) -> patched:
    """Make the modules of `own` hold these buffers while the context is open."""
    return patched([(module.__dict__, "_buffers", buffers) for module, buffers in own])


_COMPARED_BYTES = 1 << 20
"""Buffers up to this size are compared by value, which shows what the program wrote through `.data` between steps."""


@dataclass(slots=True, eq=False)
class _BufferCopy:
    """A host buffer and its copy on device `number`; their versions, and a small one's values, when both were equal."""

    host: Tensor
    host_version: int
    device: Tensor
    device_version: int
    number: int
    values: Tensor | None = None

    def note(self, host: Tensor) -> None:
        """Note that `host` and the copy are equal now."""
        self.host_version, self.device_version = host._version, self.device._version
        self.values = host.clone() if host.nbytes <= _COMPARED_BYTES and not host.is_meta else None

    def is_fresh(self, host: Tensor) -> bool:
        return self.host_version == host._version and (self.values is None or torch.equal(self.values, host))


class DeviceBuffers:
    """A model's buffers on the device: copied once, and copied back if the forward pass changed them."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        device: Device,
        ledger: Ledger,
        swapped: Mapping[nn.Module, Collection[str]],
    ) -> None:
        """Hold the buffers of `modules`, but for `swapped` ones (keys by module), which are swapped as weights are."""
        self._swapped = swapped
        self._device = device
        self._ledger = ledger
        self._copies: dict[int, _BufferCopy] = {}  # by the id of the host's
        self._unversioned: set[nn.Module] = set()  # modules whose forward writes to buffers through `.data`
        self._places: Mapping[nn.Module, int] = {}
        self.are_written = False  # whether forward passes have been seen to change any
        self.find_owners(modules)

    def find_owners(self, modules: Iterable[nn.Module]) -> None:
        """Hold the buffers that `modules` have now, some of which may be new."""
        self._owners = [module for module in modules if self._staying(module)]
        staying = {id(buffer): buffer for module in self._owners for buffer in self._staying(module).values()}
        self.nbytes = sum(buffer.nbytes for buffer in staying.values())

    def _staying(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the buffers of a module that stay on the device."""
        away = self._swapped.get(module, ())
        return {key: buffer for key, buffer in module._buffers.items() if buffer is not None and key not in away}

    @property
    def copied_bytes(self) -> int:
        return sum(copy.device.nbytes for copy in self._copies.values())

    @contextmanager
    def installed(self, keep: bool, places: Mapping[nn.Module, int]) -> Iterator[None]:
        """Make modules hold the device copies; changes to them are kept if `keep` and nothing was raised.

        Args:
            places: numbers of the devices of modules whose buffers are not on HOME.
        """
        if places != self._places:
            self.drop()
            self._places = places
        for module in self._owners:
            if not self._is_fresh(module):
                self._forget(self._staying(module).values())
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
                    if module in self._unversioned or _changed(module, copies, self._swapped.get(module, ())):
                        if finished and keep:
                            self._copy_back(module, host, copies)
                        else:
                            self._forget(host.values())

    def find_unversioned_writes(self) -> set[nn.Module]:
        """Return the modules whose buffers forward passes write to without raising versions, the last one's included.

        To be called after a forward pass, while the copies are installed.
        """
        copies = {id(copy.device): copy for copy in self._copies.values()}
        for module in self._owners:
            now = buffers_of([module])
            known = [c for b in now if (c := copies.get(id(b))) and b._version == c.device_version]
            same = all(c.device.is_meta or equal(c.device.cpu(), c.host) for c in known)
            if not same and not updates_statistics(module):
                self._unversioned.add(module)
        return self._unversioned

    def _is_fresh(self, module: nn.Module) -> bool:
        """Return whether the program has not written to the module's host buffers since they were copied."""
        own = self._staying(module).values()
        return all((copy := self._copies.get(id(b))) is not None and copy.is_fresh(b) for b in own)

    @torch.inference_mode(False)  # passes outside of it use the same copies, and read their versions
    def _copies_of(self, module: nn.Module) -> dict[str, _BufferCopy]:
        self._device.enter(self._places.get(module, HOME))
        return {key: self._copy(host) for key, host in self._staying(module).items()}

    def _copy(self, host: Tensor) -> _BufferCopy:
        known = self._copies.get(id(host))
        if known is None:
            self._device.charge(host.nbytes, "a buffer of the model")
            device = self._device.upload(host)
            known = self._copies[id(host)] = _BufferCopy(
                host, host._version, device, device._version, self._device.number
            )
            known.note(host)
            self._ledger.book_in(TrafficKind.DATA, host.nbytes)
        return known

    @torch.inference_mode(False)
    def _copy_back(self, module: nn.Module, host: dict[str, Tensor | None], copies: dict[str, _BufferCopy]) -> None:
        """Copy device buffers into the host's, or put them in their place where shape or dtype changed."""
        self.are_written = True
        for key, now in module._buffers.items():
            if now is None or key in self._swapped.get(module, ()):
                continue
            self._ledger.book_out(TrafficKind.DATA, now.nbytes)
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
        self._forget([copy.host for copy in self._copies.values()])

    def _forget(self, hosts: Iterable[Tensor | None]) -> None:
        for host in hosts:
            known = self._copies.pop(id(host), None)
            if known is not None:
                self._device.enter(known.number)
                self._device.discharge(known.device.nbytes)
                self._device.enter(HOME)


def _changed(module: nn.Module, copies: dict[str, _BufferCopy], swapped: Collection[str]) -> bool:
    """Return whether a forward pass has changed or replaced buffers of `module`: `copies`, and those that are `swapped`."""
    return updates_statistics(module) or any(
        buffer is not None
        and key not in swapped
        and (key not in copies or buffer is not copies[key].device or buffer._version != copies[key].device_version)
        for key, buffer in module._buffers.items()
    )
