"""Evaluation: losses of micro-batches without gradients, which are of no step, and leave the open one as it is."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from harmony_ds.runtime.micro_batch import loss_of
from harmony_ds.step.inputs import CallInputs
from harmony_ds.step.pending_micro_batch import LossFunction, PendingMicroBatch
from harmony_ds.step.run import Run, RunKind
from harmony_ds.step.samples import new_micro_batch
from harmony_ds.step.step import Step


def evaluate(step: Step, batches: Sequence[CallInputs], loss_fn: LossFunction | None) -> list[Tensor]:
    """Return the losses of `batches`, detached; they run with the random numbers that `step`, the open one, would draw."""
    context = step.context
    reduce = loss_fn or loss_of
    evaluated: list[PendingMicroBatch] = []
    for index, arguments in enumerate(batches):
        micro_batch = new_micro_batch(context, step.number, index, arguments, context.model, reduce)
        pending = PendingMicroBatch(step, micro_batch, arguments, reduce, context.model)
        is_known = context.planner.may_evaluate(micro_batch.inputs, micro_batch.inputs_form, pending.measured_modes)
        if context.world.any("evaluate", not is_known):
            step.measure(pending)
        evaluated.append(pending)
    with context.state.ledger.excluded():
        step.execute(Run(RunKind.EVALUATION, evaluated))
    return [pending.micro_batch.outputs.detach() for pending in evaluated]
