"""The weights on the host: one contiguous slab of memory per layer, which one copy moves to the device.

The model's parameters become views into the slabs: full-shape host tensors, readable at any time. In mixed precision the
slabs have the compute dtype, and every trainable parameter has an fp32 master. Where masters have the compute dtype, the
parameter is its own master.

    fp32              parameter = slab view = master                     4 bytes per parameter
    bf16, fp16        parameter = slab view (2), master (4)              6 bytes per trainable parameter
    16-bit masters    parameter = slab view = master                     2 bytes per parameter
    split masters     parameter = slab view (2), the bits below (2)      4 bytes per trainable parameter
    packed            the plain tensors that it consists of = slab views its bytes, whatever its dtype

A model whose weights are a mapped file is read once, layer by layer; the system frees its pages when it needs memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from harmony_ds.decomposer.find import Decomposition
from harmony_ds.decomposer.graph import ALIGNMENT_BYTES
from harmony_ds.device.base import Device
from harmony_ds.distributed import SINGLE_PROCESS, SingleProcess
from harmony_ds.offload.disk import DiskMasters
from harmony_ds.offload.disk_weights import DiskWeights
from harmony_ds.offload.host_memory import trim_allocator
from harmony_ds.offload.layout import ByteRegion, Region, layout_of, with_storage_of_its_own
from harmony_ds.offload.packed import OwnedBuffer, Packed
from harmony_ds.offload.split_masters import SplitMasters

bypass_hooks = torch._C.DisableTorchFunctionSubclass
"""Context in which the engine's own code uses parameters without `EngineParameter`'s hook, which would wait for updates."""

_NOTHING_PACKED: Mapping[str, Packed] = {}
_NO_BUFFERS: Mapping[str, OwnedBuffer] = {}
_WORTH_RETURNING = 2**20
"""So many freed bytes are worth the milliseconds that trimming the allocator takes."""


@dataclass(frozen=True, slots=True)
class SlabPart:
    """A contiguous part of a slab, which one copy moves, and the places of parameters in it."""

    memory: Tensor
    places: dict[str, Region]


class HostStore:
    """Owner of the slabs, and of the masters, of a model's parameters."""

    def __init__(
        self,
        model: nn.Module,
        decomposition: Decomposition,
        dtype: torch.dtype,
        memory: Device | DiskWeights,
        world: SingleProcess = SINGLE_PROCESS,
        masters: torch.dtype | SplitMasters | DiskMasters = torch.float32,
        packed: Mapping[str, Packed] = _NOTHING_PACKED,
        buffers: Mapping[str, OwnedBuffer] = _NO_BUFFERS,
    ) -> None:
        """Move `model`'s parameters into slabs of `dtype`, layer by layer, so that only one layer exists twice.

        Where several processes share the slabs, their values are those of the first.

        Args:
            memory: where the slabs are: in host memory for this device, or in a file.
            masters: the dtype of the masters, fp32 or `dtype`; or fp32 masters that are split or on a disk.
            packed: parameters and buffers that travel as their bytes, by name.
            buffers: those among them that are buffers.
        """
        self.dtype = dtype
        self.split = masters if isinstance(masters, SplitMasters) else None
        self.disk = masters if isinstance(masters, DiskMasters) else None
        self.master_dtype = masters if isinstance(masters, torch.dtype) else torch.float32
        self.packed = packed
        self.buffers = buffers
        self._world = world
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.masters: dict[str, nn.Parameter] = {}
        self.disk_weights = memory if isinstance(memory, DiskWeights) else None
        self._device = memory.device if isinstance(memory, DiskWeights) else memory
        self._slabs: list[Tensor] = []
        self._places: dict[str, tuple[int, Region]] = {}  # parameter -> number of its slab, place in it
        self._parts: dict[tuple[str, ...], list[SlabPart]] = {}  # cache of `parts_of`
        if self.disk is not None:
            self.disk.attach_weights(self.weight, self.write_weight)
        freed_bytes = 0
        for names in (*(layer.parameters for layer in decomposition.layers), decomposition.unlayered):
            fresh = [name for name in names if name not in self._places]
            if fresh:
                freed_bytes += self._move_to_slab(fresh)
                if freed_bytes >= _WORTH_RETURNING:
                    trim_allocator()
                    freed_bytes = 0

    def _move_to_slab(self, names: list[str]) -> int:
        """Move the parameters `names` into a new slab; return the bytes of their former memory."""
        freed_bytes = 0
        places, end = self._places_of(names)
        # Slabs that torch allocates are aligned already, and so is every region.
        if self.disk_weights is None:
            filled = slab = self._world.host_empty(self._device, end, self.dtype)
        else:
            slab = self.disk_weights.file.empty(torch.Size((end,)), self.dtype)
            filled = torch.empty_like(slab)
        assert slab.data_ptr() % ALIGNMENT_BYTES == 0 or end == 0
        for name, place in places.items():
            self._places[name] = (len(self._slabs), place)
            view = place.view(filled)
            if name in self.packed:
                if self._world.is_local_first:
                    self.packed[name].write_to(view)
                freed_bytes += self.packed[name].move_to(place.view(slab))
                continue
            parameter = self.parameters[name]
            if parameter.requires_grad:
                self._make_master(name, parameter, view)
            if self._world.is_local_first:
                self._fill(name, parameter, view)
                filled[place.start + view.numel() : place.end].zero_()
            before = parameter.data
            parameter.data = with_storage_of_its_own(place.view(slab))
            freed_bytes += before.numel() * before.element_size()
            del before  # frees its memory, unless the caller holds a reference
        if self.disk_weights is not None and self._world.is_local_first:
            self.disk_weights.file.write(filled, slab)
        self._slabs.append(slab)
        return freed_bytes

    def _places_of(self, names: list[str]) -> tuple[dict[str, Region], int]:
        """Return the places of `names` in a slab of their own, and its number of elements."""
        itemsize = self.dtype.itemsize
        sizes: dict[str, Tensor | torch.Size] = {}
        for name in names:
            packed = self.packed.get(name)
            sizes[name] = self.parameters[name] if packed is None else torch.Size((packed.nbytes // itemsize,))
        places, end = layout_of(sizes, itemsize)
        for name in names:
            if name in self.packed:
                nbytes = torch.Size((self.packed[name].nbytes,))
                places[name] = ByteRegion(places[name].start, places[name].end, nbytes)
        return places, end

    @torch.no_grad()
    def _make_master(self, name: str, parameter: nn.Parameter, weight: Tensor) -> None:
        """Make the master of a parameter, whose weight is to be in the memory `weight`; fill it if it is a tensor apart."""
        if self.split is not None:
            self.split.add(name, weight)
        if self.dtype == self.master_dtype or self.split is not None:
            self.masters[name] = parameter
            return
        if self.disk is None:
            master = self._world.host_empty_like(parameter, self.master_dtype)
        else:
            master = self.disk.add(name, parameter.shape)
        if self._world.is_local_first:
            master.copy_(parameter.detach())
        self.masters[name] = nn.Parameter(master, requires_grad=True)

    @torch.no_grad()
    def _fill(self, name: str, parameter: nn.Parameter, weight: Tensor) -> None:
        """Copy a parameter's values to the memory of its weight, and to that of a split master."""
        weight.copy_(parameter)
        if self.split is not None and parameter.requires_grad:
            self.split.write(name, parameter, everywhere=True)

    def tensors(self) -> list[Tensor]:
        """Return all memory of weights and masters."""
        masters = [master.detach() for name, master in self.masters.items() if master is not self.parameters[name]]
        return [*self._slabs, *masters]

    def weight(self, name: str) -> Tensor:
        """Return the memory of the parameter `name` as a plain tensor: of a packed one, its bytes."""
        slab, place = self._places[name]
        return place.view(self._slabs[slab])

    @property
    def packed_kinds(self) -> dict[str, str]:
        """How packed parameters are quantized, by name; one that is a plain tensor alone is its values in its own dtype."""
        return {name: one.kind for name, one in self.packed.items() if name not in self.buffers and not one.is_plain}

    @property
    def has_fp32_masters(self) -> bool:
        """Whether masters are more precise than the weights."""
        return self.dtype != self.master_dtype

    def read_master(self, name: str) -> Tensor:
        """Return the values that the optimizer steps, in the masters' dtype. Do not write into them: they may be a copy."""
        if self.split is not None:
            return self.split.read(name).view(self.masters[name].shape)
        return self.masters[name].detach()

    @torch.no_grad()
    def write_master(self, name: str, values: Tensor) -> None:
        """Make `values` the master's, and what they round to the weight's."""
        if self.split is not None:
            self.split.write(name, values)
            return
        master = self.masters[name].detach().copy_(values)
        if self.compute_copy(name) is not None:
            self.write_weight(name, master)

    def write_weight(self, name: str, values: Tensor, piece: slice = slice(None)) -> None:
        """Copy `values` to a piece of the weight `name`; OSError: its disk fails."""
        place, values = self.weight(name).view(-1)[piece], values.view(-1)
        if self.disk_weights is None:
            place.copy_(values)
        else:
            self.disk_weights.file.write(values.to(self.dtype), place)

    @torch.no_grad()
    def copy_masters_to_weights(self, names: Iterable[str]) -> None:
        """Copy this process's pieces of the masters of `names` to the weights, in the compute dtype."""
        if self.disk is not None:
            return  # the optimizer has written each block's weights
        for name in names:
            copy = self.compute_copy(name)
            if copy is not None:
                piece = self._world.piece(copy.numel())
                self.write_weight(name, self.masters[name].detach().view(-1)[piece], piece)

    def parts_of(self, names: Iterable[str]) -> list[SlabPart]:
        """Return the fewest contiguous parts of the slabs that hold exactly the parameters `names`."""
        key = tuple(names)
        if key not in self._parts:
            self._parts[key] = self._find_parts(key)
        return self._parts[key]

    def _find_parts(self, names: tuple[str, ...]) -> list[SlabPart]:
        runs: list[list[tuple[int, Region, str]]] = []
        for name in sorted(names, key=lambda name: (self._places[name][0], self._places[name][1].start)):
            slab, place = self._places[name]
            if not runs or (runs[-1][-1][0], runs[-1][-1][1].end) != (slab, place.start):
                runs.append([])
            runs[-1].append((slab, place, name))
        return [self._part(run) for run in runs]

    def _part(self, run: list[tuple[int, Region, str]]) -> SlabPart:
        slab, first, _ = run[0]
        start, end = first.start, run[-1][1].end
        places = {name: replace(place, start=place.start - start, end=place.end - start) for _, place, name in run}
        return SlabPart(self._slabs[slab][start:end], places)

    def compute_copy(self, name: str) -> Tensor | None:
        """Return the weight that the master of `name` is copied to after an update; None: they are one tensor."""
        return None if self.parameters[name] is self.masters[name] else self.weight(name)

    def host_bytes(self) -> dict[str, int]:
        """Return the bytes of host memory that weights and masters take."""
        slabs = sum(slab.numel() * slab.element_size() for slab in self._slabs)
        separate = [master for name, master in self.masters.items() if master is not self.parameters[name]]
        masters = sum(master.numel() * master.element_size() for master in separate)
        if self.split is not None:
            masters = self.split.host_bytes
        held = {"weights": slabs, "masters": 0 if self.disk is not None else masters}
        return held if self.disk_weights is None else {**held, "weights": 0, "chunks": self.disk_weights.host_bytes}

    def release(self) -> None:
        """Unlock the page-locked memory, or close the file; the parameters stay readable."""
        if self.disk_weights is not None:
            self.disk_weights.close()
            return
        for slab in self._slabs:
            self._device.host_free(slab)
