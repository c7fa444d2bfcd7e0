"""What the first steps of an engine show of its model, and of what the program makes its losses."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from harmony_ds.model.contract import Contract, is_hook
from harmony_ds.model.own_settings import Key
from harmony_ds.step.pending_micro_batch import PendingMicroBatch

_logger = logging.getLogger("harmony_ds")


@dataclass(slots=True)
class FirstSteps:
    """What the first steps of an engine have shown of its model.

    Attributes:
        grouping_is_exact: micro-batches that ran together have given the losses that they give alone.
        recomputation_is_exact: layers have given the same when they ran again after other micro-batches had run.
        loss_uses_non_outputs: whether the program makes its losses of more than the model's outputs; by the hooks and
            attributes in which forward leaves tensors (see `Contract.leaves_side_tensors`). Without an entry it is not
            known yet: such micro-batches run at their calls, so that hooks and attributes hold what is theirs when the
            program makes its loss.
    """

    grouping_is_exact: bool = False
    recomputation_is_exact: bool = False
    loss_uses_non_outputs: dict[frozenset[Key], bool] = field(default_factory=dict)
    logged_forward_at_calls: bool = False

    def note_what_losses_use(self, contract: Contract, micro_batches: Sequence[PendingMicroBatch]) -> None:
        """Note whether losses of micro-batches that ran at their calls are made of their outputs alone."""
        tried = [pending for pending in micro_batches if pending.shows_what_losses_use]
        left = contract.leaves_side_tensors
        if not tried or not left:
            return
        uses_non_outputs = any(pending.uses_non_outputs for pending in tried)
        known = self.loss_uses_non_outputs
        hooks = {key for key in left if is_hook(key)}
        if hooks and not uses_non_outputs and False not in known.values():
            _logger.warning(
                "micro-batches are grouped from now on, and the model has forward hooks (%s), that run when the step runs: "
                "a value that a hook keeps is of an earlier step when the program computes a loss. If the loss uses such "
                "values (without their graphs), let the model return them: docs/loops.md.",
                contract.name_all(hooks),
            )
        known[left] = uses_non_outputs
        if uses_non_outputs:
            _logger.warning(
                "forward hooks or attributes keep tensors (%s), and the loss is made of more than the model's outputs: the "
                "forward pass of each micro-batch runs alone, and swaps in packs that do not stay on the device. To keep "
                "micro-batches grouped, let the model return what the loss is made of: docs/loops.md.",
                contract.name_all(left),
            )
