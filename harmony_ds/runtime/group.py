"""The micro-batches of one optimizer step, as they are handed over one by one, and how they run together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.device.base import Device
from harmony_ds.errors import BatchError
from harmony_ds.offload.host_optimizer import Hyper
from harmony_ds.offload.ledger import Kind, Ledger
from harmony_ds.offload.updater import Clipping
from harmony_ds.runtime.checkpointing import refuse_around_engine
from harmony_ds.runtime.intercept import Autocast
from harmony_ds.runtime.micro_batch import MicroBatch, loss_of
from harmony_ds.runtime.pending import PendingLoss, PendingOutput
from harmony_ds.runtime.random_streams import micro_batch_seed
from harmony_ds.runtime.row_probe import few_rows
from harmony_ds.runtime.runner import InputChangedError, OffPlanError, Runner
from harmony_ds.runtime.sample import Sample
from harmony_ds.runtime.trees import map_tensors, tensors_in

LossFunction = Callable[[Any], Tensor]
_ATTEMPTS = 8
"""How often a step is run again because a micro-batch showed layers that were not measured."""


@dataclass(frozen=True, slots=True)
class OutputKind:
    """What calls of one form (these keyword arguments, that many positional ones) return.

    Attributes:
        pending: whether the loss can stay pending: there is a scalar loss among the outputs.
        bare: whether the output is that scalar itself.
        dtype: of the loss.
    """

    pending: bool
    bare: bool
    dtype: torch.dtype


class OutputKinds:
    """Learns what a model returns, from the first time each form of call is measured."""

    def __init__(self) -> None:
        self._known: dict[object, OutputKind] = {}

    def get(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OutputKind | None:
        return self._known.get(self._form(args, kwargs))

    def learn(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        try:
            loss = loss_of(outputs)
            # A tuple may be unpacked at once, so it cannot stay pending.
            kind = OutputKind(not isinstance(outputs, tuple), outputs is loss, loss.dtype)
        except BatchError:
            kind = OutputKind(False, False, torch.float32)
        self._known[self._form(args, kwargs)] = kind

    @staticmethod
    def _form(args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        return len(args), frozenset(key for key, value in kwargs.items() if value is not None)


class QueuedMicroBatch:
    """A ticket: one micro-batch whose loss is known now, later, or never."""

    def __init__(
        self,
        group: StepGroup,
        micro_batch: MicroBatch,
        loss_fn: LossFunction,
        call: Callable[..., Any],
        aside: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.micro_batch = micro_batch
        self.call = call
        self.aside = aside
        self.loss_fn = loss_fn
        self._group: StepGroup | None = group
        self._value: Tensor | None = None
        self._attached: Tensor | None = None
        self._objectives: list[Callable[[Tensor], Tensor]] = []

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
        """Whether somebody called backward on its loss."""
        return bool(self._objectives)

    def backward(self, loss: PendingLoss) -> None:
        if self._group is not None:
            self._group.propagating()
        self._objectives.append(lambda own: loss.evaluate(lambda _: own))

    def backward_from_loss(self, divisor: int, scale: float) -> None:
        """As `backward(loss / divisor * scale)`."""
        self._objectives.append(lambda own: own / divisor if scale == 1.0 else own / divisor * scale)

    def outputs(self) -> Any:
        """The model's outputs, with their graph; computed now if need be."""
        if self.micro_batch.outputs is None:
            self._forward_now()
        return self.micro_batch.outputs

    def _forward_now(self) -> None:
        if self._group is None:
            raise BatchError(
                "this micro-batch was never propagated back from, and its step is over: its outputs are not known. "
                "Call engine.backward(loss), look at them before engine.step(), or run the engine under torch.no_grad()."
            )
        self._group.forward_now(self)

    def take_loss(self, outputs: Any) -> Tensor:
        """Notes the loss among `outputs`."""
        loss = self.loss_fn(outputs)
        self._value = loss.detach().clone()  # a loss may be a view of something large
        return loss

    def objective(self, outputs: Any) -> Tensor | None:
        """What the fused pack propagates back from."""
        loss = self.take_loss(outputs)
        terms = [objective(loss) for objective in self._objectives]
        return sum(terms[1:], terms[0]) if terms else None

    def keep_graph(self) -> None:
        """The forward pass ran on its own: its loss can be looked at, and propagated from, until the step is over."""
        try:
            self._attached = self.take_loss(self.micro_batch.outputs)
        except BatchError:
            self._attached = None

    def backward_now(self) -> None:
        """Runs what `backward` noted before the forward pass was run on its own."""
        assert self._attached is not None
        terms = [objective(self._attached) for objective in self._objectives]
        self._objectives.clear()
        sum(terms[1:], terms[0]).backward()

    def close(self) -> None:
        """The step is over: the value stays; graph, outputs and inputs go."""
        self._attached = None
        self._objectives.clear()
        self.micro_batch.abandon()
        self.micro_batch.objective = lambda outputs: None
        self._group = None


@dataclass(frozen=True, slots=True)
class GroupParts:
    """What every group of an engine works with.

    Attributes:
        looked: called when an output is looked at before its boundary.
        propagating: called when somebody propagates back from one (None: nobody minds).
    """

    module: nn.Module
    device: Device
    ledger: Ledger
    runner: Runner
    kinds: OutputKinds
    seed: int
    looked: Callable[[], None]
    propagating: Callable[[], None] | None = None


class StepGroup:
    """Collects micro-batches until the boundary and runs them."""

    def __init__(self, parts: GroupParts, step: int) -> None:
        self._module = parts.module
        self._device = parts.device
        self._ledger = parts.ledger
        self._runner = parts.runner
        self._seed = parts.seed
        self._kinds = parts.kinds
        self._looked = parts.looked
        self._propagating = parts.propagating
        self._step = step
        self._queue: list[QueuedMicroBatch] = []
        self.propagated = False  # forward and backward are done, the updates are not

    def __len__(self) -> int:
        return len(self._queue)

    # ---- handing over

    def add(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of the engine: pending outputs, or real ones where the model returns no loss."""
        ticket = self.queue(args, kwargs, None)
        kind = self._kinds.get(args, kwargs)
        assert kind is not None
        if not kind.pending:
            return ticket.outputs()
        loss = PendingLoss.of(ticket, kind.dtype, self._device.torch_device)
        return loss if kind.bare else PendingOutput(loss, ticket.outputs)

    def queue(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss_fn: LossFunction | None,
        call: Callable[..., Any] | None = None,
        aside: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> QueuedMicroBatch:
        """Queues one micro-batch; measures the model first if none as large has been seen.

        Args:
            call: what is called with `args` and `kwargs` instead of the model; it calls the model itself.
            aside: makes the context that measuring runs in.
        """
        refuse_around_engine()
        call = call or self._module
        micro_batch = self._micro_batch(len(self._queue), args, kwargs, True, call)
        ticket = QueuedMicroBatch(self, micro_batch, loss_fn or loss_of, call, aside)
        if self._kinds.get(args, kwargs) is None or not self._runner.covers((args, kwargs)):
            self._measure(ticket, args, kwargs)
        self._queue.append(ticket)
        return ticket

    def _micro_batch(
        self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool, call: Callable[..., Any]
    ) -> MicroBatch:
        if not tensors_in((args, kwargs)):
            raise BatchError(
                f"micro-batch {index} holds no tensor (arguments: {[type(a).__name__ for a in args]}, "
                f"{sorted(kwargs)}): pass what the model's forward takes."
            )

        def forward() -> Any:
            return call(*self.on_device(args), **self.on_device(kwargs))

        return MicroBatch(
            index=index,
            seed=micro_batch_seed(self._seed, self._step, index),
            forward=forward,
            objective=lambda outputs: None,
            autocast=Autocast.current(self._device.torch_device.type),
            grad=grad,
            inputs=(args, kwargs),
        )

    def on_device(self, tree: Any) -> Any:
        """`tree` with its tensors copied to the device."""
        return map_tensors(self._to_device, tree)

    def _to_device(self, tensor: Tensor) -> Tensor:
        if tensor.requires_grad or tensor.device.type != "cpu":
            return tensor.to(self._device.torch_device)
        self._ledger.book_in(Kind.DATA, tensor.numel() * tensor.element_size())
        return self._device.upload(tensor)

    def _measure(self, ticket: QueuedMicroBatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        def objective(outputs: Any) -> Tensor | None:
            self._kinds.learn(args, kwargs, outputs)
            try:
                return ticket.loss_fn(outputs)
            except BatchError:
                floats = [t for t in tensors_in(outputs) if t.requires_grad]
                return sum((t.float().sum() for t in floats[1:]), floats[0].float().sum()) if floats else None

        def few(rows: int) -> Callable[[], Any]:
            few_args, few_kwargs = few_rows(own, rows)
            return lambda: ticket.call(*self.on_device(few_args), **self.on_device(few_kwargs))

        # Made-up gradients must not reach what the caller propagates through.
        own = map_tensors(_on_its_own, (args, kwargs))
        micro_batch = ticket.micro_batch
        forwarded = [t.micro_batch for t in self._queue if t.micro_batch.forwarded]
        with self._ledger.aside(), ticket.aside(), Autocast.entered(micro_batch.autocast):
            sample = Sample(
                (args, kwargs),
                lambda: ticket.call(*self.on_device(own[0]), **self.on_device(own[1])),
                few,
                objective,
                micro_batch.seed,
            )
            self._runner.measure(sample, forwarded)

    # ---- running

    def forward_now(self, ticket: QueuedMicroBatch) -> None:
        """Somebody looks at a micro-batch of this group before the boundary."""
        kind = self._kinds.get(*ticket.micro_batch.inputs)
        if kind is not None and kind.pending:
            self._looked()
        for _ in range(_ATTEMPTS):
            try:
                self._runner.forward_now(ticket.micro_batch)
                break
            except (OffPlanError, InputChangedError):
                self._measure(ticket, *ticket.micro_batch.inputs)
        else:
            raise AssertionError("the model calls other layers each time it runs")
        ticket.keep_graph()
        if ticket.wanted:
            ticket.backward_now()
        if self._propagating is not None:
            for output in tensors_in(ticket.micro_batch.outputs):
                if output.requires_grad:
                    output.register_hook(lambda grad: self.propagating())

    def propagating(self) -> None:
        """Somebody propagates back from an output."""
        if self._propagating is not None:
            self._propagating()

    def run(self, hyper: Hyper, clipping: Clipping | None) -> bool:
        """Forward, backward and updates. False if no micro-batch wants a gradient, so that nothing ran.

        Raises:
            BaseException: whatever was raised on the way.
        """
        try:
            if self.propagated:
                assert clipping is not None
                self._runner.after_norm(hyper, clipping)
                return True
            return self._run(self._runner.step, hyper, clipping)
        finally:
            for ticket in self._queue:
                ticket.close()
            self._queue.clear()

    def propagate(self, hyper: Hyper, clipping: Clipping) -> bool:
        """Forward and backward only, so that gradients can be looked at; `run` does the rest. Raises as `run`."""
        self.propagated = self.propagated or self._run(self._runner.until_norm, hyper, clipping)
        return self.propagated

    def _run(self, step: Callable[..., None], hyper: Hyper, clipping: Clipping | None) -> bool:
        tickets = [t for t in self._queue if t.wanted or t.micro_batch.forwarded]
        if not tickets:
            return False
        for ticket in tickets:
            ticket.micro_batch.objective = (
                ticket.objective if not ticket.micro_batch.forwarded else lambda outputs: None
            )
        self._run_until_planned(step, tickets, hyper, clipping)
        return True

    def _run_until_planned(
        self, step: Callable[..., None], tickets: Sequence[QueuedMicroBatch], hyper: Hyper, clipping: Clipping | None
    ) -> None:
        micro_batches = [ticket.micro_batch for ticket in tickets]
        retry = not any(m.forwarded for m in micro_batches)
        for _ in range(_ATTEMPTS):
            try:
                return step(micro_batches, hyper, clipping)
            except (OffPlanError, InputChangedError):
                if not retry:
                    raise
                # The micro-batches draw the same random numbers again, and so take the same way through the model.
                for ticket in tickets:
                    self._measure(ticket, *ticket.micro_batch.inputs)
        raise AssertionError("the model calls other layers each time it runs")

    def evaluate(self, batches: Sequence[tuple[tuple[Any, ...], dict[str, Any], LossFunction | None]]) -> list[Tensor]:
        """Losses of micro-batches, without gradients."""
        micro_batches: list[MicroBatch] = []
        for index, (args, kwargs, loss_fn) in enumerate(batches):
            micro_batch = self._micro_batch(index, args, kwargs, False, self._module)
            if not self._runner.covers((args, kwargs)):
                ticket = QueuedMicroBatch(self, micro_batch, loss_fn or loss_of, self._module)
                self._measure(ticket, args, kwargs)
            micro_batch.reduce = loss_fn or loss_of
            micro_batches.append(micro_batch)
        with self._ledger.aside():
            self._runner.evaluate(micro_batches)
        return [micro_batch.outputs.detach() for micro_batch in micro_batches]

    def abandon(self) -> None:
        """Forgets everything queued."""
        for ticket in self._queue:
            ticket.close()
        self._queue.clear()


def _on_its_own(tensor: Tensor) -> Tensor:
    """`tensor` apart from its graph; what was made by an operation may still be changed in place."""
    if not tensor.requires_grad:
        return tensor
    leaf = tensor.detach().requires_grad_()
    return leaf if tensor.is_leaf else leaf.clone()
