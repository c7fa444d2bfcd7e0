"""Host memory of the weights: one contiguous slab per layer, ready to be copied to the device in one piece.

What enters is a decomposed model, whose parameters become views into the slabs (they stay full-shape host tensors that
anyone can read). In mixed precision the slabs hold the compute dtype, and every trainable parameter has a master in
fp32 beside it; where masters have the compute dtype, the parameter is its own master.

    fp32              parameter = slab view = master                     4 bytes per parameter
    bf16, fp16        parameter = slab view (2), master (4)              6 bytes per trainable parameter
    16-bit masters    parameter = slab view = master                     2 bytes per parameter

A model whose weights are a mapped file is read once, layer by layer; its pages go when the system wants memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harmony_ds.decomposer.find import Decomposition
from harmony_ds.decomposer.graph import ALIGNMENT_BYTES
from harmony_ds.device.base import Device
from harmony_ds.offload.places import Place, places_of
from harmony_ds.offload.process_memory import return_freed
from harmony_ds.parallel import Alone

ungated = torch._C.DisableTorchFunctionSubclass
"""A context in which the engine uses the model's parameters without asking itself first (see `harmony_ds.parameters`)."""

_ALONE = Alone()
_WORTH_RETURNING = 2**20
"""Bytes; to ask the allocator takes it milliseconds."""


@dataclass(frozen=True, slots=True)
class SlabPart:
    """Host memory that one copy moves, and where in it the parameters lie."""

    memory: Tensor
    places: dict[str, Place]


class HostStore:
    """Owns the slabs and the masters of a model's parameters."""

    def __init__(
        self,
        model: nn.Module,
        decomposition: Decomposition,
        dtype: torch.dtype,
        device: Device,
        world: Alone = _ALONE,
        master_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Move `model`'s parameters into slabs of `dtype`, layer by layer, so that only one layer exists twice.

        Where several processes share the slabs, their values are those of the first. `master_dtype` is fp32 or `dtype`.
        """
        self.dtype, self.master_dtype = dtype, master_dtype
        self._world = world
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.masters: dict[str, nn.Parameter] = {}
        self._device = device
        self._slabs: list[Tensor] = []
        self._places: dict[str, tuple[int, Place]] = {}  # a slab, and where in it
        self._pieces: dict[tuple[str, ...], list[SlabPart]] = {}  # that have been asked for
        freed_bytes = 0
        for names in (*(layer.parameters for layer in decomposition.layers), decomposition.unlayered):
            fresh = [name for name in names if name not in self._places]
            if fresh:
                freed_bytes += self._settle(fresh)
                if freed_bytes >= _WORTH_RETURNING:
                    return_freed()
                    freed_bytes = 0

    def _settle(self, names: list[str]) -> int:
        """Moves `names` into a slab; returns how many bytes they took before."""
        freed_bytes = 0
        places, end = places_of({name: self.parameters[name] for name in names}, self.dtype.itemsize)
        # Slabs that torch allocates are aligned already; so is every place in them.
        slab = self._world.host_empty(self._device, end, self.dtype)
        assert slab.data_ptr() % ALIGNMENT_BYTES == 0 or end == 0
        for name, place in places.items():
            parameter = self.parameters[name]
            view = place.view(slab)
            with torch.no_grad():
                if parameter.requires_grad:
                    self.masters[name] = self._master(parameter)
                if self._world.leads:
                    view.copy_(parameter)
                    slab[place.start + view.numel() : place.end].zero_()
            before = parameter.data
            parameter.data = view
            freed_bytes += before.numel() * before.element_size()
            del before  # the last reference, unless the caller holds one: its memory goes now
            self._places[name] = (len(self._slabs), place)
        self._slabs.append(slab)
        return freed_bytes

    def _master(self, parameter: nn.Parameter) -> nn.Parameter:
        if self.dtype == self.master_dtype:
            return parameter
        master = self._world.empty(parameter, self.master_dtype)
        if self._world.leads:
            master.copy_(parameter.detach())
        return nn.Parameter(master, requires_grad=True)

    def memory(self) -> list[Tensor]:
        """Of all weights and masters, each once."""
        own = [] if self.dtype == self.master_dtype else [master.detach() for master in self.masters.values()]
        return [*self._slabs, *own]

    def weight(self, name: str) -> Tensor:
        """The memory of the parameter `name`: a plain tensor, which no autograd graph knows."""
        slab, place = self._places[name]
        return place.view(self._slabs[slab])

    @torch.no_grad()
    def follow_masters(self, names: Iterable[str]) -> None:
        """Makes this process's pieces of the weights `names` what their masters are, in the compute dtype."""
        for name in names:
            copy = self.upload_copy(name)
            if copy is not None:
                piece = self._world.piece(copy.numel())
                copy.view(-1)[piece].copy_(self.masters[name].detach().view(-1)[piece])

    def pieces(self, names: Iterable[str]) -> list[SlabPart]:
        """The fewest contiguous runs of host memory that hold `names`."""
        key = tuple(names)
        if key not in self._pieces:
            self._pieces[key] = self._runs(key)
        return self._pieces[key]

    def _runs(self, names: tuple[str, ...]) -> list[SlabPart]:
        runs: list[list[tuple[int, Place, str]]] = []
        for name in sorted(names, key=lambda name: (self._places[name][0], self._places[name][1].start)):
            slab, place = self._places[name]
            if not runs or (runs[-1][-1][0], runs[-1][-1][1].end) != (slab, place.start):
                runs.append([])
            runs[-1].append((slab, place, name))
        return [self._part(run) for run in runs]

    def _part(self, run: list[tuple[int, Place, str]]) -> SlabPart:
        slab, first, _ = run[0]
        start, end = first.start, run[-1][1].end
        places = {name: Place(place.start - start, place.end - start, place.shape) for _, place, name in run}
        return SlabPart(self._slabs[slab][start:end], places)

    def upload_copy(self, name: str) -> Tensor | None:
        """The compute-dtype copy that must follow the master of `name`; None where they are one tensor."""
        return None if self.parameters[name] is self.masters[name] else self.weight(name)

    def host_bytes(self) -> dict[str, int]:
        """Bytes of the slabs and of the masters beside them."""
        slabs = sum(slab.numel() * slab.element_size() for slab in self._slabs)
        masters = sum(
            master.numel() * master.element_size()
            for name, master in self.masters.items()
            if master is not self.parameters[name]
        )
        return {"weights": slabs, "masters": masters}

    def release(self) -> None:
        """Gives the page-locked memory back; the parameters stay readable."""
        for slab in self._slabs:
            self._device.host_free(slab)
