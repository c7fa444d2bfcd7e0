"""One micro-batch in its group's queue: its loss is known now, later, or never."""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

from torch import Tensor

from harmony_ds.calls.boundary import explaining_errors
from harmony_ds.calls.intercept import Autocast
from harmony_ds.calls.trees import map_tensors, tensors_in
from harmony_ds.errors import BatchError, UnsupportedError, UsageError
from harmony_ds.runtime.micro_batch import MicroBatch
from harmony_ds.stepping.direct import EngineBackward, divided, inputs_of_others
from harmony_ds.stepping.inputs import Arguments
from harmony_ds.stepping.pending import PendingLoss

LossFunction = Callable[[Any], Tensor]
DESTROYED = (
    "this engine has been destroyed, and its model is a plain one again: call harmony_ds.initialize to train it "
    "further."
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
        """Return what gradients that come to outputs now are divided by: the accumulation steps, unless a loss has been.

        `divided_by`: numbers that the program has divided a loss by; that it is divided twice is noted.
        """


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
        self._value: Tensor | None = None
        self._attached: Tensor | None = None
        self._objectives: list[Callable[[Tensor], Tensor]] = []
        self.expected: Callable[[Tensor], None] | None = None  # checks its loss, in the first step
        self.stage = Stage.QUEUED
        self._received = False  # a gradient has come to outputs that were computed on their own
        # Who propagates back expects the gradients of what came in as soon as that is done.
        self.leads_outside = any(t.requires_grad for t in arguments.tensors)

    def loss(self, attached: bool) -> Tensor:
        """Return its loss, computed now if need be; with its graph if `attached` and the step is not over."""
        outputs = self.outputs() if self._value is None else None
        if attached and self._attached is not None:
            return self._attached
        return self.take_loss(outputs) if self._value is None else self._value  # BatchError, if there is none after all

    @property
    def resolved(self) -> bool:
        return self._value is not None

    @property
    def wanted(self) -> bool:
        """Whether the program propagates back from it, and that has not been done."""
        return (bool(self._objectives) or self._received) and self.stage is not Stage.PROPAGATED

    def backward(self, loss: PendingLoss) -> None:
        group = self._open_group()
        divisor = group.divisor(loss.divisors)
        self._note_caller()
        self._objectives.append(
            lambda own: loss.evaluate(lambda one: divided(own, divisor) if one is self else own.new_zeros(()))
        )
        group.propagating(self)

    def receive(self, gradient: Tensor) -> Tensor:
        """Take a gradient of one of its outputs, which were computed on their own; return what goes on from there."""
        if self.micro_batch.at_work:  # on its way from a later layer to an earlier one: an output may lie between them
            return gradient
        self.check_not_propagated()
        group = self._open_group()
        self._note_caller()
        self._received = True
        group.propagating(self, later=True)
        divisor = group.divisor(frozenset())
        return gradient if divisor == 1 else gradient / divisor

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
        """Raise UsageError if its backward pass is over, or its engine destroyed."""
        if self._destroyed:
            raise UsageError(DESTROYED)
        if self.stage is Stage.PROPAGATED:
            raise UsageError(
                "this micro-batch has been propagated back from already: a parameter's .grad was looked at, or its inputs "
                "require a gradient, so its backward pass ran at once. Propagate back once, from the sum of its losses."
            )

    def backward_from_loss(self, divisor: int, scale: float) -> None:
        """Do what `backward(loss / divisor * scale)` does."""
        self._note_caller()
        self._objectives.append(lambda own: own / divisor if scale == 1.0 else own / divisor * scale)
        if self.stage is Stage.FORWARDED:
            self._backward_now()

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

    def take_loss(self, outputs: Any) -> Tensor:
        """Note the loss among `outputs`."""
        loss = self.loss_fn(outputs)
        self._value = loss.detach().to(self.micro_batch.home, copy=True)  # a loss may be a view of something large
        if self.expected is not None:
            self.expected(self._value)
        return loss

    def objective(self, outputs: Any) -> Tensor | None:
        """Return what the fused pack propagates back from: nothing, if the forward pass ran on its own."""
        if self.stage is Stage.FORWARDED:
            return None
        loss = self.take_loss(outputs)
        terms = [objective(loss) for objective in self._objectives]
        return sum(terms[1:], terms[0]) if terms else None

    def forward_ran(self) -> None:
        """Note that the forward pass ran on its own: its loss can be read, and propagated from, until the step is over."""
        micro_batch = self.micro_batch
        micro_batch.cut_outputs()
        used = inputs_of_others(tensors_in(micro_batch.outputs))
        if used:  # others were computed from them; gradients that come to aliases of them are the program's alone
            own = micro_batch.outputs
            micro_batch.outputs = map_tensors(lambda one: one.view_as(one) if id(one) in used else one, own)
        self.stage = Stage.FORWARDED
        with suppress(BatchError):  # raised where the loss is read
            self._attached = self.take_loss(micro_batch.outputs)
        if self.wanted:
            self._backward_now()
        for output in {id(o): o for o in tensors_in(micro_batch.outputs) if o.requires_grad}.values():
            output.register_hook(self._receive_leaf if output.is_leaf else self.receive)

    def _receive_leaf(self, gradient: Tensor) -> None:
        """Return what the model was given, or keeps, and returns: no gradient of the model's own comes by it."""
        if self._group is not None:
            self.receive(gradient)

    def finish_propagation(self) -> None:
        """Note that its backward pass is done; the value of its loss stays."""
        self._attached = None
        self._objectives.clear()
        self.stage = Stage.PROPAGATED

    def _backward_now(self) -> None:
        """Run what `backward` noted before the forward pass was run on its own."""
        own = self.loss(attached=True)
        terms = [objective(own) for objective in self._objectives]
        self._objectives.clear()
        with EngineBackward.entered(), explaining_errors():
            sum(terms[1:], terms[0]).backward()
        self._received = True

    def close(self, destroyed: bool = False) -> None:
        """Drop graph, outputs and inputs, not the value: the step is over, or the engine `destroyed`."""
        self._destroyed = destroyed
        self._attached = None
        self._objectives.clear()
        self.micro_batch.close()
        self.arguments.forget()
        self._group = None
