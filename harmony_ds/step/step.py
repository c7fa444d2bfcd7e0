"""One optimizer step: its micro-batches, from the first call to the norm of its gradients.

What can happen to a step is an event (`StepEvent`), and `handle` does what the table in `transitions.py` says about it. The
methods without an underscore that the table names stand here in the order of a step's life.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from harmony_ds.distributed import PeerDiverged
from harmony_ds.errors import (
    BatchError,
    DoesNotFitError,
    ModelError,
    PeerFailedError,
    UnsupportedError,
    UsageError,
)
from harmony_ds.model.buffers import persistent_buffers
from harmony_ds.model.contract import UnseenError, is_hook
from harmony_ds.model.engine_parameter import gate
from harmony_ds.model.intercept import Autocast
from harmony_ds.model.random_streams import micro_batch_seed
from harmony_ds.optim.host_optimizer import Hyper
from harmony_ds.optim.optimizer_chain import parts_of
from harmony_ds.optim.schedules import ScheduleStep, can_step_back, check_schedule
from harmony_ds.optim.updater import Clipping
from harmony_ds.runtime.micro_batch import MicroBatch, OffPlanError, loss_of
from harmony_ds.runtime.updates import Outcome
from harmony_ds.scheduler.plan import EMPTY_PLAN, Plan, TaskKind
from harmony_ds.step.context import StepContext
from harmony_ds.step.division import divided
from harmony_ds.step.health import DESTROYED
from harmony_ds.step.inputs import CallInputs
from harmony_ds.step.one_time_warnings import DIVIDED_TWICE, DROPPED, EARLY_READ, NOT_FINITE, SKIPPED
from harmony_ds.step.pending_micro_batch import PROPAGATED_ALREADY, LossFunction, Passes, PendingMicroBatch
from harmony_ds.step.planner import others_bytes
from harmony_ds.step.retry_budget import RetryBudget
from harmony_ds.step.samples import called_as, sample_of
from harmony_ds.step.shared_loss import SharedLoss
from harmony_ds.step.step_checks import check_grouping, check_same_step
from harmony_ds.step.transitions import TRANSITIONS, Impossible, StepEvent, StepState, Transition
from harmony_ds.step.used_gradients import check_dropped

_logger = logging.getLogger("harmony_ds")
_ATTEMPTS = 8
"""How often the same micro-batches run, if each time the model calls layers that were not measured."""
_OPEN = (StepState.QUEUED, StepState.FORWARDED, StepState.GATHERED)


class RunKind(enum.Enum):
    """What of a step runs at once."""

    FORWARD = "the forward pass of one micro-batch"
    PART = "forward and backward; the gradients wait"
    WHOLE = "forward, backward and updates"
    UPDATE = "the norm and the updates, from gradients that wait"
    UPDATE_BY_HAND = "the updates, from gradients that the program has put on parameters"
    EVALUATION = "forward passes without gradients"


@dataclass(slots=True)
class Run:
    """One run of the executor for a step, which may have to be repeated.

    Attributes:
        pending: the micro-batches that run.
        hyper: hyper-parameters for the updates.
        clipping: how updates depend on the norm of all gradients; None: they do not wait for it.
        follows_gathered: whether gradients of the step had gathered before.
        cannot_repeat: whether in any process a forward pass had run alone, whose outputs the program has.
        taken_gradients: how many gradients had been taken from the program's parameters before.
        attempt: counts from 0.
    """

    kind: RunKind
    pending: Sequence[PendingMicroBatch]
    hyper: Hyper = ()
    clipping: Clipping | None = None
    follows_gathered: bool = False
    cannot_repeat: bool = False
    taken_gradients: int = 0
    attempt: int = 0


@dataclass(slots=True)
class PlannedRun:
    """A run with its plan.

    Attributes:
        micro_batches: those whose layer calls are joined count as one.
        rest: after a PART: the tasks that remain (norm and updates), which run at the boundary.
        records: whether the timeline records it as a step.
        watches_peak: whether its peak of device memory is to be that of the plan.
        others_bytes: device memory that was in use before.
    """

    plan: Plan
    micro_batches: Sequence[MicroBatch]
    rest: Plan | None = None
    records: bool = False
    watches_peak: bool = False
    others_bytes: int = 0


class Step:
    """One optimizer step, from its first micro-batch to the norm of its gradients.

    Attributes:
        state: how far it has come.
        micro_batches: those that are queued, in the order of their calls.
        buffers_before: the model's buffers that are saved, before the first forward pass, where those change them.
        outcome: the norm, and what was updated.
    """

    def __init__(self, context: StepContext, before: Step | None = None) -> None:
        """Begin a step after `before`, whose norm may not be known yet."""
        self.state = StepState.QUEUED
        self.micro_batches: list[PendingMicroBatch] = []
        self.buffers_before: dict[str, Tensor] = {}
        self.outcome = Outcome()
        self.before = before
        self._context: StepContext | None = context  # None after its end: losses that the program keeps hold the step
        self._number = context.counters.step_number
        self._update_plan: Plan | None = None  # from gathered gradients on
        self._checked_modes: object = None  # modes in which only what is trained requires a gradient
        self._run: Run | None = None  # that is under way
        self._is_busy = False  # running at the boundary, or for gradients
        self._gathers_after_autograd = False

    @property
    def context(self) -> StepContext:
        """The objects that every step of the engine works with."""
        assert self._context is not None, "the step is over"
        return self._context

    # ---- events

    def handle(self, event: StepEvent, *arguments: Any) -> Any:
        """Do what the transition table says about `event` in this state; return what its action returns."""
        transition = self._transition(event)
        if transition.to is StepState.FAILED:
            self.state = StepState.FAILED
        result = getattr(self, transition.action)(*arguments)
        if transition.to is not None:
            self.state = transition.to
        return result

    def _transition(self, event: StepEvent) -> Transition:
        cell = TRANSITIONS[self.state, event]
        assert not isinstance(cell, Impossible), f"{event} in {self.state}: {cell}"
        return next(one for one in cell if one.when is None or getattr(self, one.when))

    def _event_of(self, error: BaseException) -> StepEvent:
        """Return the event that `error`, raised in a run or around it, is to the step."""
        context = self.context
        outcome = self.outcome if self._run is None else context.executor.updates.outcome
        if context.health.failed is not None or outcome.updates_issued or outcome.others_update:
            return StepEvent.UPDATE_FAILED
        if isinstance(error, OffPlanError | UnseenError) and self._run is not None:
            return StepEvent.OFF_PLAN
        if isinstance(error, PeerDiverged):
            return StepEvent.PEER_DIVERGED
        if isinstance(error, torch.OutOfMemoryError) and not isinstance(error, DoesNotFitError):
            return StepEvent.OUT_OF_MEMORY
        if isinstance(error, PeerFailedError):
            return StepEvent.PEER_FAILED
        return StepEvent.USER_ERROR

    # ---- what the table asks

    @property
    def is_over(self) -> bool:
        """Whether the step takes no more micro-batches."""
        return self.state not in _OPEN

    @property
    def runs_alone(self) -> bool:
        """Whether forward passes run without backward, so that the rest of the step goes on without them."""
        return self._run is not None and self._run.kind in (RunKind.FORWARD, RunKind.EVALUATION)

    @property
    def can_run_again(self) -> bool:
        """Whether what runs now can be measured, planned and run again, with the same results."""
        run = self._run
        if run is None or run.kind in (RunKind.UPDATE, RunKind.UPDATE_BY_HAND):
            return False
        if run.kind is RunKind.FORWARD:
            return self.context.world.size == 1
        if run.kind is RunKind.EVALUATION:
            return True
        keeps_gathered = not run.follows_gathered or not self.context.executor.backward_begun
        return keeps_gathered and not run.cannot_repeat

    @property
    def can_plan_for_less(self) -> bool:
        """Whether what runs now can be planned with a lower budget and run again."""
        run = self._run
        if run is None or run.kind is RunKind.EVALUATION or not self.can_run_again or run.attempt + 1 == _ATTEMPTS:
            return False
        runtime = self.context.runtime
        if run.kind is not RunKind.FORWARD and runtime.user_gradients.popped > run.taken_gradients:
            return False  # those gradients are gone, and would be missing when the step runs again
        return runtime.world.size == 1 and runtime.device.budget_bytes is not None

    @property
    def waits_for_backward(self) -> bool:
        """Whether the program propagates back from a micro-batch whose backward pass is still to run."""
        return not self._is_busy and any(pending.needs_backward for pending in self.micro_batches)

    @property
    def trains_nothing(self) -> bool:
        """Whether the program propagates back through a frozen model, from all micro-batches."""
        return self.context.state.host_optimizer is None and self.waits_for_backward and not self.waits_for_loss

    # ---- what others ask

    @property
    def has_gathered(self) -> bool:
        """Whether gradients of some micro-batches wait for their updates."""
        return self._update_plan is not None

    @property
    def is_open(self) -> bool:
        """Whether a micro-batch is queued whose backward pass has not run."""
        return any(pending.passes is not Passes.BOTH for pending in self.micro_batches)

    @property
    def waits_for_loss(self) -> bool:
        """Whether a micro-batch is queued that the program has not propagated back from (yet)."""
        return any(not one.needs_backward and one.passes is not Passes.BOTH for one in self.micro_batches)

    # ---- a micro-batch is called

    def queue(
        self,
        arguments: CallInputs,
        loss_fn: LossFunction | None = None,
        call: Callable[..., Any] | None = None,
        profiling_context: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> PendingMicroBatch:
        """Queue one micro-batch; measure the model first if none as large has been seen.

        Args:
            call: what is called with `arguments` instead of the model; it calls the model itself.
            profiling_context: makes the context that measuring runs in.
        """
        context = self.context
        is_known = call is not None or not context.replaced_forward.is_new
        call = call or context.replaced_forward.call()
        micro_batch = self._micro_batch(len(self.micro_batches), arguments, call)
        pending = PendingMicroBatch(self, micro_batch, arguments, loss_fn or loss_of, call, profiling_context)
        is_known = is_known and context.output_kinds.get(micro_batch) is not None
        is_known = is_known and context.planner.has_profiled(micro_batch.inputs, micro_batch.state.modes.flags)
        if context.world.any("call the model", not is_known):
            self._measure(pending)
        if not self.micro_batches and context.forward_changes_buffers:
            buffers = persistent_buffers(context.model)
            self.buffers_before = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        self.micro_batches.append(pending)
        if context.forward_runs_at_calls:
            self._forward_of_call(pending)
        return pending

    def outputs_of(self, pending: PendingMicroBatch) -> Any:
        """Return what the caller of `pending` gets: stand-ins, or real outputs where they are not known well enough."""
        context = self.context
        if context.forward_runs_at_calls:
            return pending.outputs()
        left = context.runtime.contract.leaves_more
        uses_more = context.first_steps.loss_uses_more.get(left) if left else False
        pending.runs_at_call = uses_more is None
        outputs = context.output_kinds.outputs(pending.micro_batch, pending, bool(uses_more))
        pending.is_pending = outputs is not None and not pending.runs_at_call
        return pending.outputs() if outputs is None else outputs

    def _micro_batch(
        self,
        index: int,
        arguments: CallInputs,
        call: Callable[..., Any],
        reduce: Callable[[Any], Any] | None = None,
    ) -> MicroBatch:
        """Make a micro-batch; `reduce`: of one without gradients, what is kept of its outputs."""
        context = self.context
        args, kwargs = inputs = arguments.tree
        device = context.runtime.device
        if not arguments.tensors:
            raise BatchError(
                f"micro-batch {index} holds no tensor (arguments: {[type(a).__name__ for a in args]}, "
                f"{sorted(kwargs)}): pass what the model's forward takes."
            )
        state = context.runtime.contract.read_state()
        if reduce is None and state.modes is not self._checked_modes:
            context.links.check_requires_grad()
            self._checked_modes = state.modes
        # As if one process had taken the micro-batches of all in turn.
        position = index * context.world.size + context.world.rank
        return MicroBatch(
            index=index,
            seed=micro_batch_seed(context.seed, self._number, position),
            forward=lambda: context.model_calls.run(call, arguments),
            objective=lambda outputs: None,
            autocast=Autocast.current(device.torch_device.type),
            state=state,
            home=device.torch_device,
            device=device,
            reduce=reduce,
            inputs=inputs,
        )

    def _measure(self, pending: PendingMicroBatch) -> None:
        """Measure the model with one micro-batch and plan anew; forward passes that ran already follow the new plan.

        Raises:
            DoesNotFitError: no plan fits, or not even one layer at a time.
        """
        context = self.context
        with called_as(pending, context):
            context.health.check_usable()
            context.state.free_device()
            moved = context.planner.measure(sample_of(pending, context))
            context.runtime.device.reset_peak()  # steps are not what was measured
            for one in self.micro_batches:
                if one.micro_batch.forwarded:
                    one.micro_batch.move(moved)

    # ---- a forward pass runs by itself

    def read_output(self, pending: PendingMicroBatch) -> None:
        """Run the forward pass of a micro-batch whose loss or outputs the program reads."""
        context = self.context
        context.health.check_alive()
        if pending.is_pending:
            context.warnings.warn(EARLY_READ)
        self._forward_of_call(pending)
        context.output_kinds.learn(pending.micro_batch, pending.micro_batch.outputs)

    def _forward_of_call(self, pending: PendingMicroBatch) -> None:
        """Run a forward pass, whose errors its own caller gets, after those of earlier calls that change buffers."""
        self.run_due_forwards(until=pending)
        try:
            self.handle(StepEvent.FORWARD_DUE, pending)
        except BaseException:
            pending.passes = Passes.FAILED
            raise

    def run_due_forwards(self, until: PendingMicroBatch | None = None) -> None:
        """Run forward passes that wait (of calls before `until`), in order, if they change buffers."""
        context = self.context
        if not context.forward_changes_buffers or context.runtime.contract.is_running:
            return
        for pending in self.micro_batches:
            if pending is until:
                return
            if pending.passes is Passes.NONE:
                self.handle(StepEvent.FORWARD_DUE, pending)

    @torch.inference_mode(False)
    @torch.enable_grad()  # the caller may have gradients off for code of its own
    def forward_alone(self, pending: PendingMicroBatch) -> None:
        """Run one forward pass, whose loss or outputs are there from then on."""
        self._check_recomputation(len(self.micro_batches))
        self._execute(Run(RunKind.FORWARD, [pending]))
        pending.forward_ran()

    def refuse_read(self, pending: PendingMicroBatch) -> NoReturn:
        """Refuse to compute outputs of a step that is over."""
        if self.state is StepState.DESTROYED:
            raise UsageError(DESTROYED)
        pending.refuse_read()

    # ---- the program propagates back

    def note_backward(self, pending: PendingMicroBatch, in_autograd: bool = False) -> None:
        """Note that the program propagates back from a micro-batch; `in_autograd`: from real outputs, at this moment."""
        context = self.context
        if context.state.host_optimizer is None:
            context.check_can_propagate()
        else:
            context.scaler.check_scaled()
        context.executor.accumulate_unlayered()  # what a backward pass before this one has left
        if not pending.inputs_require_grad:
            return
        if not in_autograd:
            self.handle(StepEvent.READ_GRADIENT)
        elif not self._gathers_after_autograd:
            self._gathers_after_autograd = True
            torch.autograd.Variable._execution_engine.queue_callback(self._gather_after_autograd)

    def _gather_after_autograd(self) -> None:
        self._gathers_after_autograd = False
        if not self.is_over:
            self.handle(StepEvent.READ_GRADIENT)

    def note_backward_from_real(self) -> None:
        """Note that the program propagates back from a tensor that was computed, of whatever."""
        for pending in self.micro_batches:
            pending.uses_more = True

    def gradient_divisor(self, loss_divisors: frozenset[float]) -> int:
        """Return the accumulation steps; warn if the program has divided its loss by them, too.

        Args:
            loss_divisors: what the program has divided its loss by.
        """
        steps = self.context.settings.gradient_accumulation_steps()
        if steps > 1 and steps in loss_divisors:
            self.context.warnings.warn(DIVIDED_TWICE)
        return steps

    def check_divided_alike(self, steps: frozenset[int]) -> None:
        """Raise UnsupportedError if gradients that other engines have divided by `steps` are of no use here."""
        own = self.context.settings.gradient_accumulation_steps()
        others = sorted(steps - {own})
        if others:
            raise UnsupportedError(
                f"loss.backward() goes through two engines, whose gradient_accumulation_steps are {others[0]} and {own}: "
                "which of them the first engine's gradients are to be divided by is not defined. Call "
                "engine.backward(loss) of the engine whose accumulation steps it is to be, or let both have the same."
            )

    def refuse_backward(self, pending: PendingMicroBatch, _: bool = False) -> NoReturn:
        """Refuse to propagate back from a micro-batch whose step is over."""
        if self.state is StepState.DESTROYED:
            raise UsageError(DESTROYED)
        if pending.passes is Passes.BOTH:
            raise UsageError(PROPAGATED_ALREADY)
        raise UsageError(
            "this micro-batch cannot be propagated back from any more: its step is over (engine.step() or "
            "optimizer.step() was called, or failed). Call engine.backward(loss) before the step that it belongs to."
        )

    # ---- gradients are wanted before the boundary

    def gather(self) -> bool:
        """Run forward and backward of what was propagated back from, so that its gradients are there.

        They are a part of the step: later micro-batches add to them, and the boundary uses them.
        """
        context = self.context
        context.world.refuse(
            "gradients before the step that they are for (looked at, dropped, or of inputs that require them)"
        )
        optimizer = context.state.host_optimizer
        hyper = () if optimizer is None else optimizer.hyper()
        clipping = context.clipping() or Clipping()
        try:
            with self._running_for_gradients():
                wanted = self._prepare(hyper, is_boundary=False)
                for run in self._runs(RunKind.PART, wanted, hyper, clipping):
                    with self._divided(run):
                        self._execute(run)
                self._note_propagated(wanted)
        except BaseException as error:
            self._note_failure(error)
            raise
        return self.has_gathered

    def nothing_to_gather(self) -> bool:
        """Return whether gradients have gathered, and may be read now."""
        return self.has_gathered and not self._is_busy

    def pass_gradients_on(self) -> bool:
        """Run forward and backward of a frozen model, so that gradients reach what its inputs are made of."""
        self.gather()
        self.context.counters.frozen_passes += 1
        self._end()
        return False

    def gather_before_write(self, name: str) -> None:
        """Run what was called with the values of the parameter `name`, which are about to be changed.

        Raises:
            UnsupportedError: several processes share the parameter.
            UsageError: a micro-batch is queued that has not been propagated back from.
        """
        self.context.world.refuse(f"changing {name} by hand, which every process would do again")
        if self._is_busy or not self.micro_batches:
            return
        self.handle(StepEvent.READ_GRADIENT)
        if not self.is_over and self.waits_for_loss:
            raise UsageError(
                f"{name} is about to be changed, while a micro-batch that was handed over with the values before is still "
                "to be propagated back from: call engine.backward(loss) first, or change parameters after engine.step()."
            )

    def drop_gradients(self) -> None:
        """Drop the gradients that have gathered since the last step."""
        context = self.context
        if context.state.host_optimizer is None:
            return
        context.gradients.used.clear()
        has_gathered = self.handle(StepEvent.READ_GRADIENT)
        if has_gathered:
            context.warnings.warn(DROPPED)
        context.gradients.drop(has_gathered)

    # ---- the boundary

    def take(self, schedule: dict[str, Any] | None, clips: bool = True) -> None:
        """Run what is queued, and issue the updates.

        Args:
            schedule: arguments of the scheduler's step; None: the caller steps it, and has called this step by hand.
            clips: whether gradients are clipped as the ds_config says; False: the program has clipped them.
        """
        context = self.context
        if self.before is not None:
            self.before.settle_if_skippable(context)  # which may set learning rates back
        check_schedule(context.lr_scheduler, schedule)
        count = len(self.micro_batches)
        is_full = count == context.settings.gradient_accumulation_steps() and not self.has_gathered
        try:
            with context.record.step(count, is_full):
                hyper, clipping = self._check_before_update(clips)
                with self._running_for_gradients():
                    # Choose what runs, measure what is new, check it, and run it as planned.
                    self._note_what_losses_use()
                    kind = RunKind.WHOLE
                    if self.has_gathered or context.steps_whole:
                        kind, clipping = RunKind.PART, clipping or Clipping()
                    wanted = self._prepare(hyper, is_boundary=True)
                    for run in self._runs(kind, wanted, hyper, clipping):
                        with self._divided(run):
                            self._execute(run)
                    self._note_propagated(wanted)
                    ran = bool(wanted)
                    if self.has_gathered:
                        ran = True
                        self._execute(Run(RunKind.UPDATE, (), hyper, clipping))
                        context.executor.gathered.finish_step()
                    elif not wanted and self._has_gradients_by_hand():
                        ran = True
                        self._execute(Run(RunKind.UPDATE_BY_HAND, (), hyper, clipping))
                    if ran:
                        self.outcome = context.executor.updates.outcome
                context.links.refresh_aliases()
        except BaseException as error:
            self._note_failure(error)
            raise
        self._end()

    def _check_before_update(self, clips: bool) -> tuple[Hyper, Clipping | None]:
        """Return what updates depend on; take over the user's edits, and refuse what cannot be updated from."""
        context = self.context
        optimizer = context.state.host_optimizer
        assert optimizer is not None and context.override is not None
        context.override.check()
        hyper, clipping = optimizer.hyper(), context.clipping()
        if clipping is not None and not clips:
            clipping = replace(clipping, max_norm=0.0)
        context.apply_user_edits(self.is_open)
        is_scaled = context.scaler.scale != 1.0
        if (context.world.size > 1 or is_scaled) and context.runtime.user_gradients.exist():
            context.world.refuse(
                "gradients that are put on parameters by hand, or by a backward pass of the program's own"
            )
            raise UnsupportedError(
                "gradients were put on parameters by hand, or by a backward pass of the program's own, while losses are "
                "scaled (fp16): they cannot be told from scaled ones. Add what they are of to the loss, or train in bf16."
            )
        return hyper, clipping

    def _has_gradients_by_hand(self) -> bool:
        """Return whether the program's own backward passes have left gradients on parameters of the optimizer."""
        context = self.context
        context.health.check_usable()
        optimizer = context.state.host_optimizer
        return optimizer is not None and context.runtime.user_gradients.exist(optimizer.trained)

    @contextmanager
    def _running_for_gradients(self) -> Iterator[None]:
        """Run the step, or a part of it, with gradients on: the caller may read them under `torch.no_grad()`."""
        context = self.context
        check_dropped(context.gradients.used)
        self._is_busy = True
        try:
            with torch.inference_mode(False), torch.enable_grad(), gate(passed=False):  # forward may use others
                context.gradients.hide()
                yield
        finally:
            self._is_busy = False

    def _note_what_losses_use(self) -> None:
        """Note whether losses of micro-batches that ran at their calls are made of their outputs alone."""
        context = self.context
        tried = [pending for pending in self.micro_batches if pending.runs_at_call and pending.received]
        left = context.runtime.contract.leaves_more
        if not tried or not left:
            return
        uses_more = any(pending.uses_more for pending in tried)
        known = context.first_steps.loss_uses_more
        hooks = {key for key in left if is_hook(key)}
        if hooks and not uses_more and False not in known.values():
            _logger.warning(
                "micro-batches are grouped from now on, and the model has forward hooks (%s), that run when the step runs: "
                "a value that a hook keeps is of an earlier step when the program computes a loss. If the loss uses such "
                "values (without their graphs), let the model return them: docs/loops.md.",
                context.runtime.contract.name_all(hooks),
            )
        known[left] = uses_more
        if uses_more:
            _logger.warning(
                "forward hooks or attributes keep tensors (%s), and the loss is made of more than the model's outputs: the "
                "forward pass of each micro-batch runs alone, and swaps the whole model in. To keep micro-batches grouped, "
                "let the model return what the loss is made of: docs/loops.md.",
                context.runtime.contract.name_all(left),
            )

    # ---- what runs

    def _prepare(self, hyper: Hyper, is_boundary: bool) -> list[PendingMicroBatch]:
        """Return the micro-batches whose backward pass runs now, measured and checked; all processes do the same.

        At the boundary the others are forgotten, since their activations would take room in the plan.
        """
        context = self.context
        self._run_forwards_before(is_boundary)
        if is_boundary:
            self._close_unwanted()
        wanted = [pending for pending in self.micro_batches if pending.needs_backward]
        check_same_step(context.world, len(wanted), hyper)
        if not wanted:
            return wanted
        self._measure_losses(wanted)
        losses = _losses_of(wanted)
        for loss in losses:
            members = tuple(member.micro_batch for member in loss.members)
            for micro_batch in members:
                micro_batch.sharing = members if len(members) > 1 else ()
        if not context.first_steps.grouping_is_exact and len(wanted) > 1:
            # A loss of several forward passes tells by itself; of other losses it takes two.
            first = losses[:1] if len(losses[0].members) > 1 else losses[:2]
            context.first_steps.grouping_is_exact = check_grouping(context, first)
        self._check_recomputation(len(wanted))
        return wanted

    def _run_forwards_before(self, is_boundary: bool) -> None:
        """Run forward passes without a backward pass that are needed all the same.

        They are those that change buffers and, at the boundary, those whose outputs the program still has. Before the
        boundary, calls after the last one with a backward pass may wait.
        """
        wanted = [place for place, pending in enumerate(self.micro_batches) if pending.needs_backward]
        end = len(self.micro_batches)
        if wanted and not is_boundary:
            end = wanted[-1] + 1
        if any(one.passes is Passes.NONE and not one.needs_backward for one in self.micro_batches[:end]):
            self.run_due_forwards(until=self.micro_batches[end] if end < len(self.micro_batches) else None)
        if not is_boundary:
            return
        for pending in self.micro_batches:
            if pending.passes is Passes.NONE and not pending.needs_backward and pending.is_held:
                self._forward_of_call(pending)  # before weights change

    def _close_unwanted(self) -> None:
        """Forget micro-batches that the program does not propagate back from."""
        for pending in self.micro_batches:
            if not pending.needs_backward:
                for _, call in pending.micro_batch.calls:
                    self.context.runtime.layer_calls.discard(call)
                pending.close()

    def _measure_losses(self, wanted: Sequence[PendingMicroBatch]) -> None:
        """Measure the losses that the program makes of outputs, where the memory that this takes is not known."""
        while True:
            unmeasured = self._with_unmeasured_loss(wanted)
            if not self.context.world.any("measure a loss", unmeasured is not None):
                return
            self._measure(unmeasured or wanted[0])  # all processes measure

    def _with_unmeasured_loss(self, wanted: Sequence[PendingMicroBatch]) -> PendingMicroBatch | None:
        """Return the last micro-batch of a loss that is not measured yet; None: all are."""
        for pending in wanted:
            makes_loss = pending.passes is Passes.NONE and pending is pending.loss.members[-1]
            inputs = pending.micro_batch.inputs, pending.inputs_beside
            if makes_loss and not self.context.planner.has_profiled(inputs, pending.measured_modes):
                return pending
        return None

    def _check_recomputation(self, micro_batches: int) -> None:
        """Compare recomputed layers in the first step of several micro-batches; it waits for the device at each output.

        A micro-batch that is alone in its step is recomputed before another one's forward could have changed anything.
        """
        checks = micro_batches > 1 and not self.context.first_steps.recomputation_is_exact
        self.context.runtime.layer_calls.checks_recomputation = checks

    def _runs(
        self, kind: RunKind, wanted: list[PendingMicroBatch], hyper: Hyper, clipping: Clipping | None
    ) -> Iterator[Run]:
        """Yield the runs for the `wanted` micro-batches: one, unless gradients of the step have gathered before.

        After the first part of a step each loss runs by itself, so that it can run again without the others.
        """
        groups: list[Any] = [wanted] if wanted else []
        if self.has_gathered:
            groups = [loss.members for loss in _losses_of(wanted)]
        for group in groups:
            yield Run(
                kind,
                group,
                hyper,
                clipping,
                follows_gathered=self.has_gathered,
                cannot_repeat=self.context.world.any(
                    "begin a step", any(pending.passes is Passes.FORWARD for pending in group)
                ),
                taken_gradients=self.context.runtime.user_gradients.popped,
            )

    def _divided(self, run: Run) -> AbstractContextManager[None]:
        """Return a context for a run whose gradients were divided where the program propagated back."""
        steps = frozenset[int]()
        for pending in run.pending:
            if pending.inputs_require_grad:
                steps |= pending.divided_by
        return divided(steps)

    def _note_propagated(self, wanted: Sequence[PendingMicroBatch]) -> None:
        if not wanted:
            return
        self.context.first_steps.recomputation_is_exact |= len(wanted) > 1
        self._check_recomputation(0)
        for pending in wanted:
            pending.finish_propagation()

    # ---- running

    def _execute(self, run: Run) -> None:
        """Run micro-batches as planned; where the table says so after an error, measure them and run them again.

        The micro-batches draw the same random numbers again, and so take the same way through the model.
        """
        context, executor = self.context, self.context.executor
        outer, self._run = self._run, run
        budget = RetryBudget(context.runtime.device, context.planner)
        try:
            for attempt in range(_ATTEMPTS):
                run.attempt = attempt
                try:
                    executor.begin()
                    planned = self._plan(run)
                    with self._running(planned):
                        if run.kind is RunKind.UPDATE_BY_HAND:
                            executor.updates.update_from_user_gradients(run.hyper, run.clipping)
                        else:
                            executor.run(planned.plan, planned.micro_batches, run.hyper, run.clipping)
                            self._finish_run(run, planned)
                    return
                except BaseException as error:  # noqa: BLE001 - `handle` raises it, unless the run is repeated
                    self.handle(self._event_of(error), error, budget)
                for pending in run.pending:
                    self._measure(pending)
            raise ModelError(
                f"the model called layers that it was not measured with {_ATTEMPTS} times in a row, each time others, with "
                "the same inputs and random numbers of torch. Which layers a call runs must depend on those alone."
            )
        except BaseException as error:
            budget.restore(error)
            raise
        finally:
            self._run = outer

    def _plan(self, run: Run) -> PlannedRun:
        """Return the plan of a run; refuse what cannot run, before anything does."""
        context = self.context
        plans, begun = context.plans, context.executor.begun
        context.health.check_usable()
        micro_batches: Sequence[MicroBatch] = [pending.micro_batch for pending in run.pending]
        if run.kind is RunKind.UPDATE_BY_HAND:
            return PlannedRun(EMPTY_PLAN, ())
        if run.kind is RunKind.UPDATE:
            plan, self._update_plan = self._update_plan, None
            assert plan is not None
            if context.steps_whole:
                plan = plan.part(0, [task.kind for task in plan.tasks].index(TaskKind.NORM))
            return PlannedRun(plan, ())
        if run.kind is RunKind.EVALUATION:
            return PlannedRun(plans.evaluation(micro_batches, begun), micro_batches)
        context.runtime.contract.check([micro_batch.state for micro_batch in micro_batches])
        if run.kind is RunKind.FORWARD:
            return PlannedRun(plans.forward(micro_batches[0], begun), micro_batches)
        for micro_batch in micro_batches:
            context.runtime.layer_calls.check_replayed(call for _, call in micro_batch.calls)
            micro_batch.check_unwritten()
        if run.kind is RunKind.PART:
            plans.make_room(micro_batches)
            plan, rest = plans.part_of_step(micro_batches, begun, first=not self.has_gathered)
            return PlannedRun(plan, micro_batches, rest)
        micro_batches = plans.sets(micro_batches)
        plans.make_room(micro_batches)
        plan = plans.step(micro_batches, begun)
        # The plan's peak is that of passes whose losses and outputs are not read.
        is_as_planned = not any(pending.micro_batch.forwarded for pending in run.pending)
        planned = PlannedRun(plan, micro_batches, records=True, watches_peak=is_as_planned)
        planned.others_bytes = others_bytes(context.runtime)
        context.runtime.device.watch_peak()
        context.allocator_retries.begin_step()
        return planned

    @contextmanager
    def _running(self, planned: PlannedRun) -> Iterator[None]:
        """Run as the engine, which the user's code is called by; after an error, forget what micro-batches have done."""
        runtime = self.context.runtime
        with runtime.contract.running():
            try:
                with runtime.timeline.step(planned.plan) if planned.records else nullcontext():
                    yield
            except BaseException:
                for micro_batch in planned.micro_batches:
                    micro_batch.abandon()
                runtime.contract.settings.undo()
                raise

    def _finish_run(self, run: Run, planned: PlannedRun) -> None:
        """Do what comes after the plan's tasks."""
        context, device = self.context, self.context.runtime.device
        if run.kind is RunKind.PART:
            self._update_plan = planned.rest
        elif run.kind is RunKind.WHOLE:
            context.executor.updates.promise_norm()
            peak_bytes = 0
            if planned.watches_peak and device.peak_has_risen():
                # Workspaces are made when a thread first needs one, in some step.
                set_aside_bytes = device.reserve_bytes() + context.planner.exchange_bytes(planned.plan)
                peak_bytes = device.peak_bytes() - planned.others_bytes - set_aside_bytes
            context.planner.check_peak(peak_bytes)
            context.allocator_retries.finish_step()
        elif run.kind is RunKind.UPDATE and context.steps_whole:
            assert run.clipping is not None
            context.executor.updates.step_whole(run.clipping)

    # ---- after an error in a run

    def measure_again(self, error: BaseException, _: RetryBudget) -> None:
        """Undo the run; its micro-batches are measured, planned and run again."""
        self._undo_run()
        if not isinstance(error, PeerDiverged):
            self.context.world.tell_diverged()

    def plan_for_less(self, error: torch.OutOfMemoryError, budget: RetryBudget) -> None:
        """Undo the run; its micro-batches are planned for a lower budget, and run again."""
        self._undo_run()
        budget.lower(error)

    def undo_alone(self, error: BaseException, _: RetryBudget | None = None) -> NoReturn:
        """Undo forward passes that ran by themselves; the rest of the step goes on."""
        self._undo_run()
        raise error

    def refuse_another_forward(self, error: BaseException, _: RetryBudget | None = None) -> NoReturn:
        """Undo forward passes that ran by themselves, and that several processes cannot run again."""
        self._undo_run()
        if self._run is not None and self._run.kind is RunKind.FORWARD:
            self.context.world.refuse(
                "a micro-batch that is looked at before its step takes another way through the model than those before"
            )
        raise error

    def refuse_another_way(self, _: BaseException, __: RetryBudget | None = None) -> NoReturn:
        """Drop a step that was to run again, and cannot."""
        self._drop()
        raise UnsupportedError(
            "a micro-batch takes another way through the model than those that were measured (LayerDrop, or code "
            "that depends on data), in a step of which losses or outputs were looked at: such a step is not run "
            "again. Nothing has been updated. Look at losses after engine.step(), or at all of a step's before "
            "its boundary."
        ) from None

    def drop(self, error: BaseException, _: RetryBudget | None = None) -> NoReturn:
        """Drop the step, of which nothing has been updated."""
        self._drop()
        raise error

    def give_up(self, error: BaseException, _: RetryBudget | None = None) -> NoReturn:
        """Drop the step, of which something has been updated: the engine cannot go on."""
        context = self.context
        if context.health.failed is None:
            packs = context.executor.updates.outcome.updates_issued
            context.health.fail(f"a step failed after {packs} packs had been updated: {error!r}")
        self._drop()
        raise error

    def _note_failure(self, error: BaseException) -> None:
        """Handle `error`, which has ended the step, as an event, unless a run has done so already."""
        if self.state is not StepState.FAILED:
            self.handle(self._event_of(error), error)

    def _undo_run(self) -> None:
        """Free what the run has brought to the device.

        Once its backward pass has begun, its gradients lie among those of earlier runs of the step: then all are dropped.
        """
        run, executor = self._run, self.context.executor
        assert run is not None
        may_keep = run.kind in (RunKind.FORWARD, RunKind.PART, RunKind.EVALUATION)
        if may_keep and not executor.backward_begun:
            executor.abandon_run()
        else:
            self._drop_gradients_and_copies()

    def _drop_gradients_and_copies(self) -> None:
        context = self.context
        context.executor.abandon()
        self._update_plan = None
        if context.health.failed is None:
            context.runtime.updater.discard()

    def _drop(self) -> None:
        """Drop the step: free its memory, and let the program hand its micro-batches over again."""
        if self._run is not None:
            self._undo_run()
        counters = self.context.counters
        self._end()
        counters.rewind()

    def _drop_what_ran(self) -> None:
        """Drop what is left of parts of the step that ran and were not used."""
        context = self.context
        if (self.has_gathered or context.executor.begun) and not context.health.is_destroyed:
            self._drop_gradients_and_copies()

    def _end(self) -> None:
        """Forget all micro-batches, and what of the step is on the device."""
        self._drop_what_ran()
        self._close(keeps_outputs=True)

    def _close(self, keeps_outputs: bool) -> None:
        """Forget all micro-batches and the engine's objects, since losses that the program keeps hold the step."""
        for pending in self.micro_batches:
            pending.close(keeps_outputs)
        self.micro_batches.clear()
        self.buffers_before = {}
        self._context = None

    # ---- after the boundary: the norm

    def count(self, context: StepContext, schedule: dict[str, Any] | None) -> None:
        """Count the step, which has been taken, and step the scheduler (`schedule` None: the caller does) and loss scale.

        It counts as taken until it is known whether its gradients were finite: see `settle`. It counts, too, if the step
        before it turns out to have failed, or the scheduler raises an error: its updates are issued.
        """
        before, self.before = self.before, None
        try:
            if before is not None:
                before.settle_if_updating(context)  # its updates are done
        finally:
            self._count_taken(context)
        counters = context.counters
        if context.scaler.own.dynamic:  # the next losses have another scale after an overflow
            self.settle_if_skippable(context)
        try:
            if schedule is not None and context.lr_scheduler is not None:
                self._step_schedule(context, schedule)
        finally:
            context.scaler.update(counters.has_overflowed)

    def _count_taken(self, context: StepContext) -> None:
        counters, settings = context.counters, context.settings
        counters.global_steps += 1
        if settings.now.values["managed_gradient_accumulation"]:
            counters.global_samples += settings.train_batch_size()
        else:
            counters.global_samples += counters.backwards * settings.train_micro_batch_size_per_gpu()
        counters.norm = self.outcome.norm
        counters.was_applied, counters.has_overflowed = True, False
        assert context.state.optimizer is not None
        for optimizer in (context.optimizer, *parts_of(context.state.optimizer)):
            optimizer._opt_called = True  # torch's schedulers warn without it

    def _step_schedule(self, context: StepContext, schedule: dict[str, Any]) -> None:
        """Step the scheduler after a step that was not skipped; it is undone later if that turns out to have been."""
        counters, scheduler = context.counters, context.lr_scheduler
        if not can_step_back(scheduler):
            self.settle_if_skippable(context)
        if counters.has_overflowed:
            return
        if self.state is StepState.UPDATING and self.outcome.may_skip:
            counters.undoable_schedule_step = ScheduleStep(scheduler, context.optimizer.param_groups, schedule)
        else:
            scheduler.step(**schedule)

    def settle_if_skippable(self, context: StepContext) -> None:
        """Settle the step if it may have been skipped."""
        if self.state is StepState.UPDATING and self.outcome.may_skip:
            self.handle(StepEvent.NORM_KNOWN, context)

    def settle_if_updating(self, context: StepContext) -> None:
        """Settle the step if its updates are issued, and it has not been settled."""
        if self.state is StepState.UPDATING:
            self.handle(StepEvent.NORM_KNOWN, context)

    def settle(self, context: StepContext) -> None:
        """Wait for the norm: count the step as skipped, or warn, if its gradients were not finite.

        Raises:
            PeerFailedError: another process has not said its part of the norm.
            Exception: what has ended this process's update thread before the norm was known.
        """
        outcome, counters = self.outcome, context.counters
        try:
            norm = None if outcome.norm is None else outcome.norm.result()
        except Exception as error:
            failed = StepEvent.PEER_FAILED if isinstance(error, PeerFailedError) else StepEvent.UPDATE_FAILED
            self.handle(failed, context, error)
            raise
        schedule_step, counters.undoable_schedule_step = counters.undoable_schedule_step, None
        if norm is None:
            return
        if outcome.overflow:
            counters.was_applied, counters.has_overflowed = False, True
            counters.skipped_steps += 1
            if schedule_step is not None:
                schedule_step.undo()
            context.warnings.log(SKIPPED, counters.global_steps)
        elif not math.isfinite(norm.total):
            context.warnings.log(NOT_FINITE, counters.global_steps, norm.total)

    def give_up_norm(self, context: StepContext, error: Exception) -> NoReturn:
        """Raise what has kept the norm from being known, once."""
        context.counters.undoable_schedule_step = None
        context.runtime.updater.raise_failure()  # which notes that the caller has got it
        raise error

    # ---- the engine ends, or a checkpoint is loaded, before the boundary

    def forget(self) -> None:
        """Drop the micro-batches: weights are loaded in the place of those that they were called with."""
        self._end()

    def discard(self) -> None:
        """Drop the micro-batches with their engine; warn if gradients are lost by that."""
        lost = sum(one.needs_backward or one.passes is Passes.BOTH for one in self.micro_batches)
        if lost:
            _logger.warning(
                "destroy() drops the gradients of micro-batches (%d) whose step was not taken: call engine.step() at the "
                "boundary of a group (or engine.set_gradient_accumulation_boundary(True) before it) to use them.",
                lost,
            )
        self._close(keeps_outputs=False)

    # ---- without gradients

    def evaluate(self, batches: Sequence[CallInputs], loss_fn: LossFunction | None) -> list[Tensor]:
        """Return losses of micro-batches without gradients, which are no part of the step."""
        context = self.context
        self.run_due_forwards()
        evaluated: list[PendingMicroBatch] = []
        for index, arguments in enumerate(batches):
            reduce = loss_fn or loss_of
            micro_batch = self._micro_batch(index, arguments, context.model, reduce=reduce)
            pending = PendingMicroBatch(self, micro_batch, arguments, reduce, context.model)
            if context.world.any("evaluate", not context.planner.has_profiled(micro_batch.inputs)):
                self._measure(pending)
            evaluated.append(pending)
        with context.state.ledger.excluded():
            self._execute(Run(RunKind.EVALUATION, evaluated))
        return [pending.micro_batch.outputs.detach() for pending in evaluated]


def _losses_of(pending: Iterable[PendingMicroBatch]) -> list[SharedLoss]:
    """Return the losses of micro-batches, each once, in their order."""
    return list(dict.fromkeys(one.loss for one in pending))
