"""Observers of the operations of a forward pass: which tensors go from layer to layer, and which layers route rows.

Layers whose tensors have as many rows as the data says (mixtures of experts, selections by a mask) may be sent every token
by the next micro-batch. They are known by the operators that they dispatch, and measured with inputs that all take one way
as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from harmony_ds.device.live_bytes import EagerDispatchMode, tensors_among
from harmony_ds.model.arguments import collector_here
from harmony_ds.model.device_transfers import writes
from harmony_ds.model.intercept import Request, is_between_layers
from harmony_ds.model.trees import tensors_in
from harmony_ds.scheduler.flow import Flow, FlowEvent, FlowKind


class FlowWatch(TorchFunctionMode):
    """Observer of the operations between layers while it is open, and of the calls that it is told of.

    Attributes:
        in_loss: operations are noted though no layer call would be handled: the loss is computed.
    """

    def __init__(self, parameters: Collection[Tensor]) -> None:
        """Know `parameters`: those that code between layers may use, as it sees them."""
        super().__init__()
        self._numbers = WeakTensorKeyDictionary()
        self._nbytes: list[int] = []
        self._returns: list[bool] = []
        self._events: list[FlowEvent] = []
        self._lasting: list[int] = []
        self._position = -1
        self._parameters = parameters
        self.in_loss = False

    @property
    def flow(self) -> Flow:
        """Flow that was seen so far."""
        return Flow(tuple(self._nbytes), tuple(self._returns), tuple(self._events), tuple(self._lasting))

    def call(self, request: Request, took: Sequence[Tensor], gave: Any) -> None:
        """Note that the next layer call was given `took` and has returned `gave`.

        It may have written into containers among its arguments, which hold what it has of their tensors then; and handed
        more to a collector.
        """
        self._position += 1
        known = {id(tensor) for tensor in took}
        inside = [tensors_in(value) for value in (*request.args, *request.kwargs.values())]
        written = [tensors for tensors in inside if not known.issuperset(map(id, tensors))]
        collected = [t for t in tensors_in([*collector_here().values()]) if t not in self._numbers]
        self._note(FlowKind.CALL, took, [*tensors_in(gave), *chain.from_iterable(written), *collected])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not (self.in_loss or is_between_layers()):
            return func(*args, **kwargs)
        took = [*tensors_among((args, kwargs))]
        result = func(*args, **kwargs)
        if isinstance(result, (Tensor, tuple, list)) or writes(func):
            self._note(FlowKind.WRITE if writes(func) and took else FlowKind.OPERATION, took, [*tensors_among(result)])
        return result

    def _note(self, kind: FlowKind, took: Iterable[Tensor], gave: Iterable[Tensor]) -> None:
        numbers = [tuple(dict.fromkeys(map(self._number, tensors))) for tensors in (took, gave)]
        self._events.append(FlowEvent(kind, self._position, numbers[0], numbers[1]))

    def _number(self, tensor: Tensor) -> int:
        if tensor not in self._numbers:
            self._numbers[tensor] = len(self._nbytes)
            if any(tensor is parameter for parameter in self._parameters):
                self._lasting.append(len(self._nbytes))
            self._nbytes.append(tensor.nbytes if tensor.layout is torch.strided else 0)
            self._returns.append(tensor.requires_grad)
        number: int = self._numbers[tensor]
        return number


class RoutingWatch(EagerDispatchMode):
    """Observer of operators whose output shape depends on data (nonzero, masked_select, unique, ...)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen = self.seen or torch.Tag.dynamic_output_shape in getattr(func, "tags", ())
        return func(*args, **(kwargs or {}))


def extremes(inputs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Return `inputs` as they make routing most uneven: rows all alike, and all but the last one alike.

    A router decides row by row, so rows that are alike go one way, as many as there are. The odd one keeps a second
    way in use.
    """
    for but_last in (False, True):
        yield [_alike(tensor, but_last) for tensor in inputs]


def _alike(tensor: Tensor, but_last: bool) -> Tensor:
    if tensor.dim() < 2 or tensor.numel() == 0:
        return tensor
    if tensor.dtype is torch.bool:
        return torch.ones_like(tensor)
    if not tensor.is_floating_point():
        return tensor
    first, last = (0,) * (tensor.dim() - 1), (-1,) * (tensor.dim() - 1)
    rows = torch.empty_like(tensor).copy_(tensor[first].expand_as(tensor))
    if but_last:
        rows[last] = tensor[last]
    return rows
