"""Micro-batches of a step as samples to measure the model with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from harmony_ds.model.intercept import Autocast
from harmony_ds.model.trees import map_tensors
from harmony_ds.profiling.sample import Sample
from harmony_ds.step.context import StepContext
from harmony_ds.step.inputs import CallInputs, Inputs
from harmony_ds.step.pending_micro_batch import PendingMicroBatch


@contextmanager
def called_as(pending: PendingMicroBatch, context: StepContext) -> Iterator[None]:
    """Open a context in which forward passes run in the modes of the call of `pending`; their bytes are not counted."""
    contract = context.runtime.contract
    with (
        context.state.ledger.excluded(),
        pending.profiling_context(),
        Autocast.entered(pending.micro_batch.autocast),
        contract.running(),
        contract.entered(pending.micro_batch.state),
    ):
        yield


def sample_of(pending: PendingMicroBatch, context: StepContext) -> Sample:
    """Return the sample that measures the model with the inputs of `pending`; its outputs are learned, too."""
    micro_batch = pending.micro_batch

    def call(inputs: Inputs) -> Any:
        outputs = context.model_calls.run(pending.call, CallInputs(*inputs))
        context.output_kinds.learn(micro_batch, outputs, inputs)
        return outputs

    return Sample(
        # Made-up gradients must not reach what the caller propagates through.
        map_tensors(_cut_from_graph, micro_batch.inputs),
        call,
        pending.surrogate_loss,
        micro_batch.seed,
        pending.measured_modes,
        trains=micro_batch.reduce is None,
        inputs_beside=pending.inputs_beside,
    )


def _cut_from_graph(tensor: Tensor) -> Tensor:
    """Return `tensor` without its graph; one that an operation made may still be changed in place."""
    if not tensor.requires_grad:
        return tensor
    leaf = tensor.detach().requires_grad_()
    return leaf if tensor.is_leaf else leaf.clone()
