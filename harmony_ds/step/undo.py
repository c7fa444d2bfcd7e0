"""How a step is undone after an error: what its runs have done to models, devices, the host and counters, in order.

    undoing_passes    an error is raised in a run, and the model's code still counts as the engine's: `step.Step.execute`
    undo_run          then, before any remedy: `recovery.Recovery.recover`
    undo_step         the error is raised and drops the step, or other weights are loaded: `step.Step.drop`

What stays on the device:

    always                                           buffers; resident packs, with masters and optimizer state
    after a forward pass, a part or an evaluation    what earlier runs of the step have left: other micro-batches' stash and
                                                     outputs, and copies of unlayered parameters
    the same, if no backward pass has begun          and the gradients that have accumulated, those of resident packs too

`surviving` decides the last two, for all of these functions. What updates have changed is never undone: after the first
one the engine cannot go on. The budget of a remedy that did not help is put back by `retry_budget`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from harmony_ds.runtime.leftovers import Leftovers
from harmony_ds.runtime.micro_batch import MicroBatch
from harmony_ds.runtime.outcome import Outcome
from harmony_ds.step.context import StepContext
from harmony_ds.step.run import Run, RunKind

_PARTS_OF_STEPS = (RunKind.FORWARD, RunKind.PART, RunKind.EVALUATION)
"""Runs beside other runs of a step, which stand if one of these fails; if another kind fails, nothing of the step does."""


def surviving(context: StepContext, failed: Run | None) -> Leftovers:
    """Return what survives of a step's earlier runs if its last run has `failed` and is undone; None: the step is over."""
    if failed is None or failed.kind not in _PARTS_OF_STEPS:
        return Leftovers.NONE
    if context.executor.backward_begun:  # it may have added to the gradients
        return Leftovers.COPIES
    return Leftovers.COPIES_AND_GRADIENTS


@contextmanager
def undoing_passes(context: StepContext, micro_batches: Sequence[MicroBatch]) -> Iterator[None]:
    """Undo forward and backward passes after an error: end their lanes, forget their records, set modules as before."""
    try:
        yield
    except BaseException:
        for micro_batch in micro_batches:
            micro_batch.reset()  # code of the model may run as its lane ends
        context.runtime.contract.settings.undo()
        raise


def undo_run(context: StepContext, run: Run, outcome: Outcome) -> None:
    """Undo what a run has done to the device and the host; `outcome`: what it has updated."""
    kept = surviving(context, run)
    if kept is not Leftovers.COPIES_AND_GRADIENTS:
        context.step_gradients.pop_received()
    _free_but(context, kept, comes_after_updates(context, outcome))


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
        _free_but(context, surviving(context, None), has_updated=context.health.failed is not None)


def _free_but(context: StepContext, kept: Leftovers, has_updated: bool) -> None:
    """Free what a step has on the device and the host, but what is `kept`.

    Where it `has_updated` something, its gradients on the host stay: updates that are issued use them.
    """
    context.executor.free_but(kept)
    if kept is not Leftovers.COPIES_AND_GRADIENTS and not has_updated:
        context.runtime.updater.discard()


def comes_after_updates(context: StepContext, outcome: Outcome) -> bool:
    """Return whether an error now leaves some layers updated and others not: by this process, by others, or before."""
    return context.health.failed is not None or bool(outcome.updates_issued) or outcome.peers_update
