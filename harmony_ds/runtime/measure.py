"""Measures a model on the device with one micro-batch: the call order, and the bytes of every call.

The model's forward runs on the calling thread. Each layer is swapped in alone, run forward and, with a made-up
gradient, backward at once, exactly as a step would run it; then it is evicted. Nothing is kept: no gradient, no random
number, no change of a buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from harmony_ds.decomposer.find import Layer
from harmony_ds.device.base import Device, MemoryProbe
from harmony_ds.errors import ParameterOutsideLayerError
from harmony_ds.offload.residency import DeviceCopy, Residency
from harmony_ds.profiler.costs import CallCost, CostTable
from harmony_ds.runtime.boundary import Glue, GlueSink, Slot
from harmony_ds.runtime.intercept import Request, handled_by
from harmony_ds.runtime.layer_call import Kept, LayerCalls, RecordedCall
from harmony_ds.runtime.lending import Lending
from harmony_ds.runtime.micro_batch import Objective
from harmony_ds.runtime.random_streams import RandomStreams
from harmony_ds.runtime.structure import Structure, structure_of


@dataclass(slots=True)
class _Row:
    """What was seen of one call."""

    layer: int
    alive: int
    forward: int = 0
    backward: int = 0
    stash: int = 0
    call: RecordedCall | None = None
    made: list[Slot] = field(default_factory=list)
    taken: list[Slot] = field(default_factory=list)
    glued: list[GlueSink] = field(default_factory=list)


class Measurement:
    """Runs one micro-batch through the model, layer by layer. Used once."""

    def __init__(
        self,
        device: Device,
        layers: tuple[Layer, ...],
        residency: Residency,
        lending: Lending,
        layer_calls: LayerCalls,
        random: RandomStreams,
    ) -> None:
        self.device_type = device.torch_device.type
        self._device = device
        self._layers = layers
        self._residency = residency
        self._lending = lending
        self._calls = layer_calls
        self._random = random
        self._resident: tuple[str, ...] = ()
        self._rows: list[_Row] = []
        self._glue = Glue()
        self._kept: list[Kept] = []
        self._probe: MemoryProbe | None = None
        self._base = 0
        self._known: dict[Structure, int] = {}

    def run(self, forward: Callable[[], Any], objective: Objective, seed: int, resident: tuple[str, ...]) -> CostTable:
        """Costs of `forward` and of propagating `objective` of its outputs.

        Raises:
            ParameterOutsideLayerError: a parameter was used outside its layer; `Lending.touched` has its name.
            BaseException: whatever the model or the objective raised.
        """
        self._resident = resident
        self._lending.touched.clear()
        copy = self._swap_in(resident)
        self._random.open()
        try:
            with self._lending.lent(copy.leaves, keep_buffers=False), self._device.probe() as probe:
                self._probe = probe
                self._base = probe.live_bytes()
                self._random.start(self, seed)
                tail, held = self._measure(probe, forward, objective)
        except Exception as error:
            if self._lending.touched and not isinstance(error, ParameterOutsideLayerError):
                raise ParameterOutsideLayerError(str(error)) from error
            raise
        finally:
            self._probe = None
            self._random.close()
            self._residency.evict(copy)
        return self._table(tail, held)

    def _measure(self, probe: MemoryProbe, forward: Callable[[], Any], objective: Objective) -> tuple[int, int]:
        """Runs everything; returns the peak behind the last layer, beyond what was alive when it was called, and what
        stays until the last call has been propagated through.
        """
        with handled_by(self), torch.enable_grad():
            outputs = forward()
        probe.reset()
        alive = self._rows[-1].alive if self._rows else 0
        loss = objective(outputs)
        if loss is not None and loss.requires_grad:
            loss.backward()
        tail = max(0, probe.peak_bytes() - self._base - alive)
        del outputs, loss
        for row in self._rows:
            for slot in row.made:
                slot.take()
        return tail, max(0, probe.live_bytes() - self._base)

    def _swap_in(self, names: tuple[str, ...]) -> DeviceCopy:
        copy = self._residency.swap_in(names)
        copy.wait(self._device)
        return copy

    def call(self, request: Request) -> Any:
        """One layer call of the model: measured, its outputs cut."""
        probe = self._probe
        assert probe is not None
        row = _Row(request.layer, alive=probe.live_bytes() - self._base)
        self._rows.append(row)
        names = self._layers[request.layer].parameters
        copy = self._swap_in(tuple(name for name in names if name not in self._resident))
        try:
            probe.reset()
            before = probe.live_bytes()
            outputs, call = self._calls.forward(
                request, len(self._rows) - 1, copy.leaves, self._glue, self._random.snapshot
            )
            row.forward = probe.peak_bytes() - before
            if call is not None:
                self._note(row, call)
                self._propagate_once(
                    row, call, copy, (*structure_of(self._layers[request.layer], request), row.forward)
                )
            return outputs
        finally:
            self._residency.evict(copy)

    def _note(self, row: _Row, call: RecordedCall) -> None:
        row.call = call
        # In a step the recorded call would hold these until it is propagated through.
        self._kept += [kept for kept in call.tensors if isinstance(kept, Kept)]
        row.stash = sum(entry.nbytes for entry in call.entries if entry.users == 1)
        row.made = [slot for slot in call.slots if slot is not None]
        row.taken = [sink for sink in call.sinks if isinstance(sink, Slot)]
        row.glued = [sink for sink in call.sinks if isinstance(sink, GlueSink)]

    def _propagate_once(self, row: _Row, call: RecordedCall, copy: DeviceCopy, structure: Structure) -> None:
        assert self._probe is not None
        if not self._device.has_values and structure in self._known:
            row.backward = self._known[structure]
            self._calls.forget(call)
            return
        self._propagate(row, call, copy, self._probe)
        self._known[structure] = row.backward

    def _propagate(self, row: _Row, call: RecordedCall, copy: DeviceCopy, probe: MemoryProbe) -> None:
        """Backward with a made-up gradient; what reaches earlier calls is dropped.

        Where gradients gather on the leaves, the plan counts them by itself: they are taken off here. A second run
        shows what adding to them takes.
        """
        tensors = list(call.tensors)
        for entry in call.entries:
            entry.users += 1
        first = self._backward_bytes(row, call, copy, probe)
        call.tensors = tensors
        again = self._backward_bytes(row, call, copy, probe)
        if self._residency.accumulates_in_place:
            gathered = sum(
                leaf.grad.numel() * leaf.grad.element_size() for leaf in copy.leaves.values() if leaf.grad is not None
            )
            row.backward = max(first - gathered, again)
        else:
            row.backward = first
        for leaf in copy.leaves.values():
            leaf.grad = None

    def _backward_bytes(self, row: _Row, call: RecordedCall, copy: DeviceCopy, probe: MemoryProbe) -> int:
        for slot in row.made:
            slot.add(torch.ones(slot.shape, dtype=slot.dtype, device=self._device.torch_device))
        probe.reset()
        before = probe.live_bytes()
        self._calls.backward(call, copy.leaves, self._random.replay)
        peak = probe.peak_bytes() - before
        self._random.switch(self)
        for sink in call.sinks:
            if sink is not None:
                sink.take()
        return peak

    def _table(self, tail: int, held: int) -> CostTable:
        costs: list[CallCost] = []
        for position, row in enumerate(self._rows):
            costs.append(
                CallCost(
                    alive_bytes=row.alive,
                    stash_bytes=row.stash,
                    shared_bytes=self._shared_bytes(position),
                    forward_bytes=row.forward,
                    # The graph is whole when the forward pass peaks; what it holds afterwards is less.
                    graph_bytes=row.forward,
                    backward_bytes=row.backward,
                    needs_backward=row.call is not None,
                )
            )
        return CostTable(tuple(row.layer for row in self._rows), tuple(costs), tail, held)

    def _shared_bytes(self, position: int) -> int:
        """Gradients that wait, once everything from `position` on has been propagated through, for what lies before."""
        later = self._rows[position:]
        direct = {id(slot): slot for row in later for slot in row.taken if slot.call < position}
        glued = {id(sink): sink for row in later for sink in row.glued if sink.deadline < position}
        # When gradients run through glue, those of the layers' outputs behind it come into being beside them.
        newest = max((sink.deadline for sink in glued.values()), default=-1)
        behind = [slot for row in self._rows[newest : newest + 1] for slot in row.made] if newest >= 0 else []
        return (
            sum(slot.nbytes for slot in direct.values())
            + sum(sink.nbytes for sink in glued.values())
            + sum(slot.nbytes for slot in behind if id(slot) not in direct)
        )
