"""Checks of a step: all processes take the same one; no micro-batch of the first reads what another one has written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
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
from harmony_ds.profiling.sample import Sample
from harmony_ds.step.runner import Runner
from harmony_ds.step.ticket import LossTerms, QueuedMicroBatch

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


def prove(
    runner: Runner,
    losses: Sequence[LossTerms],
    as_called: Callable[[QueuedMicroBatch], AbstractContextManager[None]],
    sample_of: Callable[[QueuedMicroBatch], Sample],
) -> bool:
    """Run the forward passes of `losses` alone and in order.

    In the step that follows, where they take turns layer by layer, their losses must be the same, or the step is refused
    before anything is updated.

    Returns:
        Whether that will prove it; else the next step is to try.
    """
    world, contract, joins_calls = runner.runtime.world, runner.runtime.contract, runner.planner.together > 1
    tickets = [ticket for loss in losses for ticket in loss.tickets]
    unlike = runner.at_their_calls or any(ticket.micro_batch.forwarded for ticket in tickets)
    if world.any("compare losses", unlike):
        return False
    if world.any("draw other numbers", joins_calls and runner.runtime.joins.are_random):  # not single calls' losses
        return True
    unseen, collected = False, dict[QueuedMicroBatch, Any]()
    try:
        with runner.alone() as loss_of:
            for ticket in tickets:
                sample = sample_of(ticket)
                if len(ticket.loss.tickets) > 1:
                    sample = replace(sample, surrogate_loss=partial(_collect, ticket, collected))
                with as_called(ticket):
                    loss = loss_of(sample)
                if loss is not None:
                    alike = close if joins_calls else comparison(runner.runtime.device.torch_device)
                    ticket.loss.expected = partial(_check, contract, ticket.micro_batch.index, alike, loss)
    except UnseenError:  # the step will find it, too, and measure anew
        unseen = True
    return not world.any("compare losses again", unseen)  # all processes try again, or none


def _collect(ticket: QueuedMicroBatch, collected: dict[QueuedMicroBatch, Any], outputs: Any) -> Tensor | None:
    """Add the outputs of `ticket` to those collected; return the loss that it shares, once they are complete."""
    collected[ticket] = map_tensors(Tensor.detach, outputs)
    if any(one not in collected for one in ticket.loss.tickets):
        return None
    return ticket.loss.sum(collected, apart=True)[0]


def _check(
    contract: Contract, index: int, alike: Callable[[Tensor, Tensor], bool], alone: Tensor, loss: Tensor
) -> None:
    """Raise ModelError if the two differ."""
    if loss.is_meta or alone.isnan().all() or alike(alone, loss.cpu()):
        return
    raise ModelError(
        f"the loss of micro-batch {index} of the first step is {loss.item():.7g} where its forward pass takes turns with "
        f"others, layer by layer, and {alone.item():.7g} where it runs alone: forward reads something that another "
        f"micro-batch's has written (attributes that it sets: {contract.written()}). Nothing has been updated. Pass such "
        "values as arguments and results: docs/contract.md."
    )
