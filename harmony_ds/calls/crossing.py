"""Tensors that go from one device to another, where one process drives several.

A layer's arguments go to the layer's device when it is called, or before (MOVE). Between layers, where operands lie on
different devices, they go to the device of the last layer that ran; what is changed in place stays where it is. A crossing
is part of the autograd graph: its gradient crosses back.

    MOVE, or the call     argument --Crossing--> argument of the layer     copied by the PEER stream
    backward, MOVE_BACK   gradient <--Crossing-- gradient

Where torch tells the devices apart (CUDA), a tensor is where it is. Where it does not (CPU devices, logical devices of one
GPU), it is where the attribute says that was set when it was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from harmony_ds.calls.arguments import change_contents
from harmony_ds.calls.row_parts import parts_moved
from harmony_ds.calls.trees import map_tensors, tensors_in
from harmony_ds.device.base import HOME, Device, Event, Stream
from harmony_ds.device.group import DeviceGroup
from harmony_ds.errors import ModelError
from harmony_ds.offload.ledger import Ledger

_PLACE = "_harmony_device"
_COPIES = "_harmony_crossed"
_CHANGED = "_harmony_changed"
_Copies = dict[int, tuple[int, Tensor]]
"""By device, the copy of a tensor there, and the version that it is of."""


class Crossings:
    """Moves tensors between the devices of one process."""

    def __init__(self, device: Device, ledger: Ledger) -> None:
        self._group = device if isinstance(device, DeviceGroup) else None
        self._ledger = ledger
        self._numbers: dict[torch.device, int] = {}  # the first of those that are one to torch
        for number, member in enumerate((device,) if self._group is None else self._group.members):
            self._numbers.setdefault(member.torch_device, number)
        self._leaving: dict[int, tuple[Event, Tensor]] = {}
        self._of_leaves: list[_Copies] = []  # copies, whose graphs hold the leaves that hold them
        self._input_copies: list[
            tuple[Tensor, Tensor, int]
        ] = []  # to the layer that runs: tensor, copy, the copy's version

    @property
    def between_layers(self) -> Callable[[], AbstractContextManager[object]] | None:
        """What makes the context that code between layers runs in; None: it needs none."""
        return None if self._group is None else lambda: _Alignment(self)

    # ---- where tensors are

    def device_of(self, tensor: Tensor) -> int | None:
        """The device of `tensor`; None: it is on the host.

        Raises:
            ModelError: a layer changed a copy of `tensor` in place, which on one device is `tensor`.
        """
        if hasattr(tensor, _CHANGED):
            raise ModelError(
                f"layer {getattr(tensor, _CHANGED)} changes its input of shape {tuple(tensor.shape)} in place, and other "
                "code reads that input afterwards. It came from another device, where it has not changed. Let the layer "
                "change a copy (x = x + y instead of x += y), or train on one device."
            )
        place = self._numbers.get(tensor.device)
        return place if place is None or self._is_apart else getattr(tensor, _PLACE, place)

    @property
    def _is_apart(self) -> bool:
        """Whether torch tells all devices apart, so that no tensor needs to say where it is."""
        return self._group is None or self._group.is_apart

    def mark(self, tree: Any, place: int | None = None) -> None:
        """Tensors of `tree` that were made just now are on the current device, or on `place`."""
        if self._group is not None and not self._is_apart:
            map_tensors(self._put(self._group.number if place is None else place), tree)

    def _put(self, place: int) -> Callable[[Tensor], Tensor]:
        def put(tensor: Tensor) -> Tensor:
            if not hasattr(tensor, _PLACE):
                setattr(tensor, _PLACE, place)
            return tensor

        return put

    # ---- moving them

    def to_current(self, tensors: list[Tensor]) -> list[Tensor]:
        """`tensors`, those that are on another device move to the current one."""
        return tensors if self._group is None else [self.move(tensor) for tensor in tensors]

    @contextmanager
    def running_on(self, place: int | None = None) -> Iterator[None]:
        """A context whose operations run on `place` (None: the current device), as torch runs them where their operands
        lie if it tells the devices apart.
        """
        if self._group is None or place in (None, self._group.number) or self._is_apart:
            yield
            return
        here = self._group.number
        self._group.enter(place)
        try:
            yield
        finally:
            self._group.enter(here)

    def to_home(self, tensor: Tensor) -> Tensor:
        """`tensor` on HOME."""
        return tensor if self._group is None else self.move(tensor, HOME)

    def values_to_current(self, values: list[Any]) -> list[Any]:
        """The same of arguments and what they hold. Containers stay the caller's, for layers write into them."""
        return values if self._group is None else [self._value_to_current(value) for value in values]

    def _value_to_current(self, value: Any) -> Any:
        assert self._group is not None
        if all(self.device_of(tensor) in (None, self._group.number) for tensor in tensors_in(value)):
            return value
        if change_contents(value, self._value_to_current):
            return value
        return map_tensors(self.move, value)

    def move(self, tensor: Tensor, place: int | None = None) -> Tensor:
        """`tensor` on the current device, or on `place`: move there once, as long as it lives."""
        group = self._group
        assert group is not None
        source, target = self.device_of(tensor), group.number if place is None else place
        if source is None or source == target:
            return tensor
        copies: _Copies = tensor.__dict__.setdefault(_COPIES, {})
        if target not in copies or copies[target][0] != tensor._version:
            with torch.enable_grad():
                pairs = parts_moved(tensor, lambda whole: self.move(whole, target))  # once for all micro-batches
                pairs = pairs or [(tensor, _Crossing.apply(tensor, self, source, target))]  # type: ignore[no-untyped-call]
            for own, made in pairs:
                if not self._is_apart:
                    setattr(made, _PLACE, target)
                own.__dict__.setdefault(_COPIES, {})[target] = own._version, made
            if tensor.is_leaf and tensor.requires_grad:
                self._of_leaves.append(copies)
        copy = copies[target][1]
        self._input_copies.append((tensor, copy, copy._version))
        return copy

    def check_input_copies(self, layer: str) -> None:
        """Nobody may read a tensor any more of which `layer` has just changed a copy; see `place`."""
        for tensor, copy, version in self._input_copies:
            if copy._version != version:
                setattr(tensor, _CHANGED, layer)
        self._input_copies.clear()

    def copy(self, tensor: Tensor, source: int, target: int) -> Tensor:
        """A copy of `tensor` on another device, there before what its compute stream does next."""
        assert self._group is not None
        there, here = self._group.members[source], self._group.members[target]
        self._release_sent(source)
        # CUDA copies on the source's current stream, and lets the target's wait.
        made = there.record(Stream.COMPUTE)
        there.wait(Stream.PEER, made)
        here.wait(Stream.PEER, made)
        try:
            with torch.no_grad(), there.on(Stream.PEER), here.on(Stream.PEER):
                copy = tensor.detach().to(here.torch_device, copy=True, non_blocking=True)
        finally:
            copied = here.record(Stream.PEER)
            self._leaving[source] = copied, tensor
        here.wait(Stream.COMPUTE, copied)
        here.used(copy)
        self._ledger.book_peer(source, target, tensor.numel() * tensor.element_size())
        return copy

    def _release_sent(self, source: int) -> None:
        """The memory of what left last belongs to the compute stream: its next owner there comes after the copy."""
        assert self._group is not None
        if source in self._leaving:
            copied, _ = self._leaving.pop(source)
            self._group.members[source].wait(Stream.COMPUTE, copied)

    def finish(self) -> None:
        """Drops what is on its way, each after its copy, and the copies of parameters."""
        for source in list(self._leaving):
            self._release_sent(source)
        self._input_copies.clear()
        while self._of_leaves:
            self._of_leaves.pop().clear()


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, crossings: Crossings, source: int, target: int) -> Tensor:
        ctx.harmony_way = crossings, source, target
        return crossings.copy(tensor, source, target)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        crossings, source, target = ctx.harmony_way
        return crossings.copy(gradient, target, source), None, None, None


class _Alignment(TorchFunctionMode):
    """Moves operands that lie on different devices to the current one."""

    def __init__(self, crossings: Crossings) -> None:
        super().__init__()
        self._crossings = crossings

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [*tensors_among(args), *tensors_among(kwargs.values())]
        crossings = self._crossings
        places = {place for tensor in tensors if (place := crossings.device_of(tensor)) is not None}
        if len(places) > 1:
            written = kwargs.get("out", tensors[0] if writes(func) else None)
            place = crossings.device_of(written) if isinstance(written, Tensor) else None
            args, kwargs = map_tensors(lambda tensor: crossings.move(tensor, place), (args, kwargs))
            places = {place} if place is not None else set()
        with crossings.running_on(*places):
            result = func(*args, **kwargs)
        if isinstance(result, (Tensor, tuple, list)):
            crossings.mark(result, *places)
        return result


def tensors_among(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among `values`, and in lists and tuples among them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += tensors_among(value)
    return found


def writes(func: Any) -> bool:
    """Whether `func` changes its first operand in place."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
