"""One micro-batch in its group's queue: its loss is known now, later, or never.

The program may start backward passes itself: `loss.backward()` in the place of `engine.backward(loss)`, which divides its
loss. As in DeepSpeed, gradients that come to a model's outputs from outside are divided by the accumulation steps then,
each once, where it enters (`_door`): another output may be made of one (`logits` and their `loss`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from harmony_ds.calls.boundary import explaining_errors, reachable_nodes
from harmony_ds.calls.intercept import Autocast
from harmony_ds.calls.trees import map_tensors, tensors_in
from harmony_ds.calls.untouched import is_for_measuring
from harmony_ds.errors import BatchError, UnsupportedError, UsageError
from harmony_ds.runtime.micro_batch import MicroBatch
from harmony_ds.stepping.division import divided, divided_by
from harmony_ds.stepping.inputs import Arguments
from harmony_ds.stepping.pending import Evaluation, Node, PendingTensor

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


class QueuedMicroBatch:
    """A ticket: one micro-batch whose loss is known now, later, or never."""

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
        self._objectives: list[tuple[Node, int]] = []  # what is propagated back from, and what gradients are divided by
        self.divided_by: frozenset[int] = frozenset()
        """Accumulation steps by which engines have divided the gradients that it hands on to what is before it."""
        self.expected: Callable[[Tensor], None] | None = None  # checks their sum, in the first step
        self.stage = Stage.QUEUED
        self.is_pending = False  # what its caller has been given
        self._received = False  # a gradient has come to outputs that were computed on their own
        # Who propagates back expects the gradients of what came in as soon as that is done.
        self.leads_outside = any(t.requires_grad for t in arguments.tensors)

    @property
    def resolved(self) -> bool:
        return self.stage is not Stage.QUEUED

    @property
    def wanted(self) -> bool:
        """Whether the program propagates back from it, and that has not been done."""
        return (bool(self._objectives) or self._received) and self.stage is not Stage.PROPAGATED

    @property
    def evaluates(self) -> bool:
        return not self.micro_batch.state.modes.training[0]

    @property
    def is_held(self) -> bool:
        """Whether the program still has something of its outputs, or made of them, that is not computed."""
        return any(node.owner() is not None and node.value is None for node in self.nodes)

    @property
    def measured_modes(self) -> bytes:
        """Key of its measurements: its modes, and whether the program makes its loss of other outputs."""
        own = any(leaf.shape.numel() != 1 for leaf in self._leaves)
        return self.micro_batch.state.modes.flags + (b"a loss of the program's" if own else b"")

    @property
    def _leaves(self) -> list[Node]:
        """Own outputs that it propagates back from."""
        nodes = [one for node, _ in self._objectives for one in node.made_from(lambda _: False)]
        return [node for node in nodes if node.read is not None and self in node.tickets]

    def backward(self, node: Node) -> None:
        group = self._open_group()
        divisor = self._divisor(group, node.divisors)
        self._note_caller()
        self._objectives.append((node, divisor))
        group.propagating(self)

    def receive(self, gradient: Tensor) -> Tensor:
        """Take a gradient of one of its outputs, which were computed on their own; return what goes on from there."""
        if self.micro_batch.at_work:  # on its way from a later layer to an earlier one: an output may lie between them
            return gradient
        if is_for_measuring() is not None:  # another engine measures a loss that leads here, too
            return gradient
        self.check_not_propagated()
        group = self._open_group()
        self._note_caller()
        self._received = True
        group.propagating(self, later=True)
        divisor = self._divisor(group, frozenset())
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
        self._objectives.append((scaled, 1))
        if self.stage is Stage.FORWARDED:
            self._backward_now()
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

    def _sum(self, outputs: Any, apart: bool = False) -> tuple[Tensor | None, dict[Node, Tensor]]:
        """Return what it propagates back from (None: nothing), and the values of all that it is made of."""
        each = {divisor: Evaluation(partial(self._given, outputs, divisor), apart) for _, divisor in self._objectives}
        terms = [each[divisor].of(node) for node, divisor in self._objectives]
        values = {node: value for evaluation in each.values() for node, value in evaluation.values.items()}
        return (sum(terms[1:], terms[0]) if terms else None), values

    def _given(self, outputs: Any, divisor: int, node: Node) -> Tensor | None:
        """Return the value of `node`, if it is an output of its own, or the part of others; else None."""
        if self not in node.tickets:
            return torch.zeros(node.shape, dtype=node.dtype, device=node.device)
        return None if node.read is None else _divided(node.read(outputs), divisor)

    def like_objective(self, outputs: Any) -> Tensor | None:
        """Return what would be propagated back from if its call had returned `outputs`, or what takes about as long."""
        leaves = [(leaf, leaf.read) for leaf in self._leaves if leaf.read is not None]
        with suppress(BatchError):
            if not leaves:
                return self.loss_fn(outputs)
            if all(leaf.shape.numel() == 1 or read(outputs).shape == leaf.shape for leaf, read in leaves):
                return self._sum(outputs, apart=True)[0]
        floats = [t for t in tensors_in(outputs) if t.requires_grad]
        return sum((t.float().sum() for t in floats[1:]), floats[0].float().sum()) if floats else None

    def objective(self, outputs: Any) -> Tensor | None:
        """Return what the fused pack propagates back from: nothing, if the forward pass ran on its own."""
        total, values = (None, {}) if self.stage is Stage.FORWARDED else self._sum(outputs)
        if self.expected is not None and total is not None:
            self.expected(total.detach())
        self._keep(outputs, values)
        return total

    def _keep(self, outputs: Any, values: dict[Node, Tensor]) -> None:
        """Keep of `outputs`, and of what was made of them, what the program may still read when the step is over."""
        # Where it has what is much smaller than they are (losses of rows, predictions), they are not kept for that.
        evaluation = Evaluation(lambda node: values.get(node, node.read and node.read(outputs).detach()))
        small = max((tensor.numel() // 8 for tensor in tensors_in(outputs)), default=0)

        def to_keep(value: Tensor) -> Tensor:  # a copy: it may be a view of others
            # A number stays where it is: a copy from one device to another makes both wait. More than that would need
            # memory of the device that no plan has. From there it comes back on the stream that it goes out by.
            if value.numel() == 1:
                return value.detach().clone()
            host = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
            return host.copy_(value.detach(), non_blocking=value.device == self.micro_batch.home)

        def is_kept(node: Node) -> bool:
            if node.value is None and node.tickets == (self,) and node.shape.numel() <= max(1, small):
                node.value = to_keep(evaluation.of(node))
            return node.value is not None

        for held in [node for node in self.nodes if node.owner() is not None]:
            for one in held.made_from(is_kept):
                if one.read is not None and self in one.tickets:
                    one.value = to_keep(one.read(outputs))

    def forward_ran(self) -> None:
        """Note that the forward pass ran on its own: its loss can be read, and propagated from, until the step is over."""
        micro_batch = self.micro_batch
        micro_batch.cut_outputs()
        outputs = {id(one): one for one in tensors_in(micro_batch.outputs) if one.requires_grad}
        used, doors = _inputs_of_others(outputs.values()), {key: _door(one) for key, one in outputs.items()}
        micro_batch.outputs = map_tensors(lambda one: doors.get(id(one), one), micro_batch.outputs)
        self.stage = Stage.FORWARDED
        if self.wanted:
            self._backward_now()
        for key, output in outputs.items():
            entrance = doors[key] if key in used else output  # others' gradients come to those that are used
            entrance.register_hook(self._receive_leaf if output.is_leaf else self.receive)

    def _receive_leaf(self, gradient: Tensor) -> None:
        """Return what the model was given, or keeps, and returns: no gradient of the model's own comes by it."""
        if self._group is not None:
            self.receive(gradient)

    def finish_propagation(self) -> None:
        """Note that its backward pass is done; what the program still has of it stays."""
        self._objectives.clear()
        self.stage = Stage.PROPAGATED

    def _backward_now(self) -> None:
        """Run what `backward` noted before the forward pass was run on its own."""
        total, values = self._sum(self.outputs())
        self._keep(self.outputs(), values)
        self._objectives.clear()
        with divided(self.divided_by), explaining_errors():
            assert total is not None
            total.backward()
        self._received = True

    def close(self, destroyed: bool = False) -> None:
        """Drop graph, outputs and inputs, not what the program still has: the step is over, or the engine `destroyed`."""
        self._destroyed = destroyed
        if self.stage is Stage.FORWARDED and self.micro_batch.outputs is not None and not destroyed:
            self._keep(self.micro_batch.outputs, {})
        for node in [one for one in self.nodes if one.value is not None]:
            node.function, node.operands = None, ()
        self._objectives.clear()
        self.micro_batch.close()
        self.arguments.forget()
        self._group = None


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
    return door
