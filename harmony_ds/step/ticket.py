"""One micro-batch in its group's queue: its loss is known now, later, or never.

The program may start backward passes itself: `loss.backward()` in the place of `engine.backward(loss)`, which divides its
loss. As in DeepSpeed, gradients that come to a model's outputs from outside are divided by the accumulation steps then,
each once, where it enters (`_door`): another output may be made of one (`logits` and their `loss`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from harmony_ds.errors import BatchError, UnsupportedError, UsageError
from harmony_ds.model.boundary import explaining_errors, reachable_nodes
from harmony_ds.model.intercept import Autocast
from harmony_ds.model.trees import map_tensors, tensors_in
from harmony_ds.model.untouched import is_for_measuring
from harmony_ds.runtime.micro_batch import MicroBatch
from harmony_ds.step.division import divided, divided_by
from harmony_ds.step.inputs import Arguments
from harmony_ds.step.pending import Evaluation, Node, PendingTensor, mark_door

LossFunction = Callable[[Any], Tensor]
DESTROYED = (
    "this engine has been destroyed, and its model is a plain one again: to train it, call harmony_ds.initialize."
)


class Stage(enum.Enum):
    """Passes of a micro-batch that have run."""

    QUEUED = enum.auto()
    FORWARDED = enum.auto()  # its forward pass, on its own: the program read its loss or outputs
    FAILED = enum.auto()  # its forward pass, which has raised something that its caller has got
    PROPAGATED = enum.auto()  # both passes


class Queue(Protocol):
    """The group, as its tickets know it."""

    def forward_now(self, ticket: QueuedMicroBatch) -> None:
        """Run the forward pass of `ticket`, whose loss or outputs the program reads."""

    def propagating(self, ticket: QueuedMicroBatch, later: bool = False) -> None:
        """Note that the program propagates back from an output of `ticket`; `later`: autograd does so now."""

    def divisor(self, divided_by: frozenset[float]) -> int:
        """Return the accumulation steps, by which gradients of the program's own backward pass are divided.

        `divided_by`: numbers that the program has divided a loss by; that it is divided twice is noted.
        """

    def check_divided(self, steps: frozenset[int]) -> None:
        """Raise UnsupportedError if gradients that other engines have divided by `steps` are of no use here."""


class LossTerms:
    """The terms, made of a micro-batch's outputs, whose sum it propagates back from.

    Micro-batches whose outputs meet in one loss share it: to the program they are the forward passes of one micro-batch.

    Attributes:
        tickets: the micro-batches, in the order of their calls.
        terms: each with what gradients that come to outputs are divided by.
        expected: checks their sum, in the first step.
    """

    def __init__(self, ticket: QueuedMicroBatch) -> None:
        self.tickets = [ticket]
        self.terms: list[tuple[Node, int]] = []
        self.expected: Callable[[Tensor], None] | None = None
        self._is_propagating = False

    def take_over(self, other: LossTerms) -> None:
        """Take over the micro-batches and terms of `other`."""
        self.tickets = sorted([*self.tickets, *other.tickets], key=lambda ticket: ticket.micro_batch.index)
        self.terms += other.terms
        for ticket in other.tickets:
            ticket.loss = self

    @property
    def leaves(self) -> list[Node]:
        """Outputs of its micro-batches that they propagate back from."""
        nodes = [one for node, _ in self.terms for one in node.made_from(lambda _: False)]
        return [node for node in nodes if node.read is not None and node.tickets[0] in self.tickets]

    def sum(self, outputs: Mapping[Any, Any], apart: bool = False) -> tuple[Tensor | None, dict[Node, Tensor]]:
        """Return what is propagated back from (None: nothing), and the values of all that it is made of.

        Args:
            outputs: by ticket. Where some are missing, zeros stand for them.
            apart: no gradient leads to the program's own tensors.
        """
        divisors = {divisor for _, divisor in self.terms}
        each = {divisor: Evaluation(partial(self._given, outputs, divisor), apart) for divisor in divisors}
        terms = [each[divisor].of(node) for node, divisor in self.terms]
        values = {node: value for evaluation in each.values() for node, value in evaluation.values.items()}
        return (sum(terms[1:], terms[0]) if terms else None), values

    def _given(self, outputs: Mapping[Any, Any], divisor: int, node: Node) -> Tensor | None:
        """Return the value of `node`, if it is an output of its micro-batches, or the part of others; else None."""
        if not any(ticket in self.tickets for ticket in node.tickets):
            return torch.zeros(node.shape, dtype=node.dtype, device=node.device)
        if node.read is None:
            return None
        if node.tickets[0] not in outputs:
            return torch.zeros(node.shape, dtype=node.dtype, device=node.device, requires_grad=node.requires_grad)
        return _divided(node.read(outputs[node.tickets[0]]), divisor)

    def objective(self) -> Tensor | None:
        """Return what the fused pack of the last micro-batch propagates back from, made of the outputs of all."""
        outputs = {ticket: ticket.micro_batch.outputs for ticket in self.tickets}
        total, values = self.sum(outputs)
        if self.expected is not None and total is not None:
            self.expected(total.detach())
        _keep(outputs, values)
        for ticket in self.tickets:
            ticket.micro_batch.outputs = None
        return total

    def backward_now(self) -> None:
        """Propagate back at once: one of the forward passes has run on its own. So do the others then."""
        if self._is_propagating:
            return
        self._is_propagating = True
        try:
            outputs = {ticket: ticket.outputs() for ticket in self.tickets}
        finally:
            self._is_propagating = False
        total, values = self.sum(outputs)
        _keep(outputs, values)
        self.terms.clear()
        steps = frozenset[int]().union(*(ticket.divided_by for ticket in self.tickets))
        with divided(steps), explaining_errors():
            assert total is not None
            total.backward()
        for ticket in self.tickets:
            ticket.received, ticket.loss = True, LossTerms(ticket)


class QueuedMicroBatch:
    """A ticket: one micro-batch whose loss is known now, later, or never.

    Attributes:
        loss: what it propagates back from.
        received: a gradient has come to outputs that were computed on their own.
    """

    def __init__(
        self,
        group: Queue,
        micro_batch: MicroBatch,
        arguments: Arguments,
        loss_fn: LossFunction,
        call: Callable[..., Any],
        aside: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.micro_batch = micro_batch
        micro_batch.objective = self.objective
        self.arguments = arguments
        self.call = call
        self.aside = aside
        self.loss_fn = loss_fn
        self._group: Queue | None = group
        self._destroyed = False  # its engine, before its step was over
        self.nodes: WeakSet[Node] = WeakSet()
        self.divided_by: frozenset[int] = frozenset()
        """Accumulation steps by which engines have divided the gradients that it hands on to what is before it."""
        self.loss = LossTerms(self)
        self.stage = Stage.QUEUED
        self.is_pending = False  # what its caller has been given
        self.received = False
        self.on_trial = False
        self.is_of_outputs = False  # the loss that a backward pass of autograd's now runs from
        self.uses_more = False  # than its outputs: the loss that it was propagated back from
        self.joins_others = False  # a tensor with a graph of layers has been joined to its outputs
        # Who propagates back expects the gradients of what came in as soon as that is done.
        self.leads_outside = any(t.requires_grad for t in arguments.tensors)

    @property
    def resolved(self) -> bool:
        return self.stage is not Stage.QUEUED

    @property
    def wanted(self) -> bool:
        """Whether the program propagates back from it, and that has not been done."""
        return (bool(self.loss.terms) or self.received) and self.stage is not Stage.PROPAGATED

    @property
    def evaluates(self) -> bool:
        return not self.micro_batch.state.modes.training[0]

    @property
    def is_held(self) -> bool:
        """Whether the program still has something of its outputs, or made of them, that is not computed."""
        return any(node.owner() is not None and node.value is None for node in self.nodes)

    @property
    def measured_modes(self) -> bytes:
        """Key of its measurements: its modes, and whether the program makes its loss of other outputs, or of several."""
        flags, passes = self.micro_batch.state.modes.flags, len(self.loss.tickets)
        if passes > 1:
            return flags + f"a loss of {passes} forward passes".encode()
        own = any(leaf.shape.numel() != 1 for leaf in self.loss.leaves)
        return flags + (b"a loss of the program's" if own else b"")

    @property
    def inputs_beside(self) -> list[Any]:
        """The inputs of those that share its loss."""
        return [ticket.micro_batch.inputs for ticket in self.loss.tickets if ticket is not self]

    def share_loss(self, tickets: Sequence[Any]) -> bool:
        """Propagate back together with `tickets`, from a loss of all their outputs.

        Returns:
            Whether they are the same engine's, in the same step.
        """
        if any(not isinstance(one, QueuedMicroBatch) or one._group is not self._group for one in tickets):
            return False
        for ticket in tickets:
            if ticket.loss is not self.loss:
                self.loss.take_over(ticket.loss)
        return True

    def backward(self, node: Node) -> None:
        members = [ticket for ticket in node.tickets if ticket in self.loss.tickets]
        if self is not members[0]:  # which has noted it for all of them
            return
        group = self._open_group()
        for ticket in self.loss.tickets:
            divisor = ticket._divisor(group, node.divisors)
            ticket._note_caller()
        self.loss.terms.append((node, divisor))
        for ticket in self.loss.tickets:
            group.propagating(ticket)

    def receive(self, gradient: Tensor) -> Tensor:
        """Take a gradient of one of its outputs, which were computed on their own; return what goes on from there."""
        if self.micro_batch.at_work:  # on its way from a later layer to an earlier one: an output may lie between them
            return gradient
        if is_for_measuring() is not None:  # another engine measures a loss that leads here, too
            return gradient
        self.check_not_propagated()
        group = self._open_group()
        self._note_caller()
        self.received = True
        self.uses_more |= not self.is_of_outputs
        group.propagating(self, later=True)
        divisor = self._divisor(group, frozenset())
        if divisor != 1 and self.joins_others:
            raise UnsupportedError(
                "loss.backward() of a loss that is made of more than the model's outputs (an attribute of a module, or "
                "what a hook has kept): only gradients that come by outputs can be divided by the accumulation steps. Call "
                "engine.backward(loss), or let the model return what the loss is made of."
            )
        return gradient if divisor == 1 else gradient / divisor

    def _divisor(self, group: Queue, loss_divisors: frozenset[float]) -> int:
        """Return what gradients that come to its outputs now are divided by: 1 if they have been divided already."""
        before = divided_by()
        if before is None:
            divisor = group.divisor(loss_divisors)
            self.divided_by |= {divisor}
            return divisor
        group.check_divided(before)
        self.divided_by |= before
        return 1

    def _open_group(self) -> Queue:
        if self._group is None:
            raise UsageError(
                DESTROYED
                if self._destroyed
                else "this micro-batch cannot be propagated back from any more: its step is over (engine.step() or "
                "optimizer.step() was called, or failed). Call engine.backward(loss) before the step that it belongs to."
            )
        return self._group

    def _note_caller(self) -> None:
        """Note the modes in which its loss is propagated back from: autocast, and what is frozen by now."""
        micro_batch = self.micro_batch
        micro_batch.backward_autocast = Autocast.current(micro_batch.home.type)
        before, micro_batch.state = micro_batch.state, micro_batch.state.at_backward()
        if self.wanted and micro_batch.state is not before:
            raise UnsupportedError(
                "parameters were frozen (requires_grad_(False)) between two backward passes from one micro-batch, which "
                "run as one: propagate back from the sum of its losses."
            )

    def check_not_propagated(self) -> None:
        """Raise UsageError if its backward pass or its step is over, or its engine destroyed."""
        if self._destroyed:
            raise UsageError(DESTROYED)
        if self.stage is Stage.PROPAGATED:
            raise UsageError(
                "this micro-batch has been propagated back from already: a parameter's .grad was looked at, or its inputs "
                "require a gradient, so its backward pass ran at once. Propagate back once, from the sum of its losses."
            )
        self._open_group()

    def backward_from_loss(self, divisor: int, scale: float) -> PendingTensor:
        """Do what `backward(loss / divisor * scale)` does; return the loss."""
        self._note_caller()
        like = (self,), torch.Size(), torch.float32, self.micro_batch.home
        loss = PendingTensor(Node(*like, read=self.loss_fn))
        scaled = Node(*like, function=lambda values: next(iter(values)) / divisor * scale, operands=[loss.node])
        self.loss.terms.append((scaled, 1))
        if self.stage is Stage.FORWARDED:
            self.loss.backward_now()
        return loss

    def outputs(self) -> Any:
        """Return the model's outputs, with their graph; computed now if need be."""
        if self.micro_batch.outputs is None:
            self._forward_now()
        return self.micro_batch.outputs

    def _forward_now(self) -> None:
        propagated = self.stage is Stage.PROPAGATED
        if self._group is None or propagated:
            if self._destroyed:
                raise UsageError(DESTROYED)
            why = "its backward pass is over" if propagated else "it was never propagated back from in its step"
            raise BatchError(
                f"this micro-batch's outputs are not known any more: {why}. Look at them before engine.backward(loss) or "
                "engine.step(), or run the engine under torch.no_grad()."
            )
        self._group.forward_now(self)

    def surrogate_loss(self, outputs: Any) -> Tensor | None:
        """Return what would be propagated back from if its call had returned `outputs`, or what takes about as long."""
        leaves = [(leaf, leaf.read) for leaf in self.loss.leaves if leaf.tickets[0] is self and leaf.read is not None]
        with suppress(BatchError):
            if not leaves:
                return self.loss_fn(outputs)
            if all(leaf.shape.numel() == 1 or read(outputs).shape == leaf.shape for leaf, read in leaves):
                return self.loss.sum({self: outputs}, apart=True)[0]
        floats = [t for t in tensors_in(outputs) if t.requires_grad]
        return sum((t.float().sum() for t in floats[1:]), floats[0].float().sum()) if floats else None

    def objective(self, outputs: Any) -> Tensor | None:
        """Return what the fused pack propagates back from: nothing, if the forward pass ran on its own, or if a later one
        shares its loss.
        """
        if self.stage is Stage.FORWARDED:
            _keep({self: outputs}, {})
            return None
        self.micro_batch.outputs = outputs  # of joined ones the engine has them
        return self.loss.objective() if self is self.loss.tickets[-1] else None

    def forward_ran(self) -> None:
        """Note that the forward pass ran on its own: its loss can be read, and propagated from, until the step is over."""
        micro_batch = self.micro_batch
        micro_batch.cut_outputs()
        outputs = {id(one): one for one in tensors_in(micro_batch.outputs) if one.requires_grad}
        used, doors = _inputs_of_others(outputs.values()), {key: _door(one) for key, one in outputs.items()}
        micro_batch.outputs = map_tensors(lambda one: doors.get(id(one), one), micro_batch.outputs)
        self.stage = Stage.FORWARDED
        if self.wanted:
            self.loss.backward_now()
        for key, output in outputs.items():
            entrance = doors[key] if key in used else output  # others' gradients come to those that are used
            entrance.register_hook(self._receive_leaf if output.is_leaf else self.receive)

    def _receive_leaf(self, gradient: Tensor) -> None:
        """Return what the model was given, or keeps, and returns: no gradient of the model's own comes by it."""
        if self._group is not None:
            self.receive(gradient)

    def finish_propagation(self) -> None:
        """Note that its backward pass is done; what the program still has of it stays."""
        self.loss.terms.clear()
        self.stage = Stage.PROPAGATED

    def close(self, destroyed: bool = False) -> None:
        """Drop graph, outputs and inputs, not what the program still has: the step is over, or the engine `destroyed`."""
        self._destroyed = destroyed
        if self.stage is Stage.FORWARDED and self.micro_batch.outputs is not None and not destroyed:
            _keep({self: self.micro_batch.outputs}, {})
        for node in [one for one in self.nodes if one.value is not None]:
            node.function, node.operands = None, ()
        self.loss.terms.clear()
        self.micro_batch.close()
        self.arguments.forget()
        self._group = None


def _keep(outputs: Mapping[QueuedMicroBatch, Any], values: Mapping[Node, Tensor]) -> None:
    """Keep of `outputs`, and of what was made of them, what the program may still read when the step is over.

    Args:
        outputs: by ticket.
        values: of nodes, where they are known.
    """

    def known(node: Node) -> Tensor | None:
        if node in values:
            return values[node]
        return None if node.read is None else node.read(outputs[node.tickets[0]]).detach()  # type: ignore[index]

    # Where it has what is much smaller than they are (losses of rows, predictions), they are not kept for that.
    evaluation = Evaluation(known)
    small = max((tensor.numel() // 8 for tensor in tensors_in(list(outputs.values()))), default=0)

    def to_keep(ticket: Any, value: Tensor) -> Tensor:  # a copy: it may be a view of others
        # A number stays where it is: a copy from one device to another makes both wait. More than that would need
        # memory of the device that no plan has. From there it comes back on the stream that it goes out by.
        if value.numel() == 1:
            return value.detach().clone()
        micro_batch: MicroBatch = ticket.micro_batch
        return micro_batch.device.host_copy(value.detach(), non_blocking=value.device == micro_batch.home)

    def is_kept(node: Node) -> bool:
        is_own = all(ticket in outputs for ticket in node.tickets)
        if node.value is None and is_own and node.shape.numel() <= max(1, small):
            node.value = to_keep(node.tickets[0], evaluation.of(node))
        return node.value is not None

    nodes = {node for ticket in outputs for node in ticket.nodes if node.owner() is not None}
    for held in sorted(nodes, key=lambda node: node.number):
        for one in held.made_from(is_kept):
            if one.read is not None and one.tickets[0] in outputs:
                one.value = to_keep(one.tickets[0], one.read(outputs[one.tickets[0]]))  # type: ignore[index]


def _divided(tensor: Tensor, divisor: int) -> Tensor:
    """Return `tensor` so that gradients which come to it are divided."""
    if divisor == 1 or not tensor.requires_grad:
        return tensor
    alias = tensor.view_as(tensor)
    alias.register_hook(lambda gradient: gradient / divisor)
    return alias


def _inputs_of_others(outputs: Collection[Tensor]) -> set[int]:
    """Return the ids of those `outputs` that others were computed from."""
    edges = {edge for node in reachable_nodes(output.grad_fn for output in outputs) for edge in node.next_functions}
    return {id(output) for output in outputs if (output.grad_fn, output.output_nr) in edges}


def _door(output: Tensor) -> Tensor:
    """Return `output` as the program gets it: in the same memory, but no view.

    To write into a view in place gives it another place in autograd's graph, past the hooks on the one that it had.
    """
    if output.is_leaf or output.layout is not torch.strided:
        return output
    with torch.inference_mode(False), torch.enable_grad():  # though the reader may want no gradient now
        door: Tensor = torch.ops.aten._unsafe_view(output, output.shape)
    mark_door(door.grad_fn)
    return door
