"""Checks of a step: all processes take the same one; no micro-batch of the first reads what another one has written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from harmony_ds.distributed import SingleProcess
from harmony_ds.errors import ModelError, UsageError
from harmony_ds.model.contract import Contract, UnseenError
from harmony_ds.model.sameness import close, comparison
from harmony_ds.model.trees import map_tensors
from harmony_ds.optim.host_optimizer import Hyper
from harmony_ds.profiling.passes import ModelPasses
from harmony_ds.step.call_cuts import Cuts
from harmony_ds.step.context import StepContext
from harmony_ds.step.pending_micro_batch import PendingMicroBatch
from harmony_ds.step.planner import Planner
from harmony_ds.step.samples import called_as, sample_of
from harmony_ds.step.shared_loss import LossMember, SharedLoss

_DIGEST_BYTES = hashlib.sha256().digest_size
_SHOWN_BYTES = 2048


def check_same_step(world: SingleProcess, micro_batches: int, hyper: Hyper) -> None:
    """Raise UsageError if another process takes a step of other micro-batches or hyper-parameters.

    A digest is compared, since an agreement holds few bytes; the text is for the error alone, and may be cut.
    """
    # A tensor's own text leaves digits and elements out.
    exact = [{k: v.tolist() if isinstance(v, Tensor) else v for k, v in group.items()} for group in hyper]
    text = repr(exact).encode()
    shown = text if len(text) <= _SHOWN_BYTES else text[:_SHOWN_BYTES] + b"..."
    told = world.agree(f"take a step of {micro_batches} micro-batches", hashlib.sha256(text).digest() + shown)
    first, *others = (said[_DIGEST_BYTES:].decode(errors="replace") for said in told)
    for rank, other in enumerate(others, start=1):
        if told[rank][:_DIGEST_BYTES] != told[0][:_DIGEST_BYTES]:
            raise UsageError(
                f"the optimizer's hyper-parameters of rank {rank} are {other}, and those of rank 0 {first}: schedules and "
                "changes by hand must be the same everywhere."
            )


def check_grouping(context: StepContext, losses: Sequence[SharedLoss]) -> bool:
    """Run the forward passes of `losses` alone and in order.

    In the step that follows, where they take turns layer by layer, their losses must be the same, or the step is refused
    before anything is updated.

    Returns:
        Whether that step compares them; else the next step is to try.
    """
    world = context.world
    members = [member for loss in losses for member in loss.members]
    cannot_compare = context.forward_runs_at_calls or any(member.micro_batch.forward_done for member in members)
    if world.any("compare losses", cannot_compare):
        return False
    joins_calls = context.planner.joined_count > 1
    if world.any("draw other numbers", joins_calls and context.runtime.joins.are_random):  # not single calls' losses
        return True
    in_tiles = context.planner.cuts.tiles_in_use.head > 0
    if world.any("compare no tiles", in_tiles and any(len(loss.members) > 1 for loss in losses)):
        return True  # what the last layer gives in one forward pass is gone when the next one has run
    is_alike = close
    if not joins_calls:
        exact = comparison(context.runtime.device.torch_device)
        is_alike = partial(_is_alike, context.planner, context.planner.cuts.now, exact)
    saw_unmeasured = False
    try:
        _run_alone(context, members, is_alike)
    except UnseenError:  # the step will find it, too, and measure anew
        saw_unmeasured = True
    return not world.any("compare losses again", saw_unmeasured)  # all processes try again, or none


def _run_alone(context: StepContext, members: Sequence[LossMember], is_alike: Callable[[Tensor, Tensor], bool]) -> None:
    """Run the forward pass of each of `members` alone; note on its loss that the step is to give one that `is_alike`."""
    runtime = context.runtime
    context.state.free_device()
    passes = ModelPasses(runtime, context.state.layers, context.planner.profiler.unlayered, context.planner.rows)
    outputs = dict[LossMember, Any]()
    with runtime.contract.running(), passes.opened():
        for member in members:
            assert isinstance(member, PendingMicroBatch)
            is_shared = len(member.loss.members) > 1
            own_loss = partial(_add_outputs, member, outputs) if is_shared else member.own_loss
            sample = replace(sample_of(member, context), surrogate_loss=own_loss)
            try:
                with called_as(member, context):
                    loss = passes.loss(sample)
            except BaseException as error:
                member.note_call(error, "while it ran alone")
                raise
            if loss is not None:
                index = member.micro_batch.index
                member.loss.expected = partial(_check_loss, runtime.contract, index, is_alike, loss)


def _add_outputs(member: LossMember, collected: dict[LossMember, Any], outputs: Any) -> Tensor | None:
    """Add the outputs of `member` to those collected; return the loss that it shares, once they are complete."""
    collected[member] = map_tensors(Tensor.detach, outputs)
    if any(other not in collected for other in member.loss.members):
        return None
    return member.loss.sum(collected, detached=True)[0]


def _is_alike(
    planner: Planner, cuts: Cuts, exact: Callable[[Tensor, Tensor], bool], alone: Tensor, loss: Tensor
) -> bool:
    """Return whether two losses are the same; to rounding if calls have been cut further since the first one was made.

    Those of layers that draw random numbers cannot be compared then: slices and tiles draw others.
    """
    now = planner.cuts.now
    if now.round_alike(cuts):
        return exact(alone, loss)
    return bool(planner.rows.drawing) or now.tiles != cuts.tiles or close(alone, loss)


def _check_loss(
    contract: Contract, index: int, is_alike: Callable[[Tensor, Tensor], bool], alone: Tensor, loss: Tensor
) -> None:
    """Raise ModelError if the loss of a micro-batch is another one than when its forward pass ran alone."""
    if loss.is_meta or alone.isnan().all() or is_alike(alone, loss.cpu()):
        return
    raise ModelError(
        f"the loss of micro-batch {index + 1} is {loss.item():.7g} where its forward pass takes turns with "
        f"others, layer by layer, and {alone.item():.7g} where it runs alone: forward reads something that another "
        f"micro-batch's has written (attributes that it sets: {contract.written()}), or draws random numbers of generators "
        "that are not torch's, Python's or NumPy's own. Nothing has been updated. Pass such values as arguments and "
        "results: docs/contract.md."
    )
