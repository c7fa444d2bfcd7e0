"""Forward passes without gradients, one at a time: evaluation and `generate`.

Layers are swapped in as they are called, the next one in the known order ahead of its call, and evicted behind it. What
is on the device already is used there. A parameter that is used outside its layer's calls stays to the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from harmony_ds.calls.intercept import Request, handled_by
from harmony_ds.decomposer.find import Layer
from harmony_ds.offload.residency import DeviceCopy
from harmony_ds.runtime.parts import Parts


class Streamer:
    """Handles layer calls on the calling thread."""

    def __init__(self, parts: Parts, layers: tuple[Layer, ...]) -> None:
        self.device_type = parts.device.torch_device.type
        self._device = parts.device
        self._layers = layers
        self._residency = parts.residency
        self._device_store = parts.device_store
        self._installation = parts.installation
        self._calls = parts.layer_calls
        self._unlayered: frozenset[str] = frozenset()
        self._next: dict[int, int] = {}
        self._ahead: tuple[int, DeviceCopy] | None = None
        self._fetched: dict[str, DeviceCopy] = {}
        self._open = False

    @contextmanager
    def streaming(self, unlayered: tuple[str, ...], order: tuple[int, ...]) -> Iterator[None]:
        """While open, layer calls of this thread stream. `order` (may be empty) tells which layer to fetch ahead."""
        if self._open:
            yield
            return
        self._open = True
        self._unlayered = frozenset(unlayered)
        self._next = dict(pairwise(order))
        self._device_store.refresh()
        copy = self._residency.swap_in(unlayered)
        copy.wait(self._device)
        try:
            self._installation.fetch = self._fetch
            with self._installation.installed(copy.leaves), handled_by(self), torch.no_grad():
                yield
        finally:
            self._installation.fetch = None
            self._open = False
            for fetched in (copy, *self._fetched.values()):
                self._residency.evict(fetched)
            self._fetched.clear()
            if self._ahead is not None:
                self._residency.evict(self._ahead[1])
                self._ahead = None

    def call(self, request: Request) -> Any:
        """Runs one layer call at once."""
        copy = self._take(request.layer)
        following = self._next.get(request.layer)
        if following is not None and following != request.layer:
            self._ahead = (following, self._swap_in(following))
        try:
            copy.wait(self._device)
            return self._calls.attached(request, copy.leaves)
        finally:
            self._residency.evict(copy)

    def _fetch(self, name: str) -> Tensor:
        held = self._device_store.leaves((name,))
        if name in held:
            return held[name]
        if name not in self._fetched:
            self._fetched[name] = self._residency.swap_in((name,))
            self._fetched[name].wait(self._device)
        return self._fetched[name].leaves[name]

    def _take(self, layer: int) -> DeviceCopy:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == layer:
            return ahead[1]
        if ahead is not None:
            self._residency.evict(ahead[1])
        return self._swap_in(layer)

    def _swap_in(self, layer: int) -> DeviceCopy:
        names = self._layers[layer].parameters
        held = self._device_store.leaves(names)
        copy = self._residency.swap_in(tuple(n for n in names if n not in self._unlayered and n not in held))
        copy.leaves.update(held)
        return copy
