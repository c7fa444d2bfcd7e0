"""The micro-batches of one optimizer step, as they are handed over one by one, and how they run together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from harmony_ds.distributed import PeerDiverged
from harmony_ds.errors import BatchError, ModelError, UnsupportedError
from harmony_ds.model.buffers import persistent_buffers
from harmony_ds.model.contract import UnseenError, is_hook
from harmony_ds.model.intercept import Autocast
from harmony_ds.model.own_settings import Key
from harmony_ds.model.random_streams import micro_batch_seed
from harmony_ds.model.trees import map_tensors
from harmony_ds.offload.ledger import Ledger
from harmony_ds.optim.host_optimizer import Hyper
from harmony_ds.optim.updater import Clipping
from harmony_ds.profiling.sample import Sample
from harmony_ds.runtime.micro_batch import MicroBatch, OffPlanError, loss_of
from harmony_ds.step.division import divided
from harmony_ds.step.inputs import Arguments, Inputs
from harmony_ds.step.output_kinds import OutputKinds
from harmony_ds.step.replaced_forward import ReplacedForward
from harmony_ds.step.runner import Runner
from harmony_ds.step.step_checks import check_same_step, prove
from harmony_ds.step.ticket import LossFunction, Queue, QueuedMicroBatch, Stage

_logger = logging.getLogger("harmony_ds")
_ATTEMPTS = 8
"""How often a step is run again because a micro-batch showed layers that were not measured."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Whether losses of the program's own are made of what forward leaves beside its results.

    In the first step such micro-batches run at once, so that hooks and attributes have got what is theirs when the program
    makes its loss. If that is made of outputs alone, later ones wait.

    Attributes:
        verdicts: by the hooks and attributes there are, see `Contract.leaves_more`.
    """

    verdicts: dict[frozenset[Key], bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupParts:
    """Parts that every group of an engine works with.

    Attributes:
        call: calls the model, or what stands for it, with arguments on the device.
        looked, propagating: called when an output is looked at, and propagated back from, before its boundary.
        accumulation: the accumulation steps, by which a backward pass of the program's own divides.
        divided_by_hand: called when a loss that the program has divided by them is about to be divided again.
        propagate: called when gradients are wanted before the boundary.
        check_requires_grad: raises if a parameter requires a gradient that is not trained.
    """

    module: nn.Module
    call: Callable[[Callable[..., Any], Arguments], Any]
    ledger: Ledger
    runner: Runner
    kinds: OutputKinds
    trial: Trial
    replaced_forward: ReplacedForward
    seed: int
    looked: Callable[[], None]
    propagating: Callable[[], None]
    accumulation: Callable[[], int]
    divided_by_hand: Callable[[], None]
    propagate: Callable[[], None]
    check_requires_grad: Callable[[], None]


class StepGroup(Queue):
    """Collector of micro-batches until the boundary, when it runs them.

    Attributes:
        buffers_before: the model's buffers that are saved, before the first forward pass, where those change them.
    """

    def __init__(self, parts: GroupParts, step: int) -> None:
        self._parts = parts
        self._runner = parts.runner
        self._contract, self._world = parts.runner.runtime.contract, parts.runner.runtime.world
        self._step = step
        self._queue: list[QueuedMicroBatch] = []
        self._checked: object = None  # modes in which only what is trained requires a gradient
        self._called_back = False
        self.buffers_before: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(self._queue)

    # ---- handing over

    def add(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take one call of the engine; return pending outputs, or real ones where they are not known well enough."""
        ticket = self.queue(Arguments(args, kwargs, take_over=True))
        waits = not self._runner.at_their_calls
        left = self._contract.leaves_more
        uses_more = self._parts.trial.verdicts.get(left) if left else False
        ticket.on_trial = waits and uses_more is None
        outputs = self._parts.kinds.outputs(ticket.micro_batch, ticket, bool(uses_more)) if waits else None
        ticket.is_pending = outputs is not None and not ticket.on_trial
        return ticket.outputs() if outputs is None else outputs

    def queue(
        self,
        arguments: Arguments,
        loss_fn: LossFunction | None = None,
        call: Callable[..., Any] | None = None,
        aside: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> QueuedMicroBatch:
        """Queue one micro-batch; measure the model first if none as large has been seen.

        Args:
            call: what is called with `arguments` instead of the model; it calls the model itself.
            aside: makes the context that measuring runs in.
        """
        known = call is not None or not self._parts.replaced_forward.is_new
        call = call or self._parts.replaced_forward.call()
        micro_batch = self._micro_batch(len(self._queue), arguments, call)
        ticket = QueuedMicroBatch(self, micro_batch, arguments, loss_fn or loss_of, call, aside)
        known = known and self._parts.kinds.get(micro_batch) is not None
        known = known and self._runner.planner.covers(micro_batch.inputs, micro_batch.state.modes.flags)
        if self._world.any("call the model", not known):
            self._measure(ticket)
        if not self._queue and self._runner.changes_buffers:
            buffers = persistent_buffers(self._parts.module)
            self.buffers_before = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        self._queue.append(ticket)
        if self._runner.at_their_calls:
            self._forward(ticket)
        return ticket

    def _micro_batch(
        self, index: int, arguments: Arguments, call: Callable[..., Any], reduce: Callable[[Any], Any] | None = None
    ) -> MicroBatch:
        """Make a micro-batch; `reduce`: of one without gradients, what is kept of its outputs."""
        args, kwargs = inputs = arguments.tree
        home = self._runner.runtime.device.torch_device
        if not arguments.tensors:
            raise BatchError(
                f"micro-batch {index} holds no tensor (arguments: {[type(a).__name__ for a in args]}, "
                f"{sorted(kwargs)}): pass what the model's forward takes."
            )
        state = self._contract.take()
        if reduce is None and state.modes is not self._checked:
            self._parts.check_requires_grad()
            self._checked = state.modes
        return MicroBatch(
            index=index,
            # As if one process had taken the micro-batches of all in turn.
            seed=micro_batch_seed(self._parts.seed, self._step, index * self._world.size + self._world.rank),
            forward=lambda: self._parts.call(call, arguments),
            objective=lambda outputs: None,
            autocast=Autocast.current(home.type),
            state=state,
            home=home,
            device=self._runner.runtime.device,
            reduce=reduce,
            inputs=inputs,
        )

    def _measure(self, ticket: QueuedMicroBatch) -> None:
        with self._as_called(ticket):
            self._runner.measure(self._sample(ticket), [t.micro_batch for t in self._queue if t.micro_batch.forwarded])

    @contextmanager
    def _as_called(self, ticket: QueuedMicroBatch) -> Iterator[None]:
        """Run forward passes as `ticket` was called, not counted, while open."""
        with (
            self._parts.ledger.excluded(),
            ticket.aside(),
            Autocast.entered(ticket.micro_batch.autocast),
            self._contract.running(),
            self._contract.entered(ticket.micro_batch.state),
        ):
            yield

    def _sample(self, ticket: QueuedMicroBatch) -> Sample:
        # Made-up gradients must not reach what the caller propagates through.
        one = ticket.micro_batch
        own = map_tensors(_on_its_own, one.inputs)

        def call(inputs: Inputs) -> Any:
            outputs = self._parts.call(ticket.call, Arguments(*inputs))
            self._parts.kinds.learn(one, outputs, inputs)
            return outputs

        return Sample(
            own,
            call,
            ticket.surrogate_loss,
            one.seed,
            ticket.measured_modes,
            trains=one.reduce is None,
            inputs_beside=ticket.inputs_beside,
        )

    # ---- looking early

    def forward_now(self, ticket: QueuedMicroBatch) -> None:
        if ticket.is_pending:
            self._parts.looked()
        self._forward(ticket)
        self._parts.kinds.learn(ticket.micro_batch, ticket.micro_batch.outputs)

    def catch_up(self, until: QueuedMicroBatch | None = None) -> None:
        """Run forward passes that wait (of calls before `until`), in order, if they change buffers."""
        if not self._runner.changes_buffers or self._contract.is_running:
            return
        for ticket in takewhile(lambda one: one is not until, self._queue):
            if ticket.stage is Stage.QUEUED:
                self._run_forward(ticket)

    def _forward(self, ticket: QueuedMicroBatch) -> None:
        """Run its forward pass, whose errors its own caller gets, after those of earlier calls."""
        self.catch_up(ticket)
        try:
            self._run_forward(ticket)
        except BaseException:
            ticket.stage = Stage.FAILED
            raise

    @torch.inference_mode(False)
    @torch.enable_grad()  # the caller may have gradients off for code of its own
    def _run_forward(self, ticket: QueuedMicroBatch) -> None:
        why = "a micro-batch that is looked at before its step takes another way through the model than those before"
        run = partial(self._runner.forward_now, ticket.micro_batch)
        self._check_recomputation(len(self._queue))
        self._until_planned(run, [ticket], lambda _: self._world.refuse(why))
        ticket.forward_ran()

    # ---- propagating back

    def propagating_from_real(self) -> None:
        """Note that the program propagates back from a tensor that was computed, of whatever."""
        for ticket in self._queue:
            ticket.uses_more = True

    def _judge(self) -> None:
        """Note whether losses of micro-batches on trial are made of their outputs alone."""
        tried = [ticket for ticket in self._queue if ticket.on_trial and ticket.received]
        left = self._contract.leaves_more
        if not tried or not left:
            return
        uses_more = any(ticket.uses_more for ticket in tried)
        verdicts = self._parts.trial.verdicts
        hooks = {key for key in left if is_hook(key)}
        if hooks and not uses_more and False not in verdicts.values():
            _logger.warning(
                "micro-batches are grouped from now on, and the model has forward hooks (%s), that run when the step runs: "
                "a value that a hook keeps is of an earlier step when the program computes a loss. If the loss uses such "
                "values (without their graphs), let the model return them: docs/loops.md.",
                self._contract.name_all(hooks),
            )
        verdicts[left] = uses_more
        if uses_more:
            _logger.warning(
                "forward hooks or attributes keep tensors (%s), and the loss is made of more than the model's outputs: the "
                "forward pass of each micro-batch runs alone, and swaps the whole model in. To keep micro-batches grouped, "
                "let the model return what the loss is made of: docs/loops.md.",
                self._contract.name_all(left),
            )

    def divisor(self, divided_by: frozenset[float]) -> int:
        divisor = self._parts.accumulation()
        if divisor > 1 and divisor in divided_by:
            self._parts.divided_by_hand()
        return divisor

    def check_divided(self, steps: frozenset[int]) -> None:
        own = self._parts.accumulation()
        others = sorted(steps - {own})
        if others:
            raise UnsupportedError(
                f"loss.backward() goes through two engines, whose gradient_accumulation_steps are {others[0]} and {own}: "
                "which of them the first engine's gradients are to be divided by is not defined. Call "
                "engine.backward(loss) of the engine whose accumulation steps it is to be, or let both have the same."
            )

    def propagating(self, ticket: QueuedMicroBatch, later: bool = False) -> None:
        self._parts.propagating()
        self._runner.executor.accumulate_unlayered()  # what a backward pass before this one has left
        if ticket.leads_outside and not later:
            self._parts.propagate()
        elif ticket.leads_outside and not self._called_back:
            self._called_back = True
            torch.autograd.Variable._execution_engine.queue_callback(self._called)

    def _called(self) -> None:
        self._called_back = False
        self._parts.propagate()

    @property
    def propagated(self) -> bool:
        """Whether forward and backward of some are done, and the updates are not."""
        return self._runner.has_gathered

    @property
    def wanted(self) -> bool:
        """Whether the program propagates back from a micro-batch whose backward pass is still to run."""
        return any(ticket.wanted for ticket in self._queue)

    @property
    def propagated_from(self) -> int:
        """How many micro-batches the program has propagated back from."""
        return sum(ticket.wanted or ticket.stage is Stage.PROPAGATED for ticket in self._queue)

    @property
    def is_open(self) -> bool:
        """Whether a micro-batch is queued whose backward pass has not run."""
        return any(ticket.stage is not Stage.PROPAGATED for ticket in self._queue)

    @property
    def waits(self) -> bool:
        """Whether a micro-batch is queued that the program has not propagated back from (yet)."""
        return any(not t.wanted and t.stage is not Stage.PROPAGATED for t in self._queue)

    # ---- running

    def run(self, hyper: Hyper, clipping: Clipping | None) -> bool:
        """Run forward, backward and updates. False if no micro-batch wants a gradient, so that nothing ran."""
        runner = self._runner
        self._judge()
        try:
            if not self.propagated and not runner.steps_whole:
                return self._run(lambda part: runner.step(part, hyper, clipping), hyper, last=True)
            clipping = clipping or Clipping()
            if gathered := self.propagate(hyper, clipping, last=True):
                runner.end(hyper, clipping)
            return gathered
        finally:
            self.abandon()

    def propagate(self, hyper: Hyper, clipping: Clipping, last: bool = False) -> bool:
        """Run forward and backward of what is propagated from so far; `run` does the rest, with its `last` part.

        Returns:
            Whether there are gradients.
        """
        self._run(lambda part: self._runner.part(part, hyper, clipping), hyper, last)
        return self.propagated

    def _run(self, run: Callable[[Sequence[MicroBatch]], None], hyper: Hyper, last: bool = False) -> bool:
        """Run what is wanted; `last`: and forget the others, whose activations would take room in the plan."""
        # Forward passes that are not propagated back from change buffers, too; those after the last that is may wait.
        wanted = [place for place, ticket in enumerate(self._queue) if ticket.wanted]
        end = len(self._queue) if last or not wanted else wanted[-1] + 1
        if any(ticket.stage is Stage.QUEUED and not ticket.wanted for ticket in self._queue[:end]):
            self.catch_up(next(iter(self._queue[end:]), None))
        for ticket in self._queue if last else ():
            if ticket.stage is Stage.QUEUED and not ticket.wanted and ticket.is_held:
                self._forward(ticket)  # before weights change
        for ticket in [t for t in self._queue if last and not t.wanted]:
            for _, call in ticket.micro_batch.calls:
                self._runner.runtime.layer_calls.discard(call)
            ticket.close()
        tickets = [ticket for ticket in self._queue if ticket.wanted]
        check_same_step(self._world, len(tickets), hyper)
        if not tickets:
            return False
        while self._world.any("measure a loss", (fresh := self._of_unmeasured_loss(tickets)) is not None):
            self._measure(fresh or tickets[0])
        losses = list(dict.fromkeys(ticket.loss for ticket in tickets))
        for loss in losses:
            members = tuple(ticket.micro_batch for ticket in loss.tickets)
            for micro_batch in members:
                micro_batch.sharing = members if len(members) > 1 else ()
        if not self._runner.proven and len(tickets) > 1:
            first = losses[:1] if len(losses[0].tickets) > 1 else losses[:2]
            self._runner.proven = prove(self._runner, first, self._as_called, self._sample)
        self._check_recomputation(len(tickets))
        # After the first part of a step each loss runs by itself, so that it can run again without the others.
        for part in [loss.tickets for loss in losses] if self.propagated else [tickets]:
            steps = [ticket.divided_by for ticket in part if ticket.leads_outside]
            with divided(frozenset().union(*steps)):
                self._run_part(run, part)
        self._runner.recomputed |= len(tickets) > 1
        self._check_recomputation(0)
        for ticket in tickets:
            ticket.finish_propagation()
        return True

    def _check_recomputation(self, micro_batches: int) -> None:
        """Compare recomputed layers in the first step of several micro-batches; it waits for the device at each output.

        A micro-batch that is alone in its step is recomputed before another one's forward could have changed anything.
        """
        checks = micro_batches > 1 and not self._runner.recomputed
        self._runner.runtime.layer_calls.checks_recomputation = checks

    def _of_unmeasured_loss(self, tickets: Sequence[QueuedMicroBatch]) -> QueuedMicroBatch | None:
        """Return one whose loss the program makes of outputs, if the memory that this takes is not known."""
        covers = self._runner.planner.covers
        for one in tickets:
            makes_loss = one.stage is Stage.QUEUED and one is one.loss.tickets[-1]
            if makes_loss and not covers((one.micro_batch.inputs, one.inputs_beside), one.measured_modes):
                return one
        return None

    def _run_part(self, run: Callable[[Sequence[MicroBatch]], None], tickets: Sequence[QueuedMicroBatch]) -> None:
        follows_others = self.propagated
        once = self._world.any("begin a step", any(ticket.stage is Stage.FORWARDED for ticket in tickets))

        own = self._runner.runtime.user_gradients
        popped = own.popped

        def diverged(error: Exception) -> None:
            again = not once and (self.propagated or not follows_others)
            if isinstance(error, PeerDiverged | torch.OutOfMemoryError):
                gone = own.popped > popped  # and would be missing when the step runs again
                if not again or (gone and isinstance(error, torch.OutOfMemoryError)):
                    raise error
            elif again:
                self._world.tell_diverged()
            else:
                raise UnsupportedError(
                    "a micro-batch takes another way through the model than those that were measured (LayerDrop, or code "
                    "that depends on data), in a step of which losses or outputs were looked at: such a step is not run "
                    "again. Nothing has been updated. Look at losses after engine.step(), or at all of a step's before "
                    "its boundary."
                ) from None

        # The micro-batches draw the same random numbers again, and so take the same way through the model.
        self._until_planned(lambda: run([ticket.micro_batch for ticket in tickets]), tickets, diverged)

    def _until_planned(
        self, run: Callable[[], None], tickets: Sequence[QueuedMicroBatch], diverged: Callable[[Exception], None]
    ) -> None:
        """Call `run`, and again when it met what was not measured, or memory ran out; `tickets` are measured in between.

        Args:
            diverged: raises if the step must not run again.
        """
        with self._runner.less_memory() as shrink:
            for attempt in range(_ATTEMPTS):
                try:
                    return run()
                except (OffPlanError, UnseenError, PeerDiverged) as error:
                    diverged(error)
                except torch.OutOfMemoryError as error:
                    diverged(error)
                    if attempt + 1 == _ATTEMPTS:
                        raise
                    shrink(error)
                for ticket in tickets:
                    self._measure(ticket)
            raise ModelError(
                f"the model called layers that it was not measured with {_ATTEMPTS} times in a row, each time others, with "
                "the same inputs and random numbers of torch. Which layers a call runs must depend on those alone."
            )

    def evaluate(self, batches: Sequence[Arguments], loss_fn: LossFunction | None) -> list[Tensor]:
        """Return losses of micro-batches, without gradients."""
        self.catch_up()
        micro_batches: list[MicroBatch] = []
        tickets: list[QueuedMicroBatch] = []
        for index, arguments in enumerate(batches):
            micro_batch = self._micro_batch(index, arguments, self._parts.module, reduce=loss_fn or loss_of)
            ticket = QueuedMicroBatch(self, micro_batch, arguments, loss_fn or loss_of, self._parts.module)
            if self._world.any("evaluate", not self._runner.planner.covers(micro_batch.inputs)):
                self._measure(ticket)
            micro_batches.append(micro_batch)
            tickets.append(ticket)

        def diverged(error: Exception) -> None:
            if isinstance(error, torch.OutOfMemoryError):
                raise error
            if not isinstance(error, PeerDiverged):
                self._world.tell_diverged()

        with self._parts.ledger.excluded():
            self._until_planned(lambda: self._runner.evaluate(micro_batches), tickets, diverged)
        return [micro_batch.outputs.detach() for micro_batch in micro_batches]

    def abandon(self, destroyed: bool = False) -> None:
        """Forget everything queued; `destroyed`: with the engine."""
        for ticket in self._queue:
            ticket.close(destroyed)
        self._queue.clear()
        self.buffers_before = {}


def _on_its_own(tensor: Tensor) -> Tensor:
    """Return `tensor` apart from its graph; what was made by an operation may still be changed in place."""
    if not tensor.requires_grad:
        return tensor
    leaf = tensor.detach().requires_grad_()
    return leaf if tensor.is_leaf else leaf.clone()
