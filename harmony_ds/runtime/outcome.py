"""What one run of a step has done to weights so far, and what is known of its gradients."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from harmony_ds.optim.updater import GradientNorm


@dataclass(slots=True)
class Outcome:
    """What a run has updated so far, and the norm of its gradients.

    Attributes:
        norm: of all gradients; promised when the step returns.
        may_skip: whether its updates are skipped if gradients turn out not to be finite.
        updates_issued: packs whose weights it has changed, or will.
        peers_update: whether other processes may change weights, though the step fails here.
    """

    norm: Future[GradientNorm] | None = None
    may_skip: bool = False
    updates_issued: int = 0
    peers_update: bool = False

    @property
    def overflow(self) -> bool:
        """Whether its updates were skipped; waits for the norm if they may have been.

        Raises:
            BaseException: what has ended the update thread before the norm was known.
        """
        return self.may_skip and self.norm is not None and self.norm.result().overflow
