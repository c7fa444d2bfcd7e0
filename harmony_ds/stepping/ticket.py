"""One micro-batch in its group's queue: its loss is known now, later, or never."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor

from harmony_ds.calls.intercept import Autocast
from harmony_ds.calls.places import Places
from harmony_ds.calls.tensor_hooks import LeftTensors
from harmony_ds.calls.trees import tensors_in
from harmony_ds.errors import BatchError, UsageError
from harmony_ds.runtime.micro_batch import MicroBatch
from harmony_ds.stepping.inputs import Arguments
from harmony_ds.stepping.pending import PendingLoss

LossFunction = Callable[[Any], Tensor]


class Queue(Protocol):
    """The group, as its tickets know it."""

    def autocast(self) -> Autocast | None:
        """The calling thread's, on the device."""

    def forward_now(self, ticket: QueuedMicroBatch) -> None:
        """Runs the forward pass of `ticket`, because somebody looks at what comes of it."""

    def propagating(self, ticket: QueuedMicroBatch, later: bool = False) -> None:
        """Somebody propagates back from an output of `ticket`; `later`: and autograd is at it."""


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
        micro_batch.serve(self.objective)
        self.arguments = arguments
        self.call = call
        self.aside = aside
        self.loss_fn = loss_fn
        self._group: Queue | None = group
        self._value: Tensor | None = None
        self._attached: Tensor | None = None
        self._objectives: list[Callable[[Tensor], Tensor]] = []
        self._alone = False  # its forward pass ran before the group's
        self.left = LeftTensors()  # that its forward pass kept, where the program finds them
        self.received = False  # a gradient has come to outputs that were computed on their own
        self.propagated = False  # its backward pass is done
        # Who propagates back expects the gradients of what came in as soon as that is done.
        self.leads_outside = any(t.requires_grad for t in arguments.tensors)

    def loss(self, attached: bool) -> Tensor:
        """Its loss, computed now if need be; with its graph if `attached` and the step is not over."""
        if self._value is None:
            self._forward_now()
        if attached and self._attached is not None:
            return self._attached
        assert self._value is not None
        return self._value

    @property
    def resolved(self) -> bool:
        return self._value is not None

    @property
    def wanted(self) -> bool:
        """Whether somebody propagates back from it, and that has not been done."""
        return (bool(self._objectives) or self.received) and not self.propagated

    def backward(self, loss: PendingLoss) -> None:
        self._objectives.append(lambda own: loss.evaluate(lambda _: own))
        self._note_caller()
        if self._group is not None:
            self._group.propagating(self)

    def receive(self) -> None:
        """A gradient comes to its outputs, which were computed on their own."""
        self.check_not_propagated()
        self.received = True
        self._note_caller()
        if self._group is not None:
            self._group.propagating(self, later=True)

    def _note_caller(self) -> None:
        """Whoever propagates back does so under autocast, or not."""
        if self._group is not None:
            self.micro_batch.note_caller(self._group.autocast())

    def check_not_propagated(self) -> None:
        """Raises UsageError if its backward pass is over."""
        if self.propagated:
            raise UsageError(
                "this micro-batch has been propagated back from already: a parameter's .grad was looked at, or its inputs "
                "require a gradient, so its backward pass ran at once. Propagate back once, from the sum of its losses."
            )

    def backward_from_loss(self, divisor: int, scale: float) -> None:
        """As `backward(loss / divisor * scale)`."""
        self._note_caller()
        self._objectives.append(lambda own: own / divisor if scale == 1.0 else own / divisor * scale)
        if self._alone:
            self._backward_now()

    def outputs(self) -> Any:
        """The model's outputs, with their graph; computed now if need be."""
        if self.micro_batch.outputs is None:
            self._forward_now()
        return self.micro_batch.outputs

    def _forward_now(self) -> None:
        if self._group is None or self.propagated:
            why = (
                "its backward pass is over"
                if self.propagated
                else "it was never propagated back from, and its step is over"
            )
            raise BatchError(
                f"this micro-batch's outputs are not known any more: {why}. Look at them before engine.backward(loss) or "
                "engine.step(), or run the engine under torch.no_grad()."
            )
        self._group.forward_now(self)

    def take_loss(self, outputs: Any) -> Tensor:
        """Notes the loss among `outputs`."""
        loss = self.loss_fn(outputs)
        self._value = loss.detach().clone()  # a loss may be a view of something large
        return loss

    def objective(self, outputs: Any) -> Tensor | None:
        """What the fused pack propagates back from: nothing, if the forward pass ran on its own."""
        if self._alone:
            return None
        loss = self.take_loss(outputs)
        terms = [objective(loss) for objective in self._objectives]
        return sum(terms[1:], terms[0]) if terms else None

    def forward_ran(self, left: Places) -> None:
        """The forward pass ran on its own: its loss can be looked at, and propagated from, until the step is over.

        Args:
            left: places that it has written to.
        """
        micro_batch = self.micro_batch
        micro_batch.cut_outputs(self.arguments.written, left)
        if self.leads_outside:
            micro_batch.lead_outside(self.arguments.tensors)
        self._keep_graph()
        if self.wanted:
            self._backward_now()
        outputs = tensors_in(micro_batch.outputs)
        for output in outputs:
            if output.requires_grad:
                output.register_hook(lambda grad: self.receive())
        self.left = LeftTensors(left, outputs)

    def _keep_graph(self) -> None:
        self._alone = True
        try:
            self._attached = self.take_loss(self.micro_batch.outputs)
        except BatchError:
            self._attached = None

    def finish_propagation(self) -> None:
        """Its backward pass is done; the value of its loss stays."""
        self._attached = None
        self._objectives.clear()
        self.propagated = True

    def _backward_now(self) -> None:
        """Runs what `backward` noted before the forward pass was run on its own."""
        assert self._attached is not None
        terms = [objective(self._attached) for objective in self._objectives]
        self._objectives.clear()
        sum(terms[1:], terms[0]).backward()
        self.received = True

    def close(self) -> None:
        """The step is over: the value stays; graph, outputs and inputs go."""
        self._attached = None
        self._objectives.clear()
        self.left = LeftTensors()
        self.micro_batch.close()
        self.arguments.forget()
        self._group = None
