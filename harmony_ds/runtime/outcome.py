"""What came of a run of the executor."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from harmony_ds.offload.updater import GradientNorm


@dataclass(slots=True)
class Outcome:
    """What is known of a step, from its begin on.

    Attributes:
        norm: of all gradients; promised when the step returns.
        overflow: whether its updates were skipped, because gradients were not finite.
        updates_issued: packs whose weights it has changed, or will.
        others_update: whether other processes may change weights, whatever becomes of the step here.
    """

    norm: Future[GradientNorm] | None = None
    overflow: bool = False
    updates_issued: int = 0
    others_update: bool = False
