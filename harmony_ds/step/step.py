"""One optimizer step: its micro-batches, from the first call to the norm of its gradients.

What can happen to a step is an event (`StepEvent`), and `handle` does what the table at the end, `TRANSITIONS`, says about
it. The methods that the table names stand here in the order of a step's life. What runs is in `run`, what is
done about an error in a run in `recovery`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from harmony_ds.errors import UnsupportedError, UsageError
from harmony_ds.model.buffers import persistent_buffers
from harmony_ds.model.engine_parameter import gate
from harmony_ds.optim.host_optimizer import Hyper
from harmony_ds.optim.optimizer_chain import parts_of
from harmony_ds.optim.schedules import ScheduleStep, can_step_back, check_schedule
from harmony_ds.optim.updater import NormOptions
from harmony_ds.runtime.failure import TaskFailure
from harmony_ds.runtime.micro_batch import MicroBatch, loss_of
from harmony_ds.runtime.outcome import Outcome
from harmony_ds.scheduler.plan import Plan
from harmony_ds.step.calling_line import calling_line
from harmony_ds.step.context import StepContext
from harmony_ds.step.division import divided
from harmony_ds.step.health import DESTROYED
from harmony_ds.step.inputs import CallInputs
from harmony_ds.step.one_time_warnings import (
    DIVIDED_TWICE,
    DROPPED,
    EARLY_READ,
    NOT_FINITE,
    NOTHING_PROPAGATED,
    PAST_THE_ENGINE,
    SKIPPED,
    SKIPPED_AT_SCALE,
)
from harmony_ds.step.pending import OutputsGiven
from harmony_ds.step.pending_micro_batch import PROPAGATED_ALREADY, RUN_ALONE, LossFunction, PendingMicroBatch, Stage
from harmony_ds.step.recovery import Recovery, Repetition, end_engine
from harmony_ds.step.run import Run, RunKind, finish_run, plan_run, running
from harmony_ds.step.samples import count_flops, measure, new_micro_batch
from harmony_ds.step.shared_loss import SharedLoss
from harmony_ds.step.step_checks import check_grouping, check_same_step
from harmony_ds.step.transitions import Impossible, StepEvent, StepState, Transition, Transitions
from harmony_ds.step.undo import comes_after_updates, free_unused, undo_step, undoing_passes
from harmony_ds.step.used_gradients import check_dropped

_logger = logging.getLogger("harmony_ds")


class Step:
    """One optimizer step, from its first micro-batch to the norm of its gradients.

    Attributes:
        state: how far it has come.
        micro_batches: those that are queued, in the order of their calls.
        buffers_before: the model's buffers that are saved, before the first forward pass, where those change them.
        outcome: the norm, and what was updated, by its last run: no run before the updates changes any weight.
        before: the step before, while it may not be known what became of it.
        number: the step's, from which its random numbers are drawn.
    """

    def __init__(self, context: StepContext, before: Step | None = None) -> None:
        """Begin a step after `before`, whose norm may not be known yet."""
        self.state = StepState.OPEN
        self.micro_batches: list[PendingMicroBatch] = []
        self.buffers_before: dict[str, Tensor] = {}
        self.outcome = Outcome()
        self.before = before
        self._context: StepContext | None = context  # None after its end: losses that the program keeps hold the step
        self.number = context.counters.step_number
        self._update_plan: Plan | None = None  # tasks that remain once some micro-batches have run, for the boundary
        self._called = 0  # micro-batches, without those that have failed since
        self._checked_modes: object = None  # modes in which only what is trained requires a gradient
        self._backward_pass: str | None = None  # the program's last
        self._took_computed_loss = False  # `engine.backward` got a loss of the model's own call
        # What the engine does now. Each may be true without the other: the model also runs for a loss that is read, and
        # at the boundary, losses of real outputs are propagated through between two runs.
        self._is_running = False  # the model's code, in a run or to measure it
        self._is_propagating = False  # at the boundary, or running a part of the step early

    @property
    def context(self) -> StepContext:
        """The objects that every step of the engine works with."""
        assert self._context is not None, "the step is over"
        return self._context

    # ---- events

    def handle(self, event: StepEvent, *arguments: Any) -> Any:
        """Do what the transition table says about `event` in this state; return what its action returns."""
        transition = self._transition(event)
        result = transition.action(self, *arguments)
        if transition.to is not None:
            self.state = transition.to
        return result

    def _transition(self, event: StepEvent) -> Transition:
        cell = TRANSITIONS[self.state, event]
        assert not isinstance(cell, Impossible), f"{event} in {self.state}: {cell}"
        return next(one for one in cell if one.when is None or one.when(self))

    # ---- what the table asks

    def waits_for_backward(self) -> bool:
        """Whether the program propagates back from a micro-batch whose backward pass is still to run."""
        return not self._is_propagating and any(pending.needs_backward for pending in self.micro_batches)

    def runs_the_model(self) -> bool:
        """Whether the engine runs the model's code now: micro-batches of the step, an evaluation, a measurement."""
        return self._is_running

    def waits_for_backward_within_run(self) -> bool:
        """Whether that is so while the engine runs the model's code: a forward pass alone, an evaluation, a measurement."""
        return self._is_running and self.waits_for_backward()

    def trains_nothing(self) -> bool:
        """Whether the program propagates back through a frozen model, from all micro-batches."""
        return self.context.state.host_optimizer is None and self.waits_for_backward() and not self.waits_for_loss

    # ---- what others ask

    @property
    def is_open(self) -> bool:
        """Whether the step takes micro-batches."""
        return self.state in (StepState.OPEN, StepState.ACCUMULATED)

    @property
    def has_accumulated(self) -> bool:
        """Whether gradients of some micro-batches wait for their updates, which the boundary issues."""
        return self._update_plan is not None

    @property
    def micro_batches_wait(self) -> bool:
        """Whether a micro-batch is queued whose backward pass has not run, and may still run."""
        return any(one.stage is not Stage.PROPAGATED and not one.has_failed for one in self.micro_batches)

    @property
    def waits_for_loss(self) -> bool:
        """Whether a micro-batch is queued that the program has not propagated back from (yet)."""
        return any(
            one.stage in (Stage.QUEUED, Stage.FORWARDED) and not one.needs_backward for one in self.micro_batches
        )

    @property
    def queued(self) -> int:
        """How many micro-batches are queued, but for those that have failed and those of an evaluation."""
        return sum(not (one.has_failed or one.is_of_evaluation) for one in self.micro_batches)

    @property
    def handed_over(self) -> int:
        """How many micro-batches the program would have to hand over again if the step was lost: none of an evaluation."""
        return sum(not one.is_of_evaluation for one in self.micro_batches)

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
        self._drop_failed()
        if context.state.host_optimizer is None:
            self._forget_passes_of_frozen_model()
        is_known = call is not None or not context.replaced_forward.is_new
        call = call or context.replaced_forward.call()
        micro_batch = new_micro_batch(context, self.number, self._called, arguments, call)
        if micro_batch.state.modes is not self._checked_modes:
            context.links.check_requires_grad()
            self._checked_modes = micro_batch.state.modes
        pending = PendingMicroBatch(self, micro_batch, arguments, loss_fn or loss_of, call, profiling_context)
        pending.called_at = calling_line()[:2]
        is_known = is_known and context.output_kinds.get(micro_batch) is not None
        modes = micro_batch.state.modes.flags
        is_known = is_known and context.planner.has_profiled(micro_batch.inputs, micro_batch.inputs_form, modes)
        if context.world.any("call the model", not is_known):
            self.measure(pending)
        if not self.micro_batches and context.forward_changes_buffers:
            buffers = persistent_buffers(context.model)
            self.buffers_before = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        if not self.micro_batches and context.is_profiled_step:
            context.flop_counts = count_flops(context, pending)
        self.micro_batches.append(pending)
        self._called += 1
        if context.forward_runs_at_calls:
            self._forward_of_call(pending)
        return pending

    def _drop_failed(self) -> None:
        """Drop micro-batches whose forward pass has failed: the program goes on, as if they had not been called."""
        for pending in [one for one in reversed(self.micro_batches) if one.has_failed]:
            self.micro_batches.remove(pending)
            pending.drop()
            if pending.micro_batch.index == self._called - 1:
                self._called -= 1

    def forget_out_of_reach(self) -> None:
        """Forget micro-batches whose forward pass has run alone, and of whose outputs the program has nothing any more.

        In plain PyTorch, their activations are gone by then: of an evaluation without `torch.no_grad()`, say.
        """
        for pending in [one for one in self.micro_batches if one.stage is Stage.FORWARDED and not one.is_in_reach()]:
            self._forget(pending)
        for pending in self.micro_batches:
            pending.free_unread_outputs()

    def _forget_passes_of_frozen_model(self) -> None:
        """Forget micro-batches that nothing can come of any more, since no step of a frozen model ends."""
        unread = [one for one in self.micro_batches if one.stage is Stage.QUEUED]
        if not all(one.is_in_reach() for one in unread):
            self.run_due_forwards()
        self.forget_out_of_reach()
        for pending in [one for one in self.micro_batches if one.stage is Stage.PROPAGATED]:
            self._forget(pending)
        for pending in [one for one in unread if one.stage is Stage.QUEUED and not one.is_in_reach()]:
            self._forget(pending)

    def _forget(self, pending: PendingMicroBatch) -> None:
        self.micro_batches.remove(pending)
        self._release(pending)

    def _release(self, pending: PendingMicroBatch) -> None:
        """Release what is kept of a micro-batch that is not propagated back from."""
        for _, call in pending.micro_batch.calls:
            self.context.runtime.layer_calls.discard(call)
        pending.close()

    def outputs_of(self, pending: PendingMicroBatch) -> Any:
        """Return what the caller of `pending` gets: stand-ins, or real outputs where they are not known well enough."""
        context = self.context
        pending.outputs_given = OutputsGiven.REAL
        if context.forward_runs_at_calls:
            return pending.outputs()
        left = context.runtime.contract.leaves_side_tensors
        uses_non_outputs = context.first_steps.loss_uses_non_outputs.get(left) if left else False
        if uses_non_outputs is None:
            pending.outputs_given = OutputsGiven.ON_TRIAL
        outputs = context.output_kinds.outputs(pending.micro_batch, pending, bool(uses_non_outputs))
        if outputs is None:
            return pending.outputs()
        if uses_non_outputs is not None:
            pending.outputs_given = OutputsGiven.STAND_INS
        return outputs

    def measure(self, pending: PendingMicroBatch) -> None:
        """Measure the model with one micro-batch and plan anew; forward passes that ran already follow the new plan.

        Raises:
            DoesNotFitError: no plan fits, or not even one layer at a time.
        """
        was_running, self._is_running = self._is_running, True
        try:
            with self.context.record.paused():
                measure(self.context, pending, self.micro_batches)
        except BaseException as error:
            pending.note_call(error, "while it was measured")
            raise
        finally:
            self._is_running = was_running

    # ---- a forward pass runs by itself

    def read_output(self, pending: PendingMicroBatch) -> None:
        """Run the forward pass of a micro-batch whose loss or outputs the program reads."""
        context = self.context
        context.health.check_alive()
        if pending.outputs_given is OutputsGiven.STAND_INS:
            context.warnings.warn(EARLY_READ)
        self._forward_of_call(pending)
        context.output_kinds.learn(pending.micro_batch, pending.micro_batch.outputs)

    def _forward_of_call(self, pending: PendingMicroBatch) -> None:
        """Run a forward pass, whose errors its own caller gets, after those of earlier calls that change buffers."""
        self.run_due_forwards(until=pending)
        try:
            self._run_forward(pending)
        except BaseException:
            pending.stage = Stage.FAILED
            raise

    def run_due_forwards(self, until: PendingMicroBatch | None = None) -> None:
        """Run forward passes that wait (of calls before `until`), in order, if they change buffers."""
        context = self.context
        if not context.forward_changes_buffers or context.runtime.contract.is_running:
            return
        for pending in list(self.micro_batches):
            if pending is until:
                return
            if pending.stage is Stage.QUEUED:
                self._run_forward(pending)

    def run_forwards_before_evaluation(self) -> None:
        """Prepare the step for a pass without gradients: run the forward passes that wait, if forward changes buffers.

        A module that has been put in training mode since a call may change its buffers now, of which the call's
        recomputation is to find the former values.
        """
        runtime = self.context.runtime
        for pending in self.micro_batches:
            runtime.layer_calls.replay_buffers_of(runtime.contract.trained_since(pending.micro_batch.state))
        self.run_due_forwards()

    @torch.inference_mode(False)
    @torch.enable_grad()  # the caller may have gradients off for code of its own
    def _run_forward(self, pending: PendingMicroBatch) -> None:
        """Run one forward pass, whose loss or outputs are there from then on."""
        self.forget_out_of_reach()
        self._check_recomputation(len(self.micro_batches))
        with self.context.record.working():
            self.execute(Run(RunKind.FORWARD, [pending], beside=self._run_alone([pending])))
        pending.forward_ran()

    def refuse_read_within_run(self, _pending: PendingMicroBatch) -> NoReturn:
        """Refuse to run a forward pass for a loss or output that code within a run reads."""
        raise UsageError(
            "code that the engine runs (the model's forward, a hook, a loss) reads a loss or an output of another call, "
            "which is not computed yet: its forward pass cannot run within another one. Read it between two calls of the "
            "engine, with loss.item(), before that code runs."
        )

    def refuse_read(self, pending: PendingMicroBatch) -> NoReturn:
        """Refuse to compute outputs of a step that is over."""
        if self.state is StepState.DESTROYED:
            raise UsageError(DESTROYED)
        pending.refuse_read()

    # ---- the program propagates back

    def note_backward(self, _: PendingMicroBatch, backward_pass: str | None) -> None:
        """Note that the program propagates back from a micro-batch, which has noted from what.

        Args:
            backward_pass: tells it from others: one comes to each of its outputs, of any of its micro-batches. None: the
                engine propagates now from what was noted before.
        """
        context = self.context
        if context.state.host_optimizer is None:
            context.check_can_propagate()
        elif backward_pass not in (None, self._backward_pass):
            context.scaler.check_scaled()
            self._backward_pass = backward_pass
            context.counters.backwards += 1
        context.executor.accumulate_unlayered()  # what a backward pass before this one has left

    def note_backward_from_real(self) -> None:
        """Note that the program propagates back from a tensor that was computed, of whatever."""
        self._took_computed_loss = True
        for pending in self.micro_batches:
            pending.uses_non_outputs = True

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

    def send_gradients(self, micro_batch: MicroBatch) -> None:
        """Send the gradients that wait at outputs of a micro-batch's layers to the host, until its backward pass runs.

        They may be as large as logits, and the plan has room for those of one micro-batch.
        """
        runtime = self.context.runtime
        if runtime.device.count > 1 or not micro_batch.waiting_gradients():
            return
        with runtime.device.as_current():
            if micro_batch.held_on_host is not None:  # from a backward pass before: gradients add up in their order
                runtime.crossing_tensors.wait(micro_batch.held_on_host)
            micro_batch.held_on_host = runtime.crossing_tensors.swap_out((), micro_batch.waiting_gradients())
            runtime.crossing_tensors.free_leaving()

    def refuse_backward(self, pending: PendingMicroBatch, _: str | None = None) -> NoReturn:
        """Refuse to propagate back from a micro-batch whose step is over."""
        if self.state is StepState.DESTROYED:
            raise UsageError(DESTROYED)
        if pending.stage is Stage.PROPAGATED:
            raise UsageError(PROPAGATED_ALREADY)
        raise UsageError(
            "this micro-batch cannot be propagated back from any more: its step is over (engine.step() or "
            "optimizer.step() was called, or failed). Call engine.backward(loss) before the step that it belongs to."
        )

    # ---- gradients are wanted before the boundary

    def run_early(self) -> bool:
        """Run forward and backward of what was propagated back from, so that its gradients are there.

        They are a part of the step: later micro-batches add to them, and the boundary uses them.

        Returns:
            Whether gradients have accumulated.
        """
        context = self.context
        context.world.refuse(
            "gradients before the step that they are for (looked at, dropped, or of inputs that require them)"
        )
        optimizer = context.state.host_optimizer
        hyper = () if optimizer is None else optimizer.hyper()
        norm_options = context.norm_options() or NormOptions()
        with self._dropped_by_errors(), context.record.working(), self._propagating():
            wanted = self._prepare(hyper, is_boundary=False)
            for run in self._runs(RunKind.PART, wanted, hyper, norm_options):
                with self._divided(run):
                    self.execute(run)
            self._note_propagated(wanted)
        return self.has_accumulated

    def may_read_gradients(self) -> bool:
        """Return whether gradients have accumulated, and may be read now: not while they are added to."""
        return self.has_accumulated and not self._is_propagating

    def pass_gradients_on(self) -> bool:
        """Run forward and backward of a frozen model, so that gradients reach what its inputs are made of."""
        count = self.queued
        self.run_early()
        self.context.record.finish_step(count)
        self.context.counters.frozen_passes += 1
        self._end()
        return False

    def refuse_within_run(self) -> NoReturn:
        """Refuse to run backward passes for gradients that code within a run reads, replaces or drops."""
        waiting = sum(pending.needs_backward for pending in self.micro_batches)
        raise UsageError(
            "code that the engine runs (the model's forward, a hook, a loss) reads, replaces or drops gradients, or "
            f"changes a parameter, while {waiting} micro-batches wait for their backward passes. These cannot run within a "
            "forward pass that runs for a loss that was read, for an evaluation or to measure the model. Do it between two "
            "calls of the engine, or read a gradient before the loss."
        )

    def check_write(self, name: str) -> None:
        """Check that what was called with the values of the parameter `name`, which are about to be changed, has run.

        A forward pass that has failed does not run again with other values.

        Raises:
            UsageError: a micro-batch is queued that has not been propagated back from.
        """
        self.forget_out_of_reach()
        if not self._is_propagating and self.waits_for_loss:
            raise UsageError(
                f"{name} is about to be changed, while a micro-batch that was handed over with the values before is still "
                "to be propagated back from: call engine.backward(loss) first, or change parameters after engine.step()."
            )
        for pending in self.micro_batches:
            pending.close_heads()
        if not self._is_running:
            self._drop_failed()

    def discard_gradients(self) -> None:
        """Discard the gradients that have accumulated since the last step."""
        context = self.context
        has_accumulated = self.may_read_gradients()
        if has_accumulated:
            context.warnings.warn(DROPPED)
        context.step_gradients.discard(has_accumulated)

    # ---- the boundary

    def run_and_update(self, schedule: dict[str, Any] | None, clips: bool = True) -> None:
        """Run what is queued, and issue the updates.

        Args:
            schedule: arguments of the scheduler's step; None: the caller steps it, and has called this step by hand.
            clips: whether gradients are clipped as the ds_config says; False: the program has clipped them.
        """
        context = self.context
        if self.before is not None:
            self.before.settle_if_skippable(context)  # which may set learning rates back
        check_schedule(context.lr_scheduler, schedule)
        count = self.queued
        with self._dropped_by_errors(), context.record.working():
            hyper, norm_options = self._check_before_update(clips)
            with self._propagating():
                # Choose what runs, measure what is new, check it, and run it as planned.
                context.first_steps.note_what_losses_use(context.runtime.contract, self.micro_batches)
                kind = RunKind.WHOLE
                if self.has_accumulated or context.steps_whole:
                    kind, norm_options = RunKind.PART, norm_options or NormOptions()
                wanted = self._prepare(hyper, is_boundary=True)
                if not (wanted or self.has_accumulated):
                    self._warn_of_no_loss(count, by_engine=schedule is not None)
                for run in self._runs(kind, wanted, hyper, norm_options):
                    with self._divided(run):
                        self.execute(run)
                self._note_propagated(wanted)
                self._run_updates(wanted, hyper, norm_options)
        context.record.finish_step(count)
        self._end()

    def _warn_of_no_loss(self, count: int, by_engine: bool) -> None:
        """Warn where the program has hardly meant a step over none of the `count` micro-batches that it called.

        Args:
            by_engine: it called `engine.step()`, not `optimizer.step()`, which it may do for gradients of its own.
        """
        by_hand, warnings = self._has_gradients_by_hand(), self.context.warnings
        if count and not by_hand:
            warnings.warn(NOTHING_PROPAGATED)
        elif by_engine and not count and by_hand and not self._took_computed_loss:
            warnings.warn(PAST_THE_ENGINE)

    def _check_before_update(self, clips: bool) -> tuple[Hyper, NormOptions | None]:
        """Return what updates depend on; take over the user's edits, and refuse what cannot be updated from."""
        context = self.context
        optimizer = context.state.host_optimizer
        assert optimizer is not None and context.override is not None
        context.override.check()
        context.runtime.resident_packs.notice_replaced_state()
        hyper, norm_options = optimizer.hyper(), context.norm_options()
        if norm_options is not None and not clips:
            norm_options = replace(norm_options, max_norm=0.0)
        context.apply_user_edits(self.micro_batches_wait)
        if context.world.size > 1 and context.runtime.user_gradients.exist():
            context.world.refuse(
                "gradients that are put on parameters by hand, or by a backward pass of the program's own"
            )
        if context.scaler.scale != 1.0 and context.step_gradients.unscaled():
            raise UnsupportedError(
                "gradients were put on parameters by hand, or by a backward pass of the program's own, while losses are "
                "scaled (fp16): they cannot be told from scaled ones. Propagate with engine.backward(loss), add what they "
                "are of to the loss, or train in bf16."
            )
        return hyper, norm_options

    def _run_updates(self, wanted: Sequence[PendingMicroBatch], hyper: Hyper, norm_options: NormOptions | None) -> None:
        """Issue the updates that the run of the `wanted` has not issued."""
        if self.has_accumulated or not wanted:
            # Forward passes that have run alone may still be swapping in what these runs write at once.
            self.context.runtime.resident_packs.finish_reads()
        if self.has_accumulated:
            update_plan, self._update_plan = self._update_plan, None
            self.execute(Run(RunKind.UPDATE, (), hyper, norm_options, update_plan=update_plan))
            self.context.executor.accumulated_gradients.note_gone()
        elif not wanted and self._has_gradients_by_hand():
            self.execute(Run(RunKind.UPDATE_BY_HAND, (), hyper, norm_options))

    def _has_gradients_by_hand(self) -> bool:
        """Return whether the program's own backward passes have left gradients on parameters of the optimizer."""
        context = self.context
        context.health.check_usable()
        optimizer = context.state.host_optimizer
        return optimizer is not None and context.runtime.user_gradients.exist(optimizer.trained)

    @contextmanager
    def _propagating(self) -> Iterator[None]:
        """Run the step, or a part of it, with gradients on: the caller may read them under `torch.no_grad()`."""
        context = self.context
        check_dropped(context.step_gradients.used)
        self._is_propagating = True
        try:
            with torch.inference_mode(False), torch.enable_grad(), gate(passed=False):  # forward may use others
                context.step_gradients.hide()
                yield
        finally:
            self._is_propagating = False

    @contextmanager
    def _dropped_by_errors(self) -> Iterator[None]:
        """Drop the step if an error is raised in this context; if it comes after updates, the engine cannot go on."""
        try:
            yield
        except BaseException as error:
            if comes_after_updates(self.context, self.outcome):
                end_engine(self.context, error)
            self.state = StepState.FAILED
            self.drop()
            raise

    # ---- what runs

    def _prepare(self, hyper: Hyper, is_boundary: bool) -> list[PendingMicroBatch]:
        """Return the micro-batches whose backward pass runs now, measured and checked; all processes do the same.

        At the boundary the others are forgotten, since their activations would take room in the plan.
        """
        context = self.context
        self._run_forwards_before(is_boundary)
        if is_boundary:
            self._release_unwanted()
        wanted = [pending for pending in self.micro_batches if pending.needs_backward]
        check_same_step(context.world, len(wanted), hyper)
        if not wanted:
            return wanted
        if is_boundary:
            for pending in wanted:
                pending.keep_outputs()
        self._measure_losses(wanted)
        losses = _losses_of(wanted)
        for loss in losses:
            members = tuple(member.micro_batch for member in loss.members)
            for micro_batch in members:
                micro_batch.loss_members = members if len(members) > 1 else ()
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
        wanted = [index for index, pending in enumerate(self.micro_batches) if pending.needs_backward]
        end = len(self.micro_batches)
        if wanted and not is_boundary:
            end = wanted[-1] + 1
        if any(one.stage is Stage.QUEUED and not one.needs_backward for one in self.micro_batches[:end]):
            self.run_due_forwards(until=self.micro_batches[end] if end < len(self.micro_batches) else None)
        if not is_boundary:
            return
        for pending in list(self.micro_batches):
            if pending.stage is Stage.QUEUED and not pending.needs_backward and pending.is_held:
                self._forward_of_call(pending)  # before weights change

    def _release_unwanted(self) -> None:
        """Release what is kept of micro-batches that the program does not propagate back from."""
        for pending in self.micro_batches:
            if not pending.needs_backward:
                self._release(pending)

    def _measure_losses(self, wanted: Sequence[PendingMicroBatch]) -> None:
        """Measure the losses that the program makes of outputs, where the memory that this takes is not known."""
        while True:
            unmeasured = self._with_unmeasured_loss(wanted)
            if not self.context.world.any("measure a loss", unmeasured is not None):
                return
            self.measure(unmeasured or wanted[0])  # all processes measure

    def _with_unmeasured_loss(self, wanted: Sequence[PendingMicroBatch]) -> PendingMicroBatch | None:
        """Return the last micro-batch of a loss that is not measured yet; None: all are."""
        for pending in wanted:
            makes_loss = pending.stage is Stage.QUEUED or pending.makes_loss_in_tiles
            if makes_loss and pending is pending.loss.members[-1] and not self._has_measured(pending):
                return pending
        return None

    def _has_measured(self, pending: PendingMicroBatch) -> bool:
        """Return whether micro-batches that take no less memory have been measured, with a loss as its own."""
        inputs = pending.micro_batch.inputs, pending.inputs_beside
        return self.context.planner.has_profiled(inputs, pending.micro_batch.inputs_form, pending.measured_modes)

    def _check_recomputation(self, micro_batches: int) -> None:
        """Compare recomputed layers in the first step of several micro-batches; it waits for the device at each output.

        A micro-batch that is alone in its step is recomputed before another one's forward could have changed anything.
        """
        checks = micro_batches > 1 and not self.context.first_steps.recomputation_is_exact
        self.context.runtime.layer_calls.checks_recomputation = checks

    def _runs(
        self, kind: RunKind, wanted: list[PendingMicroBatch], hyper: Hyper, norm_options: NormOptions | None
    ) -> Iterator[Run]:
        """Yield the runs for the `wanted` micro-batches: one, unless parts of the step have run before.

        After the first part of a step each loss runs by itself, so that it can run again without the others.
        """
        groups: list[Any] = []
        if self.has_accumulated:
            groups = [loss.members for loss in _losses_of(wanted)]
        elif wanted:
            groups = [wanted]
        for group in groups:
            yield Run(
                kind,
                group,
                hyper,
                norm_options,
                follows_part=self.has_accumulated,
                cannot_repeat=self.context.world.any(
                    "begin a step", any(pending.stage in RUN_ALONE for pending in group)
                ),
                taken_gradients=self.context.runtime.user_gradients.popped,
                beside=self._run_alone(group),
            )

    def _run_alone(self, others: Sequence[PendingMicroBatch]) -> list[PendingMicroBatch]:
        """Return the micro-batches beside `others` whose forward pass has run alone, and whose backward pass has not."""
        ran_alone = [one for one in self.micro_batches if one.stage in RUN_ALONE and one.micro_batch.forward_done]
        return [one for one in ran_alone if one not in others]

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

    def execute(self, run: Run) -> None:
        """Run micro-batches as planned; where `recovery` says so after an error, measure them and run them again.

        The micro-batches draw the same random numbers again, and so take the same way through the model.
        """
        context, executor = self.context, self.context.executor
        recovery = Recovery(context, run)
        exchanged_before = context.runtime.contract.settings.exchanged_count
        was_running, self._is_running = self._is_running, True
        try:
            while True:
                try:
                    self.outcome = recovery.outcome = Outcome()
                    executor.begin(self.outcome)
                    planned = plan_run(context, run)
                    with running(context, planned), undoing_passes(context, planned.micro_batches):
                        if run.kind is RunKind.UPDATE_BY_HAND:
                            executor.gradient_tasks.update_from_user_gradients(run.hyper, run.norm_options)
                        else:
                            executor.run(planned.plan, planned.micro_batches, run.hyper, run.norm_options)
                            finish_run(context, run, planned)
                        self._complete_settings(exchanged_before)
                    if run.kind is RunKind.PART:
                        self._update_plan = planned.update_plan
                    return
                except BaseException as error:  # noqa: BLE001 - `recover` raises it, unless the run is to be made again
                    repetition = recovery.recover(error)
                self._prepare_again(run, repetition)
        except BaseException as error:
            if executor.failure is not None:
                self._note_place(error, run, executor.failure)
            recovery.end(error)
            raise
        finally:
            self._is_running = was_running

    def _complete_settings(self, exchanged_before: int) -> None:
        """Let recorded layer calls run again with settings of modules that a run has found to be exchanged between lanes.

        `exchanged_before`: how many were exchanged before the run.
        """
        settings = self.context.runtime.contract.settings
        if settings.exchanged_count > exchanged_before:  # and the engine's may be others from now on
            for waiting in self.micro_batches:
                waiting.micro_batch.complete_settings(settings)

    def _prepare_again(self, run: Run, repetition: Repetition) -> None:
        """Prepare the micro-batches of a run, which has failed, to run again: measure them, and forget what they gave."""
        executor = self.context.executor
        self._measure_again(run, repetition, executor.failure)
        executor.failure = None  # the run is made again
        for pending in run.pending:
            if not pending.has_run:
                pending.forget_values()

    def _measure_again(self, run: Run, repetition: Repetition, failure: TaskFailure | None) -> None:
        """Measure micro-batches of a run that is made again: all, if each may take another way through the model.

        For less memory, the one that failed is measured, and others as far as a new way to cut layer calls is not known to
        fit them.
        """
        if repetition is Repetition.MEASURED_ANEW:
            for pending in run.pending:
                self.measure(pending)
            return
        failed = [one for one in run.pending if failure is not None and one.micro_batch.index == failure.micro_batch]
        first = failed[0] if failed else run.pending[0]
        self.measure(first)
        for pending in run.pending:
            if pending is not first and not self._has_measured(pending):
                self.measure(pending)

    def _note_place(self, error: BaseException, run: Run, failure: TaskFailure) -> None:
        """Note on an error of a run which micro-batch and layer it is of, and where the program called it."""
        place = f"micro-batch {failure.micro_batch + 1} of {max(self._called, len(run.pending))}"
        if failure.layer is not None:
            place += f", layer {self.context.state.layers[failure.layer].name}"
        for pending in run.pending:
            if pending.micro_batch.index == failure.micro_batch:
                file, line = pending.called_at
                place += f", called in {file}, line {line}"
        error.add_note(f"harmony_ds: {place}")

    # ---- its end

    def drop(self) -> None:
        """Drop the step: undo what its runs have done, and let the program hand its micro-batches over again."""
        undo_step(self.context, self.has_accumulated)
        self._close()

    def drop_with_engine(self) -> None:
        """Drop the step of an engine that is destroyed; warn if gradients are lost by that."""
        steps = self.context.state.host_optimizer is not None  # else gradients have gone on already
        lost = sum(one.needs_backward or (steps and one.stage is Stage.PROPAGATED) for one in self.micro_batches)
        if lost:
            _logger.warning(
                "destroy() drops the gradients of micro-batches (%d) whose step was not taken: call engine.step() at the "
                "boundary of a group (or engine.set_gradient_accumulation_boundary(True) before it) to use them.",
                lost,
            )
        self._close(keeps_outputs=False)

    def _end(self) -> None:
        """End a step without an error."""
        free_unused(self.context, self.has_accumulated)
        self._close()

    def _close(self, keeps_outputs: bool = True) -> None:
        """Forget all micro-batches and the engine's objects, since losses that the program keeps hold the step."""
        for pending in self.micro_batches:
            pending.close(keeps_outputs)
        self.micro_batches.clear()
        self.buffers_before = {}
        self._update_plan = None
        self._context = None

    # ---- after the boundary: the norm

    def count(self, context: StepContext, schedule: dict[str, Any] | None) -> None:
        """Count the step, which has been taken, and step the scheduler (`schedule` None: the caller does) and loss scale.

        It counts as taken until it is known whether its gradients were finite: see `settle`. It counts, too, if the step
        before it turns out to have failed, or the scheduler raises an error: its updates are issued.
        """
        try:
            if self.before is not None:
                self.before.settle_if_updating(context)  # its updates are done
                self.before = None
        finally:
            self._count_taken(context)
        counters = context.counters
        if context.scaler.deepspeed_scaler.dynamic:  # the next losses have another scale after an overflow
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
            samples = counters.backwards * settings.train_micro_batch_size_per_gpu()
            counters.global_samples += samples * context.world.size
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
            self.handle(StepEvent.READ_OUTCOME, context)

    def settle_if_updating(self, context: StepContext) -> None:
        """Settle the step if its updates are issued, and it has not been settled."""
        if self.state is StepState.UPDATING:
            self.handle(StepEvent.READ_OUTCOME, context)

    def settle(self, context: StepContext) -> None:
        """Wait for the norm: count the step as skipped, or warn, if its gradients were not finite.

        Raises:
            PeerFailedError: another process has not said its part of the norm.
            Exception: what has ended this process's update thread before the norm was known.
        """
        outcome, counters = self.outcome, context.counters
        try:
            norm = None if outcome.norm is None else outcome.norm.result()
        except Exception:
            self.state = StepState.FAILED
            counters.undoable_schedule_step = None
            context.runtime.updater.raise_failure()  # which notes that the caller has got it
            raise
        schedule_step, counters.undoable_schedule_step = counters.undoable_schedule_step, None
        if norm is None:
            return
        if outcome.overflow:
            counters.was_applied, counters.has_overflowed = False, True
            counters.skipped_steps += 1
            if schedule_step is not None:
                schedule_step.undo()
            is_scaled = context.scaler.deepspeed_scaler.dynamic
            context.warnings.log(SKIPPED_AT_SCALE if is_scaled else SKIPPED, counters.global_steps)
        elif not math.isfinite(norm.total):
            context.warnings.log(NOT_FINITE, counters.global_steps, norm.total)


def _losses_of(pending: Iterable[PendingMicroBatch]) -> list[SharedLoss]:
    """Return the losses of micro-batches, each once, in their order."""
    return list(dict.fromkeys(one.loss for one in pending))


# ---- the table

_TAKING_CALLS = (StepState.OPEN, StepState.ACCUMULATED)
_AFTER_BOUNDARY = (StepState.UPDATING, StepState.DONE, StepState.FAILED, StepState.DESTROYED)
_NEXT = Impossible("the next step has begun, which takes this event")
_BEFORE_BOUNDARY: dict[StepEvent, tuple[Transition, ...]] = {
    StepEvent.CALL: (
        Transition(
            Step.queue,
            None,
            "Copy its arguments and queue it; measure the model first if no micro-batch as large was measured.",
        ),
    ),
    StepEvent.READ_OUTPUT: (
        Transition(
            Step.refuse_read_within_run,
            None,
            "Refuse: code that the engine runs reads it, and a forward pass cannot run inside another run.",
            Step.runs_the_model,
        ),
        Transition(
            Step.read_output, None, "Run its forward pass now, alone; warn once that this micro-batch is not grouped."
        ),
    ),
    StepEvent.BACKWARD: (
        Transition(
            Step.note_backward,
            None,
            "Note that its backward pass runs with the group. If its inputs require gradients, READ_GRADIENT follows.",
        ),
    ),
    StepEvent.READ_GRADIENT: (
        Transition(
            Step.refuse_within_run,
            None,
            "Refuse: code that the engine runs reads it, and backward passes cannot run inside another run.",
            Step.waits_for_backward_within_run,
        ),
        Transition(
            Step.pass_gradients_on,
            StepState.DONE,
            "Run forward and backward: gradients go through a frozen model, and no step follows.",
            Step.trains_nothing,
            error_drops=True,
        ),
        Transition(
            Step.run_early,
            StepState.ACCUMULATED,
            "Run forward and backward of all micro-batches that were propagated back from, and keep their gradients.",
            Step.waits_for_backward,
            error_drops=True,
        ),
        Transition(Step.may_read_gradients, None, "Run nothing: no micro-batch waits for its backward pass."),
    ),
    StepEvent.WRITE_PARAMETER: (
        Transition(
            Step.check_write, None, "Refuse if a micro-batch that uses the old values still waits for backward()."
        ),
    ),
    StepEvent.EVALUATE: (
        Transition(
            Step.run_forwards_before_evaluation,
            None,
            "Run the forward passes that wait, in their order, if forward changes buffers, or may do so now.",
        ),
    ),
    StepEvent.CALLER_FAILED: (
        Transition(Step.drop, StepState.FAILED, "Drop the step: its micro-batches have to be handed over again."),
    ),
    StepEvent.LOAD_CHECKPOINT: (
        Transition(Step.drop, StepState.FAILED, "Drop the step: its micro-batches have to be handed over again."),
    ),
    StepEvent.DESTROY: (
        Transition(Step.drop_with_engine, StepState.DESTROYED, "Drop the step; warn if gradients are lost by that."),
    ),
}
TRANSITIONS: Transitions = {
    **{(state, event): _NEXT for state in StepState for event in StepEvent},
    **{(state, event): cell for state in _TAKING_CALLS for event, cell in _BEFORE_BOUNDARY.items()},
    **{
        (state, StepEvent.READ_OUTCOME): Impossible("no update has been issued before the boundary")
        for state in _TAKING_CALLS
    },
    (StepState.OPEN, StepEvent.ZERO_GRAD): (
        Transition(
            Step.discard_gradients, None, "Discard the gradients that the program has put on parameters itself."
        ),
    ),
    (StepState.ACCUMULATED, StepEvent.ZERO_GRAD): (
        Transition(
            Step.discard_gradients, None, "Discard all gradients; warn once that those of micro-batches are lost."
        ),
    ),
    (StepState.OPEN, StepEvent.BOUNDARY): (
        Transition(
            Step.run_and_update,
            StepState.UPDATING,
            "Run forward, backward and updates of what was propagated back from, and return when the updates are issued: "
            "one plan, unless the optimizer steps as a whole. Forget the other micro-batches.",
            error_drops=True,
        ),
    ),
    (StepState.ACCUMULATED, StepEvent.BOUNDARY): (
        Transition(
            Step.run_and_update,
            StepState.UPDATING,
            "Run forward and backward of what was propagated back from since, each loss by itself, then the updates from "
            "all gradients, and return when these are issued. Forget the other micro-batches.",
            error_drops=True,
        ),
    ),
    # ---- after the boundary
    (StepState.UPDATING, StepEvent.READ_OUTCOME): (
        Transition(
            Step.settle,
            StepState.DONE,
            "Wait for the norm. If it is inf or NaN and such steps are skipped, no weight has changed: count the step as "
            "skipped, and undo the scheduler's step. Else warn.",
            error_drops=True,
        ),
    ),
    (StepState.UPDATING, StepEvent.DESTROY): Impossible(
        "DESTROY goes to the step that is open; this one is settled afterwards"
    ),
    **{
        (state, StepEvent.READ_OUTCOME): Impossible("it is known already")
        for state in (StepState.DONE, StepState.FAILED, StepState.DESTROYED)
    },
    **{
        (state, StepEvent.READ_OUTPUT): (
            Transition(Step.refuse_read, None, "Refuse: what was not read before the boundary is gone."),
        )
        for state in _AFTER_BOUNDARY
    },
    **{
        (state, StepEvent.BACKWARD): (Transition(Step.refuse_backward, None, "Refuse: the step of that loss is over."),)
        for state in _AFTER_BOUNDARY
    },
}
"""What each event does to a step in each state."""
