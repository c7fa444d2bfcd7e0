"""How a step is undone after an error: what its runs have done to models, devices, the host and counters, in order.

    undo_passes    an error was raised in a run, and the model's code still counts as the engine's: `run.running`
    undo_run       then, before any remedy: `recovery.Recovery.recover`
    undo_step      the error is raised and drops the step, or other weights are loaded: `step.Step.drop`

What updates have changed is never undone: after the first one the engine cannot go on. The budget of a remedy that did not
help is put back by `retry_budget`.
"""

from __future__ import annotations

from collections.abc import Sequence

from harmony_ds.runtime.micro_batch import MicroBatch
from harmony_ds.runtime.outcome import Outcome
from harmony_ds.step.context import StepContext


def undo_passes(context: StepContext, micro_batches: Sequence[MicroBatch]) -> None:
    """Undo forward and backward passes: end their lanes, forget their records, set modules as they were before."""
    for micro_batch in micro_batches:
        micro_batch.reset()  # code of the model may run as its lane ends
    context.runtime.contract.settings.undo()


def undo_run(context: StepContext, outcome: Outcome, keeps_device_copies: bool) -> None:
    """Undo what a run has done to the device and the host.

    Args:
        outcome: what it has updated.
        keeps_device_copies: whether device copies stay that earlier runs of the step have left. Gradients on them stay,
            too, unless a backward pass of this run has added to them.
    """
    executor = context.executor
    discards_gradients = executor.backward_begun or not keeps_device_copies
    if executor.backward_begun:
        context.step_gradients.pop_received()
    if keeps_device_copies:
        executor.free_run()
    else:
        executor.free_step()
    if discards_gradients and not comes_after_updates(context, outcome):
        context.runtime.updater.discard()


def undo_step(context: StepContext, has_accumulated: bool) -> None:
    """Undo all runs of a step, and let the program hand its micro-batches over again.

    Args:
        has_accumulated: whether gradients of the step wait for their updates.
    """
    context.step_gradients.pop_received()
    free_unused(context, has_accumulated)
    context.record.forget_step()
    context.counters.rewind()


def free_unused(context: StepContext, has_accumulated: bool) -> None:
    """Free what the runs of a step that is over have left and no update has used: gradients, unlayered parameters."""
    if (has_accumulated or context.executor.has_unlayered) and not context.health.is_destroyed:
        context.executor.free_step()
        if context.health.failed is None:
            context.runtime.updater.discard()


def comes_after_updates(context: StepContext, outcome: Outcome) -> bool:
    """Return whether an error now leaves some layers updated and others not: by this process, by others, or before."""
    return context.health.failed is not None or bool(outcome.updates_issued) or outcome.peers_update
