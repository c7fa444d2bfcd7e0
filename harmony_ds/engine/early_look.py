"""Losses and outputs that are looked at before their boundary: right, and slow."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import torch


class EarlyLooks:
    """Warns of the first."""

    def __init__(self) -> None:
        self._warned = False

    def warn(self) -> None:
        """There is one."""
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            "a loss or an output was looked at before its accumulation boundary, so this micro-batch's forward "
            "pass swapped the whole model in for itself. The value is right. To keep micro-batches grouped, look at "
            "losses after engine.step(), keep sums out of place (total = total + loss.detach()), or use "
            "engine.train_batch().",
            RuntimeWarning,
            stacklevel=_users_frame(),
        )


def _users_frame() -> int:
    """The stack level, as seen from the caller of `warnings.warn`, of the innermost line that is the user's own."""
    ours = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent))
    level = 1
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
        level += 1
    return max(level - 1, 1)
