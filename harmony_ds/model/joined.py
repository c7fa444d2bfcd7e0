"""One layer call over the rows of several micro-batches: arguments joined, results split.

    micro-batch 0   rows 0 1 --.                          .--> rows 0 1
    micro-batch 1   rows 0 1 ----> layer, rows 0 1 2 3 ---+--> rows 0 1
                                                               each is a part that knows its whole

Where nothing happens to a layer's results before the next layer takes them, their parts are joined again without a copy:
the whole goes on, and its gradient comes back whole. What all rows share (rotary tables) has to be equal in all
micro-batches. Rows that look at each other (batch normalization, capacities of experts) are not joined: `row_probe`
finds out which layers those are.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from harmony_ds.device.base import Device, Event, Stream
from harmony_ds.model.arguments import PLAIN, Collector, LayerInputs, collector_variable
from harmony_ds.model.called_layer import CalledLayer
from harmony_ds.model.contract import UnseenError
from harmony_ds.model.device_transfers import DeviceTransfers
from harmony_ds.model.intercept import Request
from harmony_ds.model.sameness import equal
from harmony_ds.model.slices import parts_of, whole_of
from harmony_ds.model.trees import flatten_all, unflatten_all
from harmony_ds.offload.device_copies import DeviceCopies
from harmony_ds.offload.host_buffers import HostBuffer, HostBuffers
from harmony_ds.scheduler.rows import CallKind, RowDims

_logger = logging.getLogger(__name__)
_ALL = -1  # layers
RAISED = -2  # all, because one raised something
_END: Any = object()


class CannotJoinError(UnseenError):
    """Calls that were joined cannot be: the step is to run again without."""


@dataclass(slots=True, eq=False)
class Joined:
    """One call in the place of those of several micro-batches.

    Attributes:
        places: of the micro-batches, among all.
        dims: where the call holds the rows; None: of one micro-batch.
        collectors: of each micro-batch, where its calls leave tensors beside their results.
        collected: by key, how many the first micro-batch's collector held before.
    """

    places: tuple[int, ...]
    request: Request
    dims: RowDims | None = None
    collectors: tuple[Collector | None, ...] = ()
    collected: Mapping[str, int] = field(default_factory=dict)


class Joins:
    """Joiner of calls, which knows what cannot be joined.

    Attributes:
        dims: by layer and kind of call, where its tensors hold the rows; others run micro-batch by micro-batch.
        are_random: whether layers draw random numbers: joined calls draw others than single ones.
        code_between_draws: whether the code between layers does: it draws from the streams of single micro-batches.
    """

    def __init__(
        self,
        device: Device,
        device_transfers: DeviceTransfers,
        layers: Sequence[CalledLayer],
        device_copies: DeviceCopies,
    ) -> None:
        self.dims: Mapping[int, Mapping[CallKind, RowDims]] = {}
        self.are_random = False
        self.code_between_draws = False
        self._device = device
        self._device_transfers = device_transfers
        self._layers = layers
        self._device_copies = device_copies
        self._refused: dict[int, str] = {}
        # Tensors that were compared in this step, by id and version, and the layers that take them:
        self._same: dict[tuple[tuple[int, int], ...], tuple[Sequence[Tensor], list[int]]] = {}
        self._doubts: defaultdict[int, list[tuple[list[int], Tensor]]] = defaultdict(list)
        """By device: layers, and whether what was joined for them differs."""
        self._checks: list[tuple[list[list[int]], Tensor, HostBuffer, Event]] = []  # the same, on its way to the host
        self._buffers = HostBuffers(device)

    @property
    def are_off(self) -> bool:
        """Whether no calls are joined any more."""
        return min(self._refused, default=0) < 0

    def refuse(self, why: str, layer: int = _ALL) -> CannotJoinError:
        """Join no calls of `layer` from now on; return what is to be raised for the step to run again."""
        if layer not in self._refused:
            self._refused[layer] = why
            what = "layer calls" if layer < 0 else f"calls of layer {self._layers[layer].name}"
            _logger.warning("%s run micro-batch by micro-batch from now on: %s", what, why)
        return CannotJoinError(why)

    def reconsider(self) -> bool:
        """Join calls again after a step has failed with single ones, too; return whether an error had ended that."""
        return self._refused.pop(RAISED, None) is not None

    def join(self, requests: Sequence[Request]) -> list[Joined]:
        """Return as few calls as can be made for `requests`, which are of one layer.

        Raises:
            CannotJoinError: what all rows share differs.
        """
        layer = requests[0].layer
        called = self._layers[layer]  # whose hooks see each micro-batch's gradient
        known = layer in self.dims and layer not in self._refused and called.treats_rows_alike
        if len(requests) < 2 or not known or self._device_copies.are_hooked(called.names):
            return [Joined((place,), request) for place, request in enumerate(requests)]
        alike: dict[Any, list[int]] = {}
        inputs = [LayerInputs.from_request(request) for request in requests]
        for place, one in enumerate(inputs):
            alike.setdefault(_signature(requests[place], one, place), []).append(place)
        made: list[Joined] = []
        for places in alike.values():
            members = [inputs[place] for place in places]
            dims = self.dims[layer].get(members[0].arguments.kind) if len(places) > 1 else None
            joined = None if dims is None else self._joined(requests[places[0]], members, dims)
            if joined is None:
                made += [Joined((place,), requests[place]) for place in places]
            else:
                collectors, before = tuple(one.collector for one in members), members[0].arguments.collected
                made.append(Joined(tuple(places), joined, dims, collectors, before))
        return made

    def _joined(self, first: Request, inputs: Sequence[LayerInputs], dims: RowDims) -> Request | None:
        """Return one call for those of alike `inputs`, the `first` among them; None: they cannot be joined."""
        arguments = inputs[0].arguments
        tensors: list[Tensor] = []
        for dim, *several in zip(dims.inputs, *(one.tensors for one in inputs), strict=True):
            if dim is None and not self._are_same(first.layer, several):
                return None
            tensors.append(several[0] if dim is None else self._whole(several, dim))
        return arguments.request_with(first, tensors)

    def _whole(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        whole = whole_of(self._device_transfers.to_current([*parts]), dim)
        self._device_transfers.mark(whole)
        return whole

    def _are_same(self, layer: int, tensors: Sequence[Tensor]) -> bool:
        others = [one for one in tensors[1:] if one is not tensors[0]]
        if not others:
            return True
        if tensors[0].requires_grad:  # whose gradient would go to one micro-batch
            return False
        key = tuple([(id(one), 0 if one.is_inference() else one._version) for one in tensors])
        if not self._device.has_values:
            return True
        if key in self._same:
            self._same[key][1].append(layer)
            return True
        takers = [layer]
        place = self._device_transfers.device_of(tensors[0])
        if not self._device.copies_overlap or place is None:
            if not all(equal(tensors[0], other) for other in others):
                self.refuse("what all rows share differs from micro-batch to micro-batch", layer)
                return False
        else:
            with self._device_transfers.running_on(place):
                self._doubts[place] += [(takers, (tensors[0] != other).any()) for other in others]
        self._same[key] = tensors, takers
        return True

    def issue_checks(self) -> None:
        """Copy the results of comparisons to the host, without waiting for them; see `check`."""
        here = self._device.number
        for place, doubts in self._doubts.items():
            self._device.enter(place)
            buffer = self._buffers.acquire(self, len(doubts))
            on_host = buffer.tensor(torch.Size((len(doubts),)), (1,), torch.bool)
            on_host.copy_(torch.stack([flag for _, flag in doubts]), non_blocking=True)
            takers = [layers for layers, _ in doubts]
            self._checks.append((takers, on_host, buffer, self._device.record(Stream.COMPUTE)))
        self._device.enter(here)
        self._doubts.clear()

    def check(self) -> None:
        """Raise CannotJoinError if something differed that was joined. To be called before gradients are used."""
        self.issue_checks()
        wrong: list[int] = []
        for takers, flags, _, arrived in self._checks:
            arrived.synchronize()
            wrong += [
                layer for layers, differs in zip(takers, flags.tolist(), strict=True) if differs for layer in layers
            ]
        self._give_back()
        for layer in dict.fromkeys(wrong):
            error = self.refuse("what all rows share differs from micro-batch to micro-batch", layer)
        if wrong:
            raise error

    def _give_back(self) -> None:
        for *_, buffer, arrived in self._checks:
            self._buffers.release(buffer, arrived)
        self._checks.clear()

    def discard_checks(self) -> None:
        """Discard what was compared in a step, which is over or has failed."""
        self._same.clear()
        self._doubts.clear()
        self._give_back()

    def destroy(self) -> None:
        """Give page-locked memory back."""
        self._buffers.destroy()

    def part(self, call: Joined, result: Any) -> list[Any]:
        """Return each micro-batch's part of `result`; split what `call` has left with a collector among those of all."""
        count = len(call.places)
        if call.dims is None:
            return [result]
        dims, parted = iter(call.dims.outputs), dict[int, list[Any]]()

        def parts(tree: Any) -> list[Any]:
            leaves, shape = flatten_all((tree,))
            several = []
            for leaf in leaves:
                dim: Any = next(dims, _END) if isinstance(leaf, Tensor) else None
                if dim is _END:
                    raise self.refuse("it returns more tensors than when it was measured", call.request.layer)
                if dim is not None and id(leaf) not in parted:
                    parted[id(leaf)] = parts_of(leaf, dim, count)
                    self._device_transfers.mark(parted[id(leaf)])
                several.append([leaf] * count if dim is None else parted[id(leaf)])
            return [unflatten_all([one[member] for one in several], shape)[0] for member in range(count)]

        results = parts(result)
        for key, before in call.collected.items():
            lists = [collector[key] for collector in call.collectors if collector is not None]
            new = [parts(one) for one in lists[0][before:]]
            del lists[0][before:]
            for member, collected in enumerate(lists):
                collected.extend(one[member] for one in new)
        if next(dims, _END) is not _END:
            raise self.refuse("it returns fewer tensors than when it was measured", call.request.layer)
        return results


def _signature(request: Request, inputs: LayerInputs, place: int) -> Any:
    """Return what is equal for calls that can be joined; `place` for one whose layer may write into its arguments."""
    arguments = inputs.arguments
    if arguments.containers:
        return place
    plain = [leaf if leaf is None else _identity(leaf) for leaf in arguments.leaves]  # most are None: a tensor's place
    tensors = [(t.shape, t.dtype, t.requires_grad) for t in inputs.tensors]
    called = request.grad, arguments.positional, arguments.keywords, tuple(arguments.collected.items())
    structure = repr((arguments.places, arguments.shape, list(arguments.caches)))
    return called, _settings_of_caller(request), tuple(plain), tuple(tensors), structure


def _settings_of_caller(request: Request) -> Any:
    """Return what is equal for calls that find the same autocast, modes, settings of modules and context variables."""
    settings = None if request.lane_settings is None else request.lane_settings.signature
    collector = collector_variable()  # one for each micro-batch: what is in them is split
    variables = [(id(one), _identity(value)) for one, value in request.context.items() if one is not collector]
    return request.autocast, request.around, settings, frozenset(variables)


def _identity(value: Any) -> Any:
    """Return what is equal for equal plain values, and otherwise for one object alone."""
    return f"{type(value)} {value!r}" if isinstance(value, PLAIN) else id(value)
