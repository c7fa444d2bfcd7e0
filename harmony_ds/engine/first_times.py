"""What is right, and hardly meant: warned of the first time."""

from __future__ import annotations

import inspect
import logging
import warnings
from pathlib import Path

import torch

EARLY_LOOK = (
    "a loss or an output was looked at before its accumulation boundary, so this micro-batch's forward pass swapped the "
    "whole model in for itself. The value is right. To keep micro-batches grouped, look at losses after engine.step(), "
    "keep sums out of place (total = total + loss.detach()), or use engine.train_batch()."
)
DIVIDED_TWICE = (
    "a loss was divided by gradient_accumulation_steps by hand, and its backward() divides gradients by them once more, as "
    "DeepSpeed's engine does: leave the division to the engine (loss.backward(), or engine.backward(loss))."
)
SKIPPED = (
    "optimizer step %d was skipped: its gradients hold inf or NaN. With a dynamic loss scale that is how the scale is "
    "found; steps that go on being skipped mean a loss that is not finite. Said once: engine.skipped_steps counts them."
)
NOT_FINITE = (
    "the gradients of optimizer step %d are not finite (norm %s), so its loss was not, or overflowed on its way back, and "
    "the weights have taken that: go back to a checkpoint, and look at the data, the learning rate and gradient_clipping. "
    "Said once."
)
_logger = logging.getLogger("harmony_ds")


class FirstTimes:
    """Warns once of each."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def warn(self, text: str) -> None:
        """Of what the user's own line does."""
        if self._is_first(text):
            warnings.warn(text, RuntimeWarning, stacklevel=_users_frame())

    def log(self, text: str, *values: object) -> None:
        """Of what comes of training, whatever line it comes behind."""
        if self._is_first(text):
            _logger.warning(text, *values)

    def _is_first(self, text: str) -> bool:
        first = text not in self._warned
        self._warned.add(text)
        return first


def _users_frame() -> int:
    """The stack level, as seen from the caller of `warnings.warn`, of the innermost line that is the user's own."""
    ours = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent))
    level = 1
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
        level += 1
    return max(level - 1, 1)
