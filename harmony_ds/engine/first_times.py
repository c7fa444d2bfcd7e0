"""What is right, and hardly meant: warned of the first time."""

from __future__ import annotations

import inspect
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


class FirstTimes:
    """Warns once of each."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def warn(self, of: str, text: str | None = None) -> None:
        """Says `text` (`of` itself, if it is all there is to say), unless it was warned of that before."""
        if of in self._warned:
            return
        self._warned.add(of)
        warnings.warn(of if text is None else text, RuntimeWarning, stacklevel=_users_frame())


def _users_frame() -> int:
    """The stack level, as seen from the caller of `warnings.warn`, of the innermost line that is the user's own."""
    ours = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent))
    level = 1
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
        level += 1
    return max(level - 1, 1)
