"""Micro-batches made of calls, and as samples to measure the model with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from harmony_ds.errors import BatchError
from harmony_ds.model.intercept import Autocast
from harmony_ds.model.random_streams import micro_batch_seed
from harmony_ds.model.trees import map_tensors
from harmony_ds.profiling import flops
from harmony_ds.profiling.flops import FlopCounts
from harmony_ds.profiling.passes import ModelPasses
from harmony_ds.profiling.sample import Sample, form_of_inputs
from harmony_ds.runtime.micro_batch import MicroBatch
from harmony_ds.step.context import StepContext
from harmony_ds.step.inputs import CallInputs, Inputs
from harmony_ds.step.pending_micro_batch import PendingMicroBatch


def new_micro_batch(
    context: StepContext,
    step_number: int,
    index: int,
    arguments: CallInputs,
    call: Callable[..., Any],
    reduce: Callable[[Any], Any] | None = None,
) -> MicroBatch:
    """Return a micro-batch that calls `call` with `arguments`.

    Args:
        step_number: of the step whose random numbers it draws.
        index: among the micro-batches of this process.
        reduce: of one without gradients, what is kept of its outputs.

    Raises:
        BatchError: there is no tensor among the arguments.
    """
    args, kwargs = inputs = arguments.tree
    device = context.runtime.device
    if not arguments.tensors:
        raise BatchError(
            f"micro-batch {index + 1} holds no tensor (arguments: {[type(a).__name__ for a in args]}, "
            f"{sorted(kwargs)}): pass what the model's forward takes."
        )
    # As if one process had taken the micro-batches of all in turn.
    position = index * context.world.size + context.world.rank
    autocast = Autocast.current(device.torch_device.type)
    return MicroBatch(
        index=index,
        seed=micro_batch_seed(context.seed, step_number, position),
        forward=lambda: context.model_calls.run(call, arguments),
        objective=lambda outputs: None,
        autocast=autocast,
        state=context.runtime.contract.read_state(),
        home=device.torch_device,
        device=device,
        inputs_form=form_of_inputs(inputs, autocast),
        reduce=reduce,
        inputs=inputs,
    )


def measure(context: StepContext, pending: PendingMicroBatch, queued: Iterable[PendingMicroBatch]) -> None:
    """Measure the model with one micro-batch and plan anew; those `queued` whose forward pass ran follow the new plan.

    Raises:
        DoesNotFitError: no plan fits, or not even one layer at a time.
    """
    with called_as(pending, context):
        context.health.check_usable()
        context.state.free_device()
        moved = context.planner.measure(sample_of(pending, context))
        context.planner.fill_pool()
        context.runtime.device.reset_peak()  # steps are not what was measured
        for one in queued:
            if one.micro_batch.forward_done:
                one.micro_batch.move(moved)


def count_flops(context: StepContext, pending: PendingMicroBatch) -> FlopCounts:
    """Run DeepSpeed's flops profiler over a forward pass of `pending`, of which nothing else is left."""
    state, planner = context.state, context.planner
    factor = context.settings.now.values["flops_profiler.recompute_fwd_factor"]
    passes = ModelPasses(state.runtime, state.layers, planner.graph.unlayered)
    with called_as(pending, context):
        context.health.check_usable()
        state.free_device()
        counts = flops.count_flops(context.model, passes, sample_of(pending, context), factor)
    costs = planner.costs[1]
    forward_ms = [0.0] * len(state.layers)
    for layer, cost in zip(costs.calls, costs.costs, strict=True):
        forward_ms[layer] += cost.forward_ms
    counts.set_layer_times(state.layers, forward_ms)
    return counts


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
        micro_batch.inputs_form,
        trains=micro_batch.reduce is None,
        inputs_beside=pending.inputs_beside,
    )


def _cut_from_graph(tensor: Tensor) -> Tensor:
    """Return `tensor` without its graph; one that an operation made may still be changed in place."""
    if not tensor.requires_grad:
        return tensor
    leaf = tensor.detach().requires_grad_()
    return leaf if tensor.is_leaf else leaf.clone()
