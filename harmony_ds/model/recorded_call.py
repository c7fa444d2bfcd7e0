"""The record of one layer call, from its forward pass to its backward pass; `layer_call` fills it and uses it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from harmony_ds.errors import ModelError
from harmony_ds.model.arguments import Arguments
from harmony_ds.model.buffers import Buffers
from harmony_ds.model.intercept import Request
from harmony_ds.model.random_streams import RandomState
from harmony_ds.model.sameness import is_exact
from harmony_ds.model.slices import Slicing
from harmony_ds.model.targets import OutputGradient, Targets
from harmony_ds.model.token_expression import Beside, TiledWork
from harmony_ds.offload.stash import StashEntry


@dataclass(slots=True, eq=False)
class RecordedCall:
    """Everything needed to recompute a layer call and to propagate through it.

    Attributes:
        request: the call as the model made it, without its arguments.
        number: place among the calls of its micro-batch.
        targets: per tensor argument: the target of its gradient, or None.
        slicing: how the call is sliced; None: not at all.
        buffers: the layer's before the call; None unless the call depends on buffers that it changes.
        tensors: per tensor argument: its stash entry.
        states: random state before the call, or before each of its slices if it draws random numbers.
        output_gradients: per tensor output: the sum of its gradients, or None where none flows.
        graph: per tensor output: its edge in the graph, if that is kept and a gradient flows; empty: to be recomputed.
        views: outputs that share their memory with another output or an input.
        norms: of the outputs, to be compared with a recomputation's; empty: not compared.
        unread: number of the tiled call inside whose output a recomputation need not compute; -1: there is none.
    """

    request: Request
    number: int
    arguments: Arguments
    targets: Targets
    slicing: Slicing | None = None
    buffers: Buffers | None = None
    tensors: list[StashEntry] = field(default_factory=list)
    states: list[RandomState] = field(default_factory=list)
    output_gradients: list[OutputGradient | None] = field(default_factory=list)
    graph: list[GradientEdge | None] = field(default_factory=list)
    views: list[AliasedOutput] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    unread: int = -1

    @property
    def entries(self) -> list[StashEntry]:
        """The entries that are swapped."""
        return [entry for entry in self.tensors if not entry.stays]

    @property
    def slice_bytes(self) -> int:
        """The bytes of what the largest slice needs of the swapped entries; of a call that is not sliced, all of them."""
        if self.slicing is None:
            return sum(entry.nbytes for entry in self.entries)
        pairs = zip(self.tensors, self.slicing.dims.inputs, strict=True)
        return sum(self.slicing.share_of(entry.nbytes, dim) for entry, dim in pairs if not entry.stays)

    @property
    def on_device(self) -> list[Tensor]:
        """The saved tensors, where none has left the device."""
        return [entry.device_tensor for entry in self.tensors if entry.device_tensor is not None]

    def keep_graph(self, outputs: list[Tensor]) -> None:
        """Keep the graph edges of `outputs`, but not their memory, which autograd may not need."""
        self.graph = [
            get_gradient_edge(output) if target is not None and output.requires_grad else None
            for output, target in zip(outputs, self.output_gradients, strict=True)
        ]

    def refuse_further_gradients(self) -> None:
        """Let a gradient that still comes to an output raise ModelError: the call has been propagated through."""
        for output_gradient in filter(None, self.output_gradients):
            output_gradient.propagated = True

    def check(self, outputs: list[Tensor], name: str) -> None:
        """Raise ModelError if outputs of a recomputation differ from forward's in number, dtypes, shapes or kept norms."""
        are_alike = len(outputs) == len(self.output_gradients)
        for expected, output in zip(self.output_gradients, outputs, strict=False):
            if expected is not None:
                is_alike = expected.dtype == output.dtype and (
                    self.slicing is not None or expected.shape == output.shape
                )
                are_alike = are_alike and is_alike
        if not are_alike:
            self._refuse_recomputed(outputs, name)
        if self.norms and not all(map(_alike, self.norms, norms_of(outputs), outputs)):
            raise ModelError(
                f"layer {name} gave something else when it was run again in the backward pass: it reads "
                "what another micro-batch's forward has set meanwhile (an attribute, a global variable), or draws random "
                "numbers of a generator that is not torch's, Python's or NumPy's own. Pass such values as arguments: "
                "docs/contract.md."
            )

    def _refuse_recomputed(self, outputs: list[Tensor], name: str) -> NoReturn:
        """Raise ModelError with dtypes and shapes of the outputs of forward and of the recomputation."""
        whole = self.slicing is None
        given = [s and (s.dtype, s.shape if whole else None) for s in self.output_gradients]
        found = [s and (o.dtype, o.shape if whole else None) for s, o in zip(given, outputs, strict=False)]
        raise ModelError(
            f"layer {name} returned {len(given)} tensors in forward, {given}, and {len(outputs)} when it was "
            f"recomputed, {found}: outputs must depend on arguments, parameters, buffers and random numbers alone."
        )


@dataclass(slots=True, eq=False)
class RecordedHead(RecordedCall):
    """What the program has made of a head's output in tiles of tokens, recorded to be propagated through later.

    Attributes:
        work: what is run again, tile by tile.
        beside: its operands that get gradients of their own.
        is_of_program: whether it was made after the model's forward had returned the output.
    """

    work: TiledWork | None = None
    beside: Sequence[Beside] = ()
    is_of_program: bool = False


def norms_of(outputs: list[Tensor]) -> list[float]:
    known = [output.is_floating_point() and output.layout is torch.strided and not output.is_meta for output in outputs]
    return [torch.linalg.vector_norm(o.detach()).item() if k else 0.0 for o, k in zip(outputs, known, strict=True)]


def _alike(one: float, other: float, output: Tensor) -> bool:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return True
    return not is_exact(output.device) and math.isclose(one, other, rel_tol=0.02)


class WriteCheck:
    """The version of a tensor when this was made, by which a later write is found; it does not keep the tensor's memory."""

    __slots__ = "_counter", "_version"

    def __init__(self, tensor: Tensor) -> None:
        self._version = tensor._version
        self._counter = tensor.detach()
        self._counter.data = tensor.new_empty(0)  # keeps the version counter without the memory

    @property
    def happened(self) -> bool:
        return self._counter._version != self._version


class AliasedOutput(WriteCheck):
    """An output of `layer` that shares its memory with another output or an input."""

    __slots__ = ("_layer",)

    def __init__(self, layer: str, output: Tensor) -> None:
        super().__init__(output)
        self._layer = layer

    def check(self) -> None:
        """Raise ModelError if that memory has been written to since."""
        if self.happened:
            raise ModelError(
                f"layer {self._layer} returned a tensor that shares its memory with another or with an argument (a view), "
                "and one of them was changed in place afterwards, so that gradients would be lost. Make the operation out "
                "of place (x = x + y instead of x += y), or return a clone."
            )
