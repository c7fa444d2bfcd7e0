"""Copies of tensors between the devices that one process drives.

A layer's arguments move to the layer's device when it is called, or before (MOVE). Between layers, operands on different
devices move to the device of the last layer that ran; a tensor that is changed in place stays. A transfer is part of the
autograd graph: its gradient is transferred back.

    MOVE, or the call     argument --Transfer--> argument of the layer     copied by the PEER stream
    backward, MOVE_BACK   gradient <--Transfer-- gradient

CUDA devices are told by `tensor.device`. Devices that are one to torch (CPU devices, logical devices of one GPU) are told
by an attribute that a tensor gets when it is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from harmony_ds.device.base import Device, Event, Stream
from harmony_ds.device.group import DeviceGroup
from harmony_ds.device.live_bytes import tensors_among
from harmony_ds.errors import ModelError
from harmony_ds.model.arguments import change_contents
from harmony_ds.model.intercept import ContextFactory
from harmony_ds.model.slices import parts_moved
from harmony_ds.model.targets import GradientSum, GradientTarget, Targets
from harmony_ds.model.trees import map_tensors, tensors_in
from harmony_ds.offload.ledger import Ledger

_PLACE = "_harmony_device"
_COPIES = "_harmony_transferred"
_CHANGED = "_harmony_changed"
_CopiesByDevice = dict[int, tuple[int, Tensor]]
"""By device number: the version of a tensor that was copied there, and the copy."""


class DeviceTransfers:
    """Moves tensors between the devices of one process."""

    def __init__(self, device: Device, ledger: Ledger) -> None:
        self._group = device if isinstance(device, DeviceGroup) else None
        # Whether torch tells all devices apart, so that tensors need no attribute.
        self._has_distinct_devices = self._group is None or self._group.has_distinct_devices
        self._ledger = ledger
        self._numbers: dict[torch.device, int] = {}  # of devices that are one to torch, the first
        for number, member in enumerate((device,) if self._group is None else self._group.members):
            self._numbers.setdefault(member.torch_device, number)
        self._leaving: dict[int, tuple[Event, Tensor]] = {}
        self._of_leaves: list[_CopiesByDevice] = []  # freed by hand: copies and leaves refer to each other
        self._input_copies: list[tuple[Tensor, Tensor, int]] = []  # of the running layer: tensor, copy, its version

    @property
    def between_layers(self) -> ContextFactory | None:
        """A maker of the context that code between layers runs in; None: it needs none."""
        return None if self._group is None else lambda: _Alignment(self)

    def device_of(self, tensor: Tensor) -> int | None:
        """Return the number of the device of `tensor`; None: the host. Raise ModelError if a layer changed its copy."""
        if hasattr(tensor, _CHANGED):
            raise ModelError(
                f"layer {getattr(tensor, _CHANGED)} changes its input of shape {tuple(tensor.shape)} in place, and other "
                "code reads that input afterwards. It came from another device, where it has not changed. Let the layer "
                "change a copy (x = x + y instead of x += y), or train on one device."
            )
        place = self._numbers.get(tensor.device)
        return place if place is None or self._has_distinct_devices else getattr(tensor, _PLACE, place)

    def mark(self, tree: Any, place: int | None = None) -> None:
        """Note that the tensors of `tree`, just made, are on the current device or on `place`."""
        if self._group is not None and not self._has_distinct_devices:
            for tensor in tensors_in(tree):
                if not hasattr(tensor, _PLACE):
                    setattr(tensor, _PLACE, self._group.number if place is None else place)

    def to_current(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return `tensors` on the current device."""
        return tensors if self._group is None else [self.move(tensor) for tensor in tensors]

    @contextmanager
    def running_on(self, place: int | None = None) -> Iterator[None]:
        """Run operations on `place` (None: the current device), unless torch runs them where their operands are."""
        if self._group is None or place in (None, self._group.number) or self._has_distinct_devices:
            yield
            return
        here = self._group.number
        self._group.enter(place)
        try:
            yield
        finally:
            self._group.enter(here)

    def values_to_current(self, values: list[Any]) -> list[Any]:
        """Return arguments with their tensors on the current device, in the caller's containers: layers write there."""
        return values if self._group is None else [self._value_to_current(value) for value in values]

    def _value_to_current(self, value: Any) -> Any:
        assert self._group is not None
        if all(self.device_of(tensor) in (None, self._group.number) for tensor in tensors_in(value)):
            return value
        if change_contents(value, self._value_to_current):
            return value
        return map_tensors(self.move, value)

    def move(self, tensor: Tensor, place: int | None = None) -> Tensor:
        """Return `tensor` on the current device or on `place`; its copy there is kept as long as it lives."""
        if self._group is None:
            return tensor
        source, target = self.device_of(tensor), self._group.number if place is None else place
        if source is None or source == target:
            return tensor
        copies: _CopiesByDevice = tensor.__dict__.setdefault(_COPIES, {})
        if target not in copies or copies[target][0] != tensor._version:
            with torch.enable_grad():
                pairs = parts_moved(tensor, lambda whole: self.move(whole, target))  # once for all micro-batches
                pairs = pairs or [(tensor, _DeviceTransfer.apply(tensor, self, source, target))]  # type: ignore[no-untyped-call]
            for own, made in pairs:
                if not self._has_distinct_devices:
                    setattr(made, _PLACE, target)
                own.__dict__.setdefault(_COPIES, {})[target] = own._version, made
            if tensor.is_leaf and tensor.requires_grad:
                self._of_leaves.append(copies)
        copy = copies[target][1]
        self._input_copies.append((tensor, copy, copy._version))
        return copy

    def follow(
        self, tensors: list[Tensor], targets: Targets, gradients: list[Tensor | None]
    ) -> tuple[list[Tensor], Targets, list[Tensor | None]]:
        """Return what a recorded call is propagated through with, on the current device.

        It was recorded on another one if there has been a new plan since: gradients of its inputs go back there.

        Args:
            tensors: its saved inputs.
            targets: of their gradients.
            gradients: of its outputs.
        """
        if self._group is None or not self._has_distinct_devices:
            return tensors, targets, gradients
        ends: Targets = []
        for target in targets:
            place = self._numbers.get(target.device) if isinstance(target, GradientSum) else None
            if target is None or place in (None, self._group.number):
                ends.append(target)
            else:
                ends.append(_SentBack(target, self, place))
        moved = [None if gradient is None else self.move(gradient) for gradient in gradients]
        return self.to_current(tensors), ends, moved

    def check_input_copies(self, layer: str) -> None:
        """Mark tensors whose copies `layer` has just changed in place: reading them is refused (`device_of`)."""
        if not self._input_copies:  # as on one device
            return
        for tensor, copy, version in self._input_copies:
            if copy._version != version:
                setattr(tensor, _CHANGED, layer)
        self._input_copies.clear()

    def copy(self, tensor: Tensor, source: int, target: int) -> Tensor:
        """Return a copy of `tensor` on another device.

        The PEER streams of both devices wait for what the sender has computed, and then copy. The receiver's compute stream
        waits for the copy; the sender's waits before it reuses the tensor's memory (`_release_sent`). The host waits for
        nothing.
        """
        assert self._group is not None
        sender, receiver = self._group.members[source], self._group.members[target]
        self._release_sent(source)
        # CUDA copies on the sender's current stream, and lets the receiver's wait.
        made = sender.record(Stream.COMPUTE)
        sender.wait(Stream.PEER, made)
        receiver.wait(Stream.PEER, made)
        try:
            with torch.no_grad(), sender.on(Stream.PEER), receiver.on(Stream.PEER):
                copy = tensor.detach().to(receiver.torch_device, copy=True, non_blocking=True)
        finally:
            copied = receiver.record(Stream.PEER)
            self._leaving[source] = copied, tensor
        receiver.wait(Stream.COMPUTE, copied)
        receiver.record_use(copy)
        self._ledger.book_peer(source, target, tensor.numel() * tensor.element_size())
        return copy

    def _release_sent(self, source: int) -> None:
        """Free the tensor that left last. Its memory is the compute stream's, which must wait for the copy first."""
        assert self._group is not None
        if source in self._leaving:
            copied, _ = self._leaving.pop(source)
            self._group.members[source].wait(Stream.COMPUTE, copied)

    def finish(self) -> None:
        """Free tensors on their way, each after its copy, and the copies of leaves."""
        for source in list(self._leaving):
            self._release_sent(source)
        self._input_copies.clear()
        while self._of_leaves:
            self._of_leaves.pop().clear()


class _SentBack:
    """Target of a gradient that is made on the current device, and belongs on another one, `place`."""

    def __init__(self, target: GradientTarget, device_transfers: DeviceTransfers, place: int | None) -> None:
        self._target = target
        self._device_transfers = device_transfers
        self._place = place

    def add(self, gradient: Tensor) -> None:
        self._target.add(self._device_transfers.move(gradient, self._place))

    def pop(self) -> Tensor | None:
        return self._target.pop()


class _DeviceTransfer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device_transfers: DeviceTransfers, source: int, target: int) -> Tensor:
        ctx.harmony_way = device_transfers, source, target
        return device_transfers.copy(tensor, source, target)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        device_transfers, source, target = ctx.harmony_way
        return device_transfers.copy(gradient, target, source), None, None, None


class _Alignment(TorchFunctionMode):
    """Torch function mode that moves operands on different devices to one of them."""

    def __init__(self, device_transfers: DeviceTransfers) -> None:
        super().__init__()
        self._device_transfers = device_transfers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [*tensors_among((args, kwargs))]
        device_transfers = self._device_transfers
        places = {place for tensor in tensors if (place := device_transfers.device_of(tensor)) is not None}
        if len(places) > 1:
            written = kwargs.get("out", tensors[0] if writes(func) else None)
            place = device_transfers.device_of(written) if isinstance(written, Tensor) else None
            args, kwargs = map_tensors(lambda tensor: device_transfers.move(tensor, place), (args, kwargs))
            places = {place} if place is not None else set()
        with device_transfers.running_on(*places):
            result = func(*args, **kwargs)
        if isinstance(result, (Tensor, tuple, list)):
            device_transfers.mark(result, *places)
        return result


def writes(func: Any) -> bool:
    """Return whether `func` changes its first operand in place."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
