"""Forward passes on the calling thread, layer by layer and without a plan: evaluation, `generate`, measuring.

The weights of a layer are swapped in when the layer is called, those of the next layer in the known order just before
that call runs, and evicted after it. Parameters that are on the device already are used there. A parameter that is used
outside its layer's calls stays to the end of the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from harmony_ds.decomposer.find import Layer
from harmony_ds.model.checkpointing import checkpoints_bypassed
from harmony_ds.model.intercept import Request, handled_by
from harmony_ds.offload.device_copies import DeviceCopy
from harmony_ds.runtime.runtime import Runtime

RunCall = Callable[[Request, DeviceCopy], Any]
"""Runs a layer call with the layer's weights on the device; returns the outputs for the model."""


class LayerCallObserver:
    """Base of objects that a `Streamer` tells of the stages of each layer call; each stage may be ignored.

    For each call: `call_reached`, `weights_arrived`, then the call runs, then `call_finished`.
    """

    def call_reached(self, request: Request) -> None:
        """Note that the model calls a layer, whose weights may not be on the device yet."""

    def weights_arrived(self, copy: DeviceCopy) -> None:
        """Note weights on the device: a layer's before each of its calls; the unlayered parameters before all calls."""

    def call_finished(self) -> None:
        """Note that the call has returned or raised, and that its layer's weights have left the device."""


class Streamer:
    """Machine that runs a model layer by layer on the calling thread, without a plan.

    Attributes:
        device: where layers run.
        is_open: layer calls of this thread come to this streamer.
    """

    def __init__(self, runtime: Runtime, layers: tuple[Layer, ...]) -> None:
        self.device = runtime.device
        self._runtime = runtime
        self._layers = layers
        self._unlayered: frozenset[str] = frozenset()  # on the device while open
        self._next_layer: dict[int, int] = {}
        self._prefetched: dict[int, DeviceCopy] = {}  # by layer
        self._used_between_calls: dict[str, DeviceCopy] = {}  # by name of the parameter
        self._kept: list[DeviceCopy] = []  # of heads, until their outputs have been computed
        # Held while open only: an observer may hold this streamer.
        self._run_call: RunCall | None = None
        self._observers: Sequence[LayerCallObserver] = ()
        self.is_open = False

    @contextmanager
    def streaming(self, unlayered: tuple[str, ...], order: tuple[int, ...]) -> Iterator[None]:
        """Run layer calls of this thread without gradients while open.

        Args:
            unlayered: names of the parameters that no layer owns.
            order: layers in the order of their calls, as far as known, by which the next one is prefetched.
        """
        if self.is_open:
            yield
            return
        self._runtime.resident_packs.sync_to_device()
        with (
            self.opened(unlayered, self._run_without_gradients, order=order) as copy,
            self._runtime.installation.installed(copy.leaves),
            checkpoints_bypassed(),
            handled_by(self),
            torch.no_grad(),
        ):
            yield

    @contextmanager
    def opened(
        self,
        unlayered: tuple[str, ...],
        run_call: RunCall,
        observers: Sequence[LayerCallObserver] = (),
        order: tuple[int, ...] = (),
    ) -> Iterator[DeviceCopy]:
        """Keep `unlayered` parameters on the device while open, and be ready for `call`. No weights stay after it.

        Args:
            run_call: runs each layer call once its weights are there.
            observers: told of the stages of each call, in this order.
        """
        self._unlayered = frozenset(unlayered)
        self._next_layer = dict(pairwise(order))
        self._run_call, self._observers = run_call, observers
        copy = self._runtime.device_copies.swap_in(unlayered)
        self.is_open = True
        try:
            self._wait_for(copy)
            self._runtime.installation.fetch = self._fetch
            yield copy
        finally:
            self._runtime.installation.fetch = None
            self.is_open = False
            self._run_call, self._observers = None, ()
            self.evict_kept()
            for left in (copy, *self._used_between_calls.values(), *self._prefetched.values()):
                self._runtime.device_copies.evict(left)
            self._used_between_calls.clear()
            self._prefetched.clear()

    def call(self, request: Request) -> Any:
        """Run one layer call at once; return its outputs for the model."""
        assert self._run_call is not None
        with handled_by(None):  # modules that the layer calls are not layer calls
            for observer in self._observers:
                observer.call_reached(request)
            copy = self._weights_of(request.layer)
            try:
                following = self._next_layer.get(request.layer)
                if following is not None and following != request.layer:
                    self._prefetched[following] = self._swap_in(self._layers[following].parameters)
                self._wait_for(copy)
                return self._run_call(request, copy)
            finally:
                if copy not in self._kept:
                    self._runtime.device_copies.evict(copy)
                del copy  # or its memory would be there until this returns
                for observer in self._observers:
                    observer.call_finished()

    def keep(self, copy: DeviceCopy) -> None:
        """Keep the weights of the call that runs now until `evict_kept`: what it gives is computed later."""
        self._kept.append(copy)

    def evict_kept(self) -> None:
        """Evict the weights that were kept, of which nothing is computed any more."""
        self._runtime.layer_calls.close_heads()
        while self._kept:
            self._runtime.device_copies.evict(self._kept.pop())

    def _run_without_gradients(self, request: Request, copy: DeviceCopy) -> Any:
        return self._runtime.layer_calls.run_attached(request, copy.leaves)

    def _wait_for(self, copy: DeviceCopy) -> None:
        copy.wait(self.device)
        for observer in self._observers:
            observer.weights_arrived(copy)

    def _fetch(self, name: str) -> Tensor:
        """Return the device copy of a parameter that code between layer calls uses; it stays while open."""
        if name not in self._used_between_calls:
            self._used_between_calls[name] = self._swap_in((name,))
            self._used_between_calls[name].wait(self.device)
        return self._used_between_calls[name].leaves[name].detach()

    def _weights_of(self, layer: int) -> DeviceCopy:
        """Return the layer's weights, prefetched or being swapped in; evict what was prefetched for another layer."""
        copy = self._prefetched.pop(layer, None)
        while self._prefetched:
            self._runtime.device_copies.evict(self._prefetched.popitem()[1])
        return self._swap_in(self._layers[layer].parameters) if copy is None else copy

    def _swap_in(self, names: tuple[str, ...]) -> DeviceCopy:
        """Swap in those of `names` that are not on the device; return them with those that are."""
        resident = self._runtime.resident_packs.leaves(names)
        held = self._runtime.resident_packs.held
        missing = tuple(name for name in names if name not in self._unlayered and name not in held)
        copy = self._runtime.device_copies.swap_in(missing)
        copy.leaves.add(resident)
        return copy
