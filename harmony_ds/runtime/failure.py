"""Where a run has failed: which micro-batch, and in which layer, for the note that its error gets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FailedCall:
    """A layer call that has raised an error, which the model's code may have caught since.

    Attributes:
        error_id: of the error, which is not kept: its traceback holds tensors.
    """

    layer: int
    error_id: int


@dataclass(frozen=True, slots=True)
class TaskFailure:
    """A micro-batch's task that has raised an error.

    Attributes:
        micro_batch: the number of the micro-batch in its step, from 0.
        layer: that raised it; None: code between layers, the loss, or not known.
    """

    micro_batch: int
    layer: int | None
