"""Device copies of packs' weights, and their gradients.

A pack's weights are one device buffer, filled by the swap-in stream, with a leaf tensor per parameter for layer calls.
Gradients accumulate on those leaves, or in separate tensors of the accumulation dtype, until they are swapped out.

    swapped in     weights            from SWAP_IN to EVICT
    computing      weights, gradients of this pack
    swapped out    gradients          from SWAP_OUT to FREE_GRADIENTS, while the copy to the host is under way
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.decomposer.graph import share_of
from harmony_ds.device.base import Device, Event, Stream
from harmony_ds.errors import UnsupportedError
from harmony_ds.offload.host_store import HostStore, bypass_hooks
from harmony_ds.offload.ledger import Ledger, TrafficKind

_NONE: Mapping[int, bool] = {}


class Leaves(dict[str, nn.Parameter]):
    """Leaf tensors that a pack's layer calls are run with, by canonical name."""

    __slots__ = ("cache",)

    def __init__(self, leaves: Mapping[str, nn.Parameter]) -> None:
        super().__init__(leaves)
        self.cache: dict[object, Any] = {}  # objects that layer calls have derived from the leaves, by maker

    def drop_gradients(self) -> None:
        for leaf in self.values():
            leaf.grad = None


def leaf_over(memory: Tensor, parameter: nn.Parameter) -> nn.Parameter:
    """Return a leaf over `memory` with the attributes that the program has put on `parameter`, and its `requires_grad`."""
    # `data`: what is written into a parameter raises its own version, not that of all that share the memory.
    leaf = nn.Parameter(memory.data, requires_grad=parameter.requires_grad)
    leaf.__dict__.update(_attributes(parameter))
    return leaf


class DeviceCopy:
    """The parameters of one pack on the device.

    Attributes:
        leaves: by canonical name; autograd accumulates the running micro-batch's gradients in `.grad`.
        gradients: sums over micro-batches in the accumulation dtype, where that is not the leaves'.
        aside: sums from the leaves, while micro-batches that share a loss add up their gradients there.
        hooked: leaves that have the user's hooks.
        modes: of the call that hooks and `requires_grad` of the leaves are for; None: not known.
        arrived: event after the copies (promised, if from a disk); None: the compute stream waits for it already.
        added: parameters swapped in later, in buffers of their own.
    """

    def __init__(self, buffer: Tensor, leaves: Leaves, arrived: Event | Future[Event]) -> None:
        self.buffer = buffer
        self.leaves = leaves
        self.gradients: dict[str, Tensor] = {}
        self.aside: dict[str, Tensor] = {}
        self.hooked: set[str] = set()
        self.modes: object = None
        self.arrived: Event | Future[Event] | None = arrived
        self.added: list[DeviceCopy] = []

    def pop_arrival(self) -> Event | None:
        """Return the event after the copies, to be waited for once; OSError: a disk fails."""
        if isinstance(self.arrived, Future):
            self.arrived.exception()  # waits; if that is interrupted, the copies are still to come
        arrived, self.arrived = self.arrived, None
        return arrived.result() if isinstance(arrived, Future) else arrived

    def wait(self, device: Device) -> None:
        """Let the compute stream wait for the weights, once; OSError: a disk fails."""
        if (arrived := self.pop_arrival()) is not None:
            device.wait(Stream.COMPUTE, arrived)


class Residency:
    """Swaps packs in and out.

    Attributes:
        accumulation_dtype: of the sums of gradients.
    """

    def __init__(self, device: Device, store: HostStore, ledger: Ledger, accumulation_dtype: torch.dtype) -> None:
        self._device = device
        self._store = store
        self._ledger = ledger
        self.accumulation_dtype = accumulation_dtype
        self._reading: dict[int, Event | Future[Event]] = {}  # by device: after its last queued copy from the host

    @property
    def dtype(self) -> torch.dtype:
        return self._store.dtype

    @property
    def disk_bytes_per_ms(self) -> float:
        """The rate of the slowest disk that weights, masters or state lie on; infinite: none do."""
        disks = (self._store.disk, self._store.disk_weights)
        return min((disk.file.bytes_per_ms for disk in disks if disk is not None), default=math.inf)

    @property
    def disk_weight_bytes(self) -> int:
        """Bytes of each weight on a disk; 0: they are in memory."""
        return 0 if self._store.disk_weights is None else self.dtype.itemsize

    @property
    def accumulates_in_place(self) -> bool:
        """Whether `.grad` of the leaves has the accumulation dtype, so that autograd itself sums over micro-batches."""
        return self.accumulation_dtype == self._store.dtype

    def swap_in(
        self, names: Iterable[str], kind: TrafficKind = TrafficKind.WEIGHTS, rank: int = 0, devices: int = 1
    ) -> DeviceCopy:
        """Issue the copies of `names` on the swap-in stream, booked as `kind`; nothing waits for them yet.

        Of several `devices`, the one of number `rank` copies its share of the buffer (`share_of`).
        """
        pieces, disk = self._store.parts_of(names), self._store.disk_weights
        from_disk: list[tuple[Tensor, Tensor]] = []
        total = sum(piece.memory.numel() for piece in pieces)
        with self._buffer(total) as buffer:
            views: dict[str, Tensor] = {}
            offset = 0
            for piece in pieces:
                target = buffer[offset : offset + piece.memory.numel()]
                for part in _own_parts(total, rank, devices):
                    own = slice(max(0, part.start - offset), max(0, part.stop - offset))
                    memory = piece.memory[own]
                    if disk is None:
                        target[own].copy_(memory, non_blocking=True)
                    else:
                        from_disk.append((memory, target[own]))
                    self._ledger.book_in(kind, memory.numel() * memory.element_size())
                views |= {name: place.view(target) for name, place in piece.places.items()}
                offset += piece.memory.numel()
        here = self._device.record(Stream.SWAP_IN)
        arrived = self._reading[self._device.number] = here if disk is None else disk.swap_in(from_disk, here)
        with bypass_hooks():
            leaves = Leaves({name: leaf_over(view, self._store.parameters[name]) for name, view in views.items()})
        return DeviceCopy(buffer, leaves, arrived)

    @contextmanager
    def _buffer(self, numel: int) -> Iterator[Tensor]:
        """Allocate a buffer on the swap-in stream, which is current while the context is open; free it on errors."""
        buffer = None
        try:
            with torch.no_grad(), self._device.on(Stream.SWAP_IN):
                buffer = self._device.empty(numel, self._store.dtype)
                yield buffer
        except BaseException:
            if buffer is not None:
                self._device.free(buffer)
            raise

    def add_parameters(self, copy: DeviceCopy, names: Iterable[str]) -> None:
        """Swap in those of `names` that `copy` does not have, and add them to it."""
        missing = tuple(name for name in names if name not in copy.leaves)
        if missing:
            more = self.swap_in(missing)
            copy.added.append(more)
            more.wait(self._device)
            copy.leaves.update(more.leaves)
            copy.leaves.cache.clear()
            copy.modes = None

    def finish_reads(self) -> None:
        """Wait until no swap-in reads host memory any more: then it may be written."""
        for number, arrived in list(self._reading.items()):  # errors are those of the task that needs the weights
            (arrived.exception if isinstance(arrived, Future) else arrived.synchronize)()
            del self._reading[number]

    def modified_names(self, copy: DeviceCopy) -> list[str]:
        """Return the parameters of `copy` that have been written to: they differ from the host's."""
        disk, found = self._store.disk_weights, []
        for piece in self._store.parts_of(copy.leaves):
            values = piece.memory if disk is None else disk.file.copy_of(piece.memory)
            places = piece.places.items()
            found += [name for name, place in places if not same_bits(copy.leaves[name].detach(), place.view(values))]
        return found

    def accumulate(self, copy: DeviceCopy) -> None:
        """Add the gradients on the leaves to the sums, if those have another dtype than the leaves."""
        if self.accumulates_in_place:
            return
        came = {name: leaf.grad for name, leaf in copy.leaves.items() if leaf.grad is not None}
        if not came:
            return
        sums = copy.gradients
        further = [name for name in came if name in sums]
        if further:
            torch._foreach_add_([sums[name] for name in further], [came[name] for name in further])
        first = {name: gradient for name, gradient in came.items() if name not in sums}
        if first:
            made = [torch.empty_like(gradient, dtype=self.accumulation_dtype) for gradient in first.values()]
            torch._foreach_copy_(made, list(first.values()))
            sums.update(zip(first, made, strict=True))
        for name in came:
            copy.leaves[name].grad = None

    def set_sums_aside(self, copy: DeviceCopy) -> None:
        """Let gradients add up from zero on the leaves, where autograd sums them there, until `add_sums_aside`."""
        if not self.accumulates_in_place:
            return
        for name, leaf in copy.leaves.items():
            if leaf.grad is not None:
                copy.aside[name], leaf.grad = leaf.grad, None

    def add_sums_aside(self, copy: DeviceCopy) -> None:
        """Add what has gathered on the leaves since `set_sums_aside` to the sums before."""
        for name, total in copy.aside.items():
            leaf = copy.leaves[name]
            if leaf.grad is not None:
                total.add_(leaf.grad)
            leaf.grad = total
        copy.aside.clear()

    def gradients(self, copy: DeviceCopy) -> dict[str, Tensor]:
        """Return the gradient sums of all micro-batches so far, by name; unused parameters have none."""
        if not self.accumulates_in_place:
            return copy.gradients
        return {name: leaf.grad for name, leaf in copy.leaves.items() if leaf.grad is not None}

    def gradient(self, copy: DeviceCopy, name: str) -> Tensor | None:
        if name not in copy.leaves:
            return None
        return copy.leaves[name].grad if self.accumulates_in_place else copy.gradients.get(name)

    def apply_user_settings(self, copy: DeviceCopy, modes: object, own: Mapping[int, bool] = _NONE) -> None:
        """Apply hooks, attributes, and `requires_grad` of parameters, in `modes`, to their device copies.

        `own`: `requires_grad` of parameters for which a lane has set it otherwise, by their ids.
        """
        if copy.modes is modes:
            return
        copy.modes = modes
        with bypass_hooks():
            for name, leaf in copy.leaves.items():
                parameter, known = self._store.parameters[name], leaf.__dict__
                hooks, attributes = parameter._backward_hooks, _attributes(parameter)
                trained = parameter.requires_grad
                if own:
                    trained = own.get(id(parameter), trained)
                new = [key for key in attributes if known.get(key) is not attributes[key]]
                if leaf.requires_grad is not trained or new:
                    leaf.requires_grad_(trained)
                    known.update(attributes)
                    copy.leaves.cache.clear()
                if hooks and trained and name not in copy.hooked:
                    leaf.register_hook(partial(_run_hooks, hooks))
                    copy.hooked.add(name)

    def check_user_settings(self, copy: DeviceCopy) -> None:
        """Raise UnsupportedError if the model's code has set `requires_grad` of a device copy that modules hold."""
        with bypass_hooks():
            for name, leaf in copy.leaves.items():
                if leaf.requires_grad is not self._store.parameters[name].requires_grad:
                    raise UnsupportedError(
                        f"forward sets requires_grad of {name}, which code between layers uses, in all micro-batches: set "
                        "it before a step, or name a module that contains all that uses it in harmony.layers."
                    )

    def thawed(self, copy: DeviceCopy, own: Mapping[int, bool]) -> list[str]:
        """Return the parameters of `copy` that require a gradient by `own`."""
        return [name for name in copy.leaves if own.get(id(self._store.parameters[name]))]

    def are_hooked(self, names: Iterable[str]) -> bool:
        """Return whether the user has registered hooks on parameters among `names`."""
        with bypass_hooks():
            return any(self._store.parameters[name]._backward_hooks for name in names)

    def add_gradient(self, copy: DeviceCopy, name: str, gradient: Tensor) -> None:
        """Add `gradient` (on any device, of any dtype) to the sum of `name`."""
        known = self.gradient(copy, name)
        if known is not None:
            known.add_(gradient.to(known.device))
        elif self.accumulates_in_place:
            copy.leaves[name].grad = gradient.to(copy.buffer)
        else:
            copy.gradients[name] = gradient.to(copy.buffer.device, self.accumulation_dtype)

    def clear_gradient(self, copy: DeviceCopy, name: str) -> None:
        """Drop the gradient of `name`: the sum, and that on the leaf."""
        copy.gradients.pop(name, None)
        copy.aside.pop(name, None)
        if name in copy.leaves:
            copy.leaves[name].grad = None

    def evict(self, copy: DeviceCopy) -> None:
        """Free the weights once the compute stream is done with them."""
        with suppress(OSError):  # of a disk: what was not read is not used
            copy.wait(self._device)  # other devices may still fill it
        done = self._device.record(Stream.COMPUTE)
        # The buffer belongs to the swap-in stream, which may reuse it only after the last kernel that reads it.
        self._device.wait(Stream.SWAP_IN, done)
        for one in (copy, *copy.added):
            self._device.free(one.buffer)


def _attributes(parameter: nn.Parameter) -> dict[str, Any]:
    own = parameter.__dict__
    return {key: own[key] for key in own if key != "_hp_mapping"}  # the engine's


def _own_parts(total: int, rank: int, devices: int) -> tuple[slice, ...]:
    """Return the parts of a buffer that one of several devices swaps in: its share, and the rest that each swaps in."""
    share = share_of(total, devices)
    if devices == 1 or not share:
        return (slice(0, total),)
    return slice(rank * share, (rank + 1) * share), slice(devices * share, total)


def _run_hooks(hooks: Mapping[int, Callable[[Tensor], Tensor | None]], gradient: Tensor) -> Tensor:
    for hook in list(hooks.values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def same_bits(tensor: Tensor, on_host: Tensor) -> bool:
    """Return whether a tensor on any device has the bits of another one of its shape, which is contiguous."""
    return torch.equal(tensor.cpu().view(-1).view(torch.uint8), on_host.view(-1).view(torch.uint8))
