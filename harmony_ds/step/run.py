"""One run of the executor for micro-batches: what it runs, its plan, and what comes before and after the plan's tasks."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from harmony_ds.optim.host_optimizer import Hyper
from harmony_ds.optim.updater import NormOptions
from harmony_ds.runtime.micro_batch import MicroBatch
from harmony_ds.scheduler.plan import EMPTY_PLAN, Plan, TaskKind
from harmony_ds.step.context import StepContext
from harmony_ds.step.pending_micro_batch import PendingMicroBatch
from harmony_ds.step.planner import unplanned_bytes


class RunKind(enum.Enum):
    """Which passes and updates a run of the executor computes."""

    FORWARD = "the forward pass of one micro-batch"
    PART = "forward and backward of some micro-batches of a step; the gradients wait"
    WHOLE = "forward, backward and updates"
    UPDATE = "the norm and the updates, from gradients that wait"
    UPDATE_BY_HAND = "the updates, from gradients that the program has put on parameters"
    EVALUATION = "forward passes without gradients"


@dataclass(frozen=True, slots=True)
class Run:
    """What the executor is to run at once; after an error it may run again.

    Attributes:
        pending: the micro-batches that run.
        beside: others of the step, whose forward pass has run alone, and whose backward pass has not.
        hyper: hyper-parameters for the updates.
        norm_options: how updates depend on the norm of all gradients; None: they do not wait for it.
        follows_part: whether a PART of the step has run before, whose gradients wait.
        cannot_repeat: whether in any process a forward pass had run alone, whose outputs the program has.
        taken_gradients: how many gradients had been taken from the program's parameters before.
        update_plan: of an UPDATE: the tasks that the step's PARTs have left.
    """

    kind: RunKind
    pending: Sequence[PendingMicroBatch]
    hyper: Hyper = ()
    norm_options: NormOptions | None = None
    follows_part: bool = False
    cannot_repeat: bool = False
    taken_gradients: int = 0
    update_plan: Plan | None = None
    beside: Sequence[PendingMicroBatch] = ()


@dataclass(slots=True)
class PlannedRun:
    """The plan of a run, and what is measured while it runs.

    Attributes:
        micro_batches: those whose layer calls are joined count as one.
        update_plan: after a PART: the tasks that remain (norm and updates), which run at the boundary.
        records: whether the timeline records it as a step.
        watches_peak: whether its peak of device memory is to be that of the plan.
        unplanned_bytes: memory of each device that was in use before.
    """

    plan: Plan
    micro_batches: Sequence[MicroBatch]
    update_plan: Plan | None = None
    records: bool = False
    watches_peak: bool = False
    unplanned_bytes: tuple[int, ...] = ()


def plan_run(context: StepContext, run: Run) -> PlannedRun:
    """Return the plan of a run; refuse what cannot run, before anything does."""
    context.health.check_usable()
    if run.kind is RunKind.UPDATE_BY_HAND:
        return PlannedRun(EMPTY_PLAN, ())
    if run.kind is RunKind.UPDATE:
        return _plan_update(context, run)
    composer, has_unlayered = context.composer, context.executor.has_unlayered
    micro_batches: Sequence[MicroBatch] = [pending.micro_batch for pending in run.pending]
    if run.kind is RunKind.EVALUATION:
        return PlannedRun(composer.evaluation(micro_batches, has_unlayered), micro_batches)
    context.runtime.contract.check([micro_batch.state for micro_batch in micro_batches])
    others = [pending.micro_batch for pending in run.beside]
    outputs = sum(pending.keeps_outputs_on_device for pending in (*run.pending, *run.beside))
    if run.kind is RunKind.FORWARD:
        return PlannedRun(composer.forward(micro_batches[0], has_unlayered, others, outputs), micro_batches)
    beside_bytes = composer.beside_bytes(micro_batches, others, outputs)
    for micro_batch in micro_batches:
        context.runtime.layer_calls.check_replayed(call for _, call in micro_batch.calls)
        micro_batch.check_unwritten()
    if run.kind is RunKind.PART:
        composer.make_room(micro_batches)
        plan, rest = composer.part_of_step(
            micro_batches, has_unlayered, first=not run.follows_part, beside_bytes=beside_bytes
        )
        return PlannedRun(plan, micro_batches, rest)
    micro_batches = composer.sets(micro_batches)
    composer.make_room(micro_batches)
    plan = composer.step(micro_batches, has_unlayered, beside_bytes)
    # The plan's peak is that of passes whose losses and outputs are not read.
    is_as_planned = not any(pending.micro_batch.forward_done for pending in run.pending)
    planned = PlannedRun(plan, micro_batches, records=True, watches_peak=is_as_planned)
    planned.unplanned_bytes = unplanned_bytes(context.runtime)
    context.allocator_retries.begin_step()
    return planned


def _plan_update(context: StepContext, run: Run) -> PlannedRun:
    """Return the tasks that the parts of a step have left; an optimizer that steps as a whole does the rest of them."""
    plan = run.update_plan
    assert plan is not None
    if context.steps_whole:
        plan = plan.part(0, [task.kind for task in plan.tasks].index(TaskKind.NORM))
    return PlannedRun(plan, ())


@contextmanager
def running(context: StepContext, planned: PlannedRun) -> Iterator[None]:
    """Mark the user's code that runs in this context as called by the engine, and record the step."""
    runtime = context.runtime
    runtime.device.watch_peak()
    with runtime.contract.running(), runtime.timeline.step(planned.plan) if planned.records else nullcontext():
        yield


def finish_run(context: StepContext, run: Run, planned: PlannedRun) -> None:
    """Do what comes after the plan's tasks: measurements, the promise of a norm, or the optimizer's own step."""
    device, gradient_tasks = context.runtime.device, context.executor.gradient_tasks
    _note_run(context, run, planned)
    if run.kind is RunKind.WHOLE:
        gradient_tasks.promise_norm()
        peak_bytes = 0
        if planned.watches_peak and device.peak_has_risen():
            # Workspaces are made when a thread first needs one, in some step.
            beside_bytes = context.planner.beside.reserve_bytes + context.planner.beside.exchange_bytes(planned.plan)
            peaks = zip(device.peaks(), planned.unplanned_bytes, strict=True)
            peak_bytes = max(peak - unplanned for peak, unplanned in peaks) - beside_bytes
        context.planner.check_peak(peak_bytes)
        context.allocator_retries.finish_step()
    elif run.kind is RunKind.UPDATE and context.steps_whole:
        assert run.norm_options is not None
        gradient_tasks.step_whole(run.norm_options)


def _note_run(context: StepContext, run: Run, planned: PlannedRun) -> None:
    """Note what has run of the step, for its reports."""
    if run.kind is RunKind.EVALUATION:
        return
    context.record.note_peaks(planned.plan.peak_bytes)
    if run.kind is RunKind.FORWARD:
        context.record.note_forward_alone()
    elif run.kind in (RunKind.PART, RunKind.WHOLE):
        context.record.note_group(len(planned.micro_batches))
