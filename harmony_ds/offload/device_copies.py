"""The copies of packs on the device: their weights, from swap-in to eviction, and the gradients that gather there.

A pack's weights are one device buffer of the compute stream's memory, which the swap-in stream fills, with a leaf tensor
per parameter for layer calls. Gradients accumulate on the leaves, or in separate tensors of the accumulation dtype. What a
pack has on the device:

    from SWAP_IN           weights
    from its BACKWARD      weights, gradients
    from SWAP_OUT          weights, gradients, which are being copied to the host
    from EVICT             gradients
    from FREE_GRADIENTS    nothing
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
from harmony_ds.offload.rebuild import LINK, Attributes

_NONE: Mapping[int, bool] = {}


class Leaves(dict[str, nn.Parameter]):
    """Leaf tensors that a pack's layer calls are run with, by canonical name.

    Attributes:
        attributes: what else modules hold in a layer call: objects made with packed leaves.
        buffers: and packed buffers, by module and key; they are no leaves.
        cache: objects that layer calls have derived from the leaves, by the object that made them.
    """

    __slots__ = ("attributes", "buffers", "cache")

    def __init__(
        self,
        leaves: Mapping[str, nn.Parameter],
        attributes: Attributes | None = None,
        buffers: Attributes | None = None,
    ) -> None:
        super().__init__(leaves)
        self.attributes: Attributes = {} if attributes is None else attributes
        self.buffers: Attributes = {} if buffers is None else buffers
        self.cache: dict[object, Any] = {}

    def add(self, more: Leaves) -> None:
        """Add other leaves to these, or put them in the place of those of the same name."""
        self.update(more)
        for own, others in ((self.attributes, more.attributes), (self.buffers, more.buffers)):
            for module, values in others.items():
                own.setdefault(module, {}).update(values)
        self.cache.clear()

    def drop_gradients(self) -> None:
        """Remove `.grad` of all leaves."""
        for leaf in self.values():
            leaf.grad = None


def leaf_over(memory: Tensor, parameter: nn.Parameter) -> nn.Parameter:
    """Return a leaf over `memory` with the attributes and the `requires_grad` that the program has set on `parameter`."""
    # `data` gives the leaf a version counter of its own: writing into one leaf does not raise the version of the others.
    leaf = nn.Parameter(memory.data, requires_grad=parameter.requires_grad)
    leaf.__dict__.update(_attributes(parameter))
    return leaf


class DeviceCopy:
    """The parameters of one pack on the device.

    Attributes:
        buffer: device memory of the weights.
        leaves: by canonical name; autograd accumulates the running micro-batch's gradients in `.grad`.
        memory: device memory of the leaves, by name; of packed ones, their bytes.
        gradients: sums over micro-batches in the accumulation dtype, where that is not the leaves'.
        earlier_sums: sums of earlier micro-batches, while those that share a loss add up their gradients on the leaves.
        hooked: names of the leaves that have the user's hooks.
        modes: modes of the call that the leaves' hooks and `requires_grad` were set for; None: not known.
        was_used: whether the leaves were set for a call before.
        arrived: event after the swap-in (a promise of one, from a disk); None: the compute stream waits for it already.
        added: copies of parameters that were swapped in later, in buffers of their own.
    """

    def __init__(
        self, buffer: Tensor, leaves: Leaves, memory: dict[str, Tensor], arrived: Event | Future[Event]
    ) -> None:
        self.buffer = buffer
        self.leaves = leaves
        self.memory = memory
        self.gradients: dict[str, Tensor] = {}
        self.earlier_sums: dict[str, Tensor] = {}
        self.hooked: set[str] = set()
        self.modes: object = None
        self.was_used = False
        self.arrived: Event | Future[Event] | None = arrived
        self.added: list[DeviceCopy] = []

    def pop_arrival(self) -> Event | None:
        """Return the event after the swap-in, and None from the second call on; OSError: a disk fails."""
        if isinstance(self.arrived, Future):
            self.arrived.exception()  # waits; `arrived` stays if the wait is interrupted
        arrived, self.arrived = self.arrived, None
        return arrived.result() if isinstance(arrived, Future) else arrived

    def wait(self, device: Device) -> None:
        """Let the compute stream wait for the weights, once; OSError: a disk fails."""
        arrived = self.pop_arrival()
        if arrived is not None:
            # Layers read the weights, which another stream writes.
            device.wait(Stream.COMPUTE, arrived)


class DeviceCopies:
    """Copies packs to the device and frees these copies, and sums up the gradients that gather on them.

    Attributes:
        accumulation_dtype: dtype of the sums of gradients.
    """

    def __init__(self, device: Device, store: HostStore, ledger: Ledger, accumulation_dtype: torch.dtype) -> None:
        self._device = device
        self._store = store
        self._ledger = ledger
        self.accumulation_dtype = accumulation_dtype
        self._last_swap_in: dict[int, Event | Future[Event]] = {}  # device number -> event after its last swap-in

    @property
    def dtype(self) -> torch.dtype:
        return self._store.dtype

    @property
    def disk_bytes_per_ms(self) -> float:
        """Bytes per millisecond of the slowest disk with weights, masters or state; infinite: everything is in memory."""
        disks = (self._store.disk, self._store.disk_weights)
        return min((disk.file.bytes_per_ms for disk in disks if disk is not None), default=math.inf)

    @property
    def disk_weight_bytes(self) -> int:
        """Bytes of each element of a weight on a disk; 0: weights are in memory."""
        return 0 if self._store.disk_weights is None else self.dtype.itemsize

    @property
    def accumulates_in_place(self) -> bool:
        """Whether the leaves have the accumulation dtype, so that autograd itself adds up micro-batches in `.grad`."""
        return self.accumulation_dtype == self._store.dtype

    def swap_in(
        self, names: Iterable[str], kind: TrafficKind = TrafficKind.WEIGHTS, rank: int = 0, devices: int = 1
    ) -> DeviceCopy:
        """Allocate a buffer for `names`, and issue the copies into it on the swap-in stream; nothing waits for them yet.

        Args:
            kind: what the ledger books the copies as.
            rank, devices: of several devices that share the swap-in, the one of number `rank` copies its share
                (`share_of`); a GATHER fills the rest.
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
                    share = slice(max(0, part.start - offset), max(0, part.stop - offset))
                    memory = piece.memory[share]
                    if disk is None:
                        target[share].copy_(memory, non_blocking=True)
                    else:
                        from_disk.append((memory, target[share]))
                    self._ledger.book_in(kind, memory.numel() * memory.element_size())
                views |= {name: place.view(target) for name, place in piece.places.items()}
                offset += piece.memory.numel()
        issued = self._device.record(Stream.SWAP_IN)
        # From a disk, a thread copies on a stream of its own, after what the swap-in stream has waited for.
        arrived = issued if disk is None else disk.swap_in(from_disk, issued)
        self._last_swap_in[self._device.number] = arrived
        return DeviceCopy(buffer, self.leaves_over(views), views, arrived)

    def leaves_over(self, memory: Mapping[str, Tensor]) -> Leaves:
        """Return leaves over device memory, by name: parameters, and packed tensors over their bytes."""
        packed, buffers, leaves = self._store.packed, self._store.buffers, Leaves({})
        with bypass_hooks():
            for name, view in memory.items():
                if name in buffers:
                    made, _ = packed[name].rebuild(view)
                    leaves.buffers.setdefault(buffers[name].module, {})[buffers[name].key] = made
                elif name in packed:
                    made, attributes = packed[name].rebuild(view)
                    leaves.add(Leaves({name: made}, attributes))
                else:
                    leaves[name] = leaf_over(view, self._store.parameters[name])
        return leaves

    def _rebuild_packed(self, copy: DeviceCopy) -> None:
        """Make the packed leaves of `copy` anew over their memory: forward may have changed what they consist of."""
        packed = {name: memory for name, memory in copy.memory.items() if name in self._store.packed}
        copy.leaves.add(self.leaves_over(packed))

    @contextmanager
    def _buffer(self, numel: int) -> Iterator[Tensor]:
        """Allocate a buffer, with the swap-in stream current while open; free the buffer on errors."""
        buffer = self._device.empty(numel, self._store.dtype)
        try:
            # Work that compute was given before may still use this memory.
            self._device.wait(Stream.SWAP_IN, self._device.record(Stream.COMPUTE))
            with torch.no_grad(), self._device.on(Stream.SWAP_IN):
                yield buffer
        except BaseException:
            # Copies that were issued before the error may still write it.
            self._device.wait(Stream.COMPUTE, self._device.record(Stream.SWAP_IN))
            self._device.free(buffer)
            raise

    def add_parameters(self, copy: DeviceCopy, names: Iterable[str]) -> None:
        """Swap in those of `names` that `copy` does not have, and add them to it."""
        missing = tuple(name for name in names if name not in copy.memory)
        if missing:
            more = self.swap_in(missing)
            copy.added.append(more)
            more.wait(self._device)
            copy.leaves.add(more.leaves)
            copy.memory.update(more.memory)
            copy.modes = None

    def finish_reads(self) -> None:
        """Wait until no swap-in reads host memory any more, so that it may be written."""
        for number, arrived in list(self._last_swap_in.items()):
            if isinstance(arrived, Future):
                arrived.exception()  # waits; an error is raised by the task that needs the weights
            else:
                arrived.synchronize()
            del self._last_swap_in[number]

    def is_buffer(self, name: str) -> bool:
        """Return whether `name` is a buffer that is swapped in with its layer's weights, and no parameter."""
        return name in self._store.buffers

    def modified_names(self, copy: DeviceCopy) -> list[str]:
        """Return the parameters of `copy` that have been written to on the device: they differ from the host's."""
        disk = self._store.disk_weights
        modified: list[str] = []
        for piece in self._store.parts_of(copy.memory):
            values = piece.memory if disk is None else disk.file.copy_of(piece.memory)
            for name, place in piece.places.items():
                on_host, leaf = place.view(values), copy.leaves.get(name)
                is_modified = not same_bits(copy.memory[name], on_host)
                if (
                    leaf is not None
                    and name not in self._store.packed
                    and leaf.data_ptr() != copy.memory[name].data_ptr()
                ):
                    # Forward may give what is frozen another dtype by `.data`, as bitsandbytes does, but not other values.
                    is_modified |= not same_bits(leaf.detach(), on_host.to(leaf.dtype))
                if is_modified:
                    modified.append(name)
        return modified

    def accumulate(self, copy: DeviceCopy) -> None:
        """Add the gradients on the leaves to the sums, if these have another dtype than the leaves."""
        if self.accumulates_in_place:
            return
        on_leaves = {name: leaf.grad for name, leaf in copy.leaves.items() if leaf.grad is not None}
        if not on_leaves:
            return
        sums = copy.gradients
        first = {name: gradient for name, gradient in on_leaves.items() if name not in sums}
        # Allocated before anything is added: where memory runs out here, the run that follows adds all of them once.
        new_sums = [torch.empty_like(gradient, dtype=self.accumulation_dtype) for gradient in first.values()]
        further = [name for name in on_leaves if name in sums]
        if further:
            torch._foreach_add_([sums[name] for name in further], [on_leaves[name] for name in further])
        if first:
            torch._foreach_copy_(new_sums, list(first.values()))
            sums.update(zip(first, new_sums, strict=True))
        for name in on_leaves:
            copy.leaves[name].grad = None

    def begin_shared_loss(self, copy: DeviceCopy) -> None:
        """Let the gradients of micro-batches that share a loss add up from zero, until `end_shared_loss`.

        One backward pass of autograd would add them up so. Sums on the leaves are kept elsewhere meanwhile.
        """
        if not self.accumulates_in_place:
            return
        for name, leaf in copy.leaves.items():
            if leaf.grad is not None:
                copy.earlier_sums[name], leaf.grad = leaf.grad, None

    def end_shared_loss(self, copy: DeviceCopy) -> None:
        """Add the gradients of the micro-batches that share a loss to the sums from before."""
        for name, total in copy.earlier_sums.items():
            leaf = copy.leaves[name]
            if leaf.grad is not None:
                total.add_(leaf.grad)
            leaf.grad = total
        copy.earlier_sums.clear()

    def gradients(self, copy: DeviceCopy) -> dict[str, Tensor]:
        """Return the sums of gradients of all micro-batches so far, by name; unused parameters have none."""
        if not self.accumulates_in_place:
            return copy.gradients
        return {name: leaf.grad for name, leaf in copy.leaves.items() if leaf.grad is not None}

    def gradient(self, copy: DeviceCopy, name: str) -> Tensor | None:
        """Return the sum of gradients of `name`: the tensor itself; None: there is none."""
        if name not in copy.leaves:
            return None
        return copy.leaves[name].grad if self.accumulates_in_place else copy.gradients.get(name)

    def apply_user_settings(self, copy: DeviceCopy, modes: object, lanes_trained: Mapping[int, bool] = _NONE) -> None:
        """Give the device copies the hooks, attributes and `requires_grad` that the program has set on the parameters.

        Args:
            modes: of the call that is about to run; where the leaves were set for these already, nothing is done.
            lanes_trained: `requires_grad` of the parameters that a lane has set it of for itself, by `id`.
        """
        if copy.modes is modes:
            return
        if self._store.packed and copy.was_used:
            self._rebuild_packed(copy)
        copy.modes, copy.was_used = modes, True
        with bypass_hooks():
            for name, leaf in copy.leaves.items():
                if name in self._store.packed:
                    continue
                parameter, known = self._store.parameters[name], leaf.__dict__
                hooks, attributes = parameter._backward_hooks, _attributes(parameter)
                trained = parameter.requires_grad
                if lanes_trained:
                    trained = lanes_trained.get(id(parameter), trained)
                are_new = False
                for key in attributes:
                    are_new |= known.get(key) is not attributes[key]
                if leaf.requires_grad is not trained or are_new:
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

    def names_trained_by(self, lanes_trained: Mapping[int, bool], copy: DeviceCopy) -> list[str]:
        """Return the parameters of `copy` that require a gradient by `lanes_trained` (see `apply_user_settings`)."""
        return [name for name in copy.leaves if lanes_trained.get(id(self._store.parameters[name]))]

    def are_hooked(self, names: Iterable[str]) -> bool:
        """Return whether the user has registered hooks on parameters among `names`."""
        with bypass_hooks():
            parameters = self._store.parameters  # buffers have no hooks
            return any(parameters[name]._backward_hooks for name in names if name in parameters)

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
        copy.earlier_sums.pop(name, None)
        if name in copy.leaves:
            copy.leaves[name].grad = None

    def clear_gradients(self, copy: DeviceCopy) -> None:
        """Drop all gradients of `copy`."""
        for name in copy.leaves:
            self.clear_gradient(copy, name)

    def evict(self, copy: DeviceCopy) -> None:
        """Free the weights; their memory is reused after the work that compute has been given so far."""
        with suppress(OSError):  # weights that a disk has failed to read are not used
            copy.wait(self._device)  # copies may still write the buffer
        for freed in (copy, *copy.added):
            # The buffer is of the stream that was compute's then: a program may run its steps on several.
            self._device.record_use(freed.buffer)
            self._device.free(freed.buffer)


def _attributes(parameter: nn.Parameter) -> dict[str, Any]:
    """Return the attributes that the program has put on `parameter`: mostly none."""
    attributes: dict[str, Any] = {}
    held = parameter.__dict__
    for key in held:
        if key != LINK:
            attributes[key] = held[key]
    return attributes


def _own_parts(total: int, rank: int, devices: int) -> tuple[slice, ...]:
    """Return the parts of a buffer that one of several devices swaps in: its share, and what is left over by the shares."""
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
