"""Forward passes on the calling thread, one at a time and layer by layer: evaluation, `generate`, and all measuring.

Layers are swapped in as they are called, the next one in the known order before its call, and evicted after it. Parameters
that are on the device already are used there. A parameter that is used outside its layer's calls stays to the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from harmony_ds.decomposer.find import Layer
from harmony_ds.model.checkpointing import checkpoints_bypassed
from harmony_ds.model.intercept import Request, handled_by
from harmony_ds.offload.residency import DeviceCopy
from harmony_ds.runtime.runtime import Runtime


class Streamer:
    """Handler of layer calls on the calling thread, which runs them without gradients. Subclasses look at more.

    Attributes:
        is_open: layer calls come to it.
    """

    def __init__(self, runtime: Runtime, layers: tuple[Layer, ...]) -> None:
        self._runtime = runtime
        self.device = runtime.device
        self._layers = layers
        self._staying: frozenset[str] = frozenset()  # on the device, whatever layer is called
        self._next: dict[int, int] = {}
        self._ahead: dict[int, DeviceCopy] = {}  # of the layer that comes next
        self._fetched: dict[str, DeviceCopy] = {}
        self.is_open = False

    # ---- what subclasses may do otherwise

    def arrived(self, request: Request) -> None:
        """Note a layer call that the model has come to; its layer may not have arrived yet."""

    def swapped_in(self, copy: DeviceCopy) -> None:
        """Note parameters on the device: those that no layer owns before all calls, a layer's before each of its own."""

    def run(self, request: Request, copy: DeviceCopy) -> Any:
        """Run a layer call on its parameters; return the outputs for the model."""
        return self._runtime.layer_calls.run_attached(request, copy.leaves)

    def evicted(self) -> None:
        """Note that the call is over, and its layer has left the device."""

    # ---- one pass

    @contextmanager
    def streaming(self, unlayered: tuple[str, ...], order: tuple[int, ...]) -> Iterator[None]:
        """Stream layer calls of this thread while open. `order` (may be empty) tells which layer to prefetch."""
        if self.is_open:
            yield
            return
        self._runtime.resident_packs.sync_to_device()
        with (
            self.on_device(unlayered, order) as copy,
            self._runtime.installation.installed(copy.leaves),
            checkpoints_bypassed(),
            handled_by(self),
            torch.no_grad(),
        ):
            yield

    @contextmanager
    def on_device(self, unlayered: tuple[str, ...], order: tuple[int, ...] = ()) -> Iterator[DeviceCopy]:
        """Keep `unlayered` on the device, and handle layer calls, while open. Nothing stays."""
        self._staying = frozenset(unlayered)
        self._next = dict(pairwise(order))
        copy = self._runtime.residency.swap_in(unlayered)
        self.is_open = True
        try:
            copy.wait(self.device)
            self.swapped_in(copy)
            self._runtime.installation.fetch = self._fetch
            yield copy
        finally:
            self._runtime.installation.fetch = None
            self.is_open = False
            for left in (copy, *self._fetched.values(), *self._ahead.values()):
                self._runtime.residency.evict(left)
            self._fetched.clear()
            self._ahead.clear()

    def call(self, request: Request) -> Any:
        """Run one layer call at once."""
        with handled_by(None):  # it is no code between layers that runs
            self.arrived(request)
            copy = self._copy_of(request.layer)
            try:
                following = self._next.get(request.layer)
                if following is not None and following != request.layer:
                    self._ahead[following] = self._swap_in(self._layers[following].parameters)
                copy.wait(self.device)
                self.swapped_in(copy)
                return self.run(request, copy)
            finally:
                self._runtime.residency.evict(copy)
                del copy  # its memory
                self.evicted()

    def _fetch(self, name: str) -> Tensor:
        if name not in self._fetched:
            self._fetched[name] = self._swap_in((name,))
            self._fetched[name].wait(self.device)
        return self._fetched[name].leaves[name].detach()

    def _copy_of(self, layer: int) -> DeviceCopy:
        copy = self._ahead.pop(layer, None)
        while self._ahead:
            self._runtime.residency.evict(self._ahead.popitem()[1])
        return self._swap_in(self._layers[layer].parameters) if copy is None else copy

    def _swap_in(self, names: tuple[str, ...]) -> DeviceCopy:
        held = self._runtime.resident_packs.leaves(names)
        copy = self._runtime.residency.swap_in(tuple(n for n in names if n not in self._staying and n not in held))
        copy.leaves.update(held)
        return copy
