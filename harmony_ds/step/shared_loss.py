"""The loss of a micro-batch, or of several whose outputs meet in one; and what is kept of it after the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from harmony_ds.model.graph_cut import explaining_errors
from harmony_ds.model.token_expression import HeadClosedError
from harmony_ds.model.token_tensor import TokenTensor
from harmony_ds.model.trees import tensors_in
from harmony_ds.runtime.micro_batch import MicroBatch
from harmony_ds.step.division import divided
from harmony_ds.step.pending import Evaluation, Node, Source


class LossMember(Source, Protocol):
    """A queued micro-batch, as far as `SharedLoss` needs to know it."""

    micro_batch: MicroBatch
    loss: SharedLoss
    divided_by: frozenset[int]
    inputs_require_grad: bool

    def note_gradient(self) -> None:
        """Note that gradients have come to its outputs, which a forward pass alone has computed."""

    def send_gradients(self) -> None:
        """Let gradients that have come to its outputs wait on the host."""


class SharedLoss:
    """The loss that the program propagates back from: the sum of terms that are made of outputs of micro-batches.

    A micro-batch has a loss of its own at first. Micro-batches whose outputs meet in one loss share it: to the program they
    are the forward passes of one micro-batch.

    Attributes:
        members: the micro-batches, in the order of their calls.
        terms: (node, divisor); gradients that reach the outputs through this term are divided by it.
        expected: checks the sum of the terms, in the first step.
        is_propagating: whether `propagate_now` is at work.
    """

    def __init__(self, member: LossMember) -> None:
        self.members = [member]
        self.terms: list[tuple[Node, int]] = []
        self.expected: Callable[[Tensor], None] | None = None
        self.is_propagating = False

    def merge(self, other: SharedLoss) -> None:
        """Add the micro-batches and terms of `other`, whose micro-batches share this loss from now on."""
        self.members = sorted([*self.members, *other.members], key=lambda member: member.micro_batch.index)
        self.terms += other.terms
        for member in other.members:
            member.loss = self

    @property
    def outputs_used(self) -> list[Node]:
        """The outputs of its micro-batches that its terms are made of."""
        nodes = [one for term, _ in self.terms for one in term.dependencies(lambda _: False)]
        return [node for node in nodes if node.read is not None and node.sources[0] in self.members]

    def sum(self, outputs: Mapping[Any, Any], detached: bool = False) -> tuple[Tensor | None, dict[Node, Tensor]]:
        """Return the sum of the terms (None: there are none), and the values of all nodes that it is made of.

        Args:
            outputs: by micro-batch. Where some are missing, zeros stand for them.
            detached: whether the program's own tensors are cut from their graphs, so that no gradient reaches them.
        """
        evaluations: dict[int, Evaluation] = {}
        for _, divisor in self.terms:
            if divisor not in evaluations:
                evaluations[divisor] = Evaluation(partial(self._known_value, outputs, divisor), detached)
        terms = []
        for node, divisor in self.terms:  # no comprehension: Python 3.11 does not clear those of an error's frames
            terms.append(evaluations[divisor].value_of(node))
        values: dict[Node, Tensor] = {}
        for evaluation in evaluations.values():
            values.update(evaluation.values)
        return (sum(terms[1:], terms[0]) if terms else None), values

    def _known_value(self, outputs: Mapping[Any, Any], divisor: int, node: Node) -> Tensor | None:
        """Return the value of `node` if it is an output, or made of other losses' micro-batches alone; else None."""
        if not any(source in self.members for source in node.sources):
            return torch.zeros(node.shape, dtype=node.dtype, device=node.device)
        if node.read is None:
            return None
        if node.sources[0] not in outputs:
            # No leaf, which would be kept with its gradient while the model is measured:
            zero = torch.zeros((), dtype=node.dtype, device=node.device, requires_grad=node.requires_grad)
            return zero.repeat(node.shape)
        return _dividing_gradients(node.read(outputs[node.sources[0]]), divisor)

    def objective(self) -> Tensor | None:
        """Return what the fused pack of the last micro-batch propagates back from, made of the outputs of all."""
        outputs = {member: member.micro_batch.outputs for member in self.members}
        total, values = self.sum(outputs)
        if self.expected is not None and total is not None:
            self.expected(total.detach())
        keep_values(outputs, values)
        for member in self.members:
            member.micro_batch.outputs = None
        return total

    def propagate_now(self) -> None:
        """Run the backward pass now, since a member's forward pass ran alone. The others run theirs first."""
        if self.is_propagating:
            return
        self.is_propagating = True
        try:
            outputs = {member: member.outputs() for member in self.members}
            total, values = self.sum(outputs)
            keep_values(outputs, values)
            self.terms.clear()
            steps = frozenset[int]().union(*(member.divided_by for member in self.members))
            with divided(steps), explaining_errors():
                assert total is not None
                total.backward()
        finally:
            self.is_propagating = False
        for member in self.members:
            member.note_gradient()
            member.send_gradients()
            member.loss = SharedLoss(member)


def keep_values(outputs: Mapping[Any, Any], values: Mapping[Node, Tensor]) -> None:
    """Keep the values of `outputs`, and of what was made of them, that the program may still read after the step.

    Args:
        outputs: by micro-batch.
        values: of nodes, where they are known.
    """

    def known_value(node: Node) -> Tensor | None:
        if node in values:
            return values[node]
        return None if node.read is None else node.read(outputs[node.sources[0]]).detach()

    evaluation = Evaluation(known_value)
    # Where the program has something much smaller than the outputs (losses of rows, predictions), that is kept, not they.
    most_numel = max((tensor.numel() // 8 for tensor in tensors_in(list(outputs.values()))), default=0)

    def keep_if_small(node: Node) -> bool:
        is_own = all(source in outputs for source in node.sources)
        if node.value is None and is_own and node.shape.numel() <= max(1, most_numel):
            node.value = _copy_to_keep(node.sources[0], evaluation.value_of(node))
        return node.value is not None

    nodes = {node for member in outputs for node in member.nodes if node.owner() is not None}
    for held in sorted(nodes, key=lambda node: node.number):
        # What the model's last layer gives in tiles of tokens cannot be computed with other weights: who reads it is told.
        with suppress(HeadClosedError):
            for node in held.dependencies(keep_if_small):
                if node.read is not None and node.sources[0] in outputs:
                    node.value = _copy_to_keep(node.sources[0], node.read(outputs[node.sources[0]]))


def _copy_to_keep(member: Any, value: Tensor) -> Tensor:
    """Return a copy of `value`, which may be a view of other tensors.

    A number stays on its device: a copy from one device to another would make both wait. Larger values go to the host,
    since no plan has device memory for them. They come back on the stream that they leave by.
    """
    if value.numel() == 1:
        return value.detach().clone()
    micro_batch: MicroBatch = member.micro_batch
    if isinstance(value, TokenTensor):
        return value.copy_to_host(micro_batch.device.host_type)
    return micro_batch.device.host_copy(value.detach(), non_blocking=value.device == micro_batch.home)


def _dividing_gradients(tensor: Tensor, divisor: int) -> Tensor:
    """Return `tensor`, so that gradients which come to it are divided by `divisor`."""
    if divisor == 1 or not tensor.requires_grad:
        return tensor

    def alias(tensor: Tensor) -> Tensor:
        made = tensor.view_as(tensor)
        if made.requires_grad:
            made.register_hook(lambda gradient: gradient / divisor)
        return made

    return tensor.mapped(alias) if isinstance(tensor, TokenTensor) else alias(tensor)
