"""Warnings of programs that are right and hardly meant so, each said once."""

from __future__ import annotations

import logging
import warnings

from harmony_ds.step.calling_line import calling_line

EARLY_READ = (
    "a loss or an output was looked at before its step (loss.item(), print(loss), an accuracy): the engine had to run this "
    "micro-batch's forward pass at once and alone, and swapped in for it what does not stay on the device. The value "
    "is right; it costs time. To avoid it, read losses after engine.step(), sum them by total = total + loss.detach(), or "
    "use engine.train_batch()."
)
NO_ROOM_BESIDE_EARLY = (
    "losses or outputs that were looked at before their step keep their micro-batches on the device: beside them, a task "
    "of this step takes %s bytes of device memory, more than plans have (%s bytes), and may run out of it. Read losses "
    "after engine.step(), or raise harmony.device_memory_gib. Said once."
)
DIVIDED_TWICE = (
    "a loss was divided by gradient_accumulation_steps by hand, and its backward() divides gradients by them once more, as "
    "DeepSpeed's engine does: leave the division to the engine (loss.backward(), or engine.backward(loss))."
)
NOTHING_PROPAGATED = (
    "engine.step() at a boundary updates nothing: of none of the step's micro-batches a loss was propagated back from. "
    "Call engine.backward(loss) for each of them before step()."
)
PAST_THE_ENGINE = (
    "a step updates weights from gradients that the program's own backward passes have left, and from none of engine(...): "
    "where a loop calls model(...) instead of engine(...), the model runs on the host, where its weights are, and "
    "loss.backward() does not divide gradients by gradient_accumulation_steps. Call engine(...), and engine.backward(loss)."
)
DROPPED = (
    "zero_grad() within a step drops the gradients of its micro-batches so far, as in plain PyTorch. If they are meant to "
    "add up, which they go on to do in DeepSpeed's ZeRO-2, leave it out: engine.step() drops them at each boundary."
)
SKIPPED = (
    "optimizer step %d was skipped, and no weight has changed: its gradients hold inf or NaN. Either a loss was not "
    "finite, or its gradients overflowed: check the data, the learning rate and gradient_clipping. Said once: "
    "engine.skipped_steps counts them."
)
SKIPPED_AT_SCALE = (
    "optimizer step %d was skipped: its gradients hold inf or NaN. With a dynamic loss scale that is how the scale is "
    "found; steps that go on being skipped mean a loss that is not finite. Said once: engine.skipped_steps counts them."
)
NOT_FINITE = (
    "the gradients of optimizer step %d hold inf or NaN (norm %s). Either a loss was not finite, or its gradients "
    "overflowed. The weights were updated from them, so they hold NaN now: load a checkpoint from before that step, and "
    "check the data, the learning rate and gradient_clipping. Said once."
)
_logger = logging.getLogger("harmony_ds")


class OneTimeWarnings:
    """The warnings that have been given; each is given once."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def warn(self, text: str) -> None:
        """Warn of what the innermost line of the user's own code does."""
        if self._is_new(text):
            warnings.warn(text, RuntimeWarning, stacklevel=calling_line()[2])

    def log(self, text: str, *values: object) -> None:
        """Log a warning of what has happened in training, whichever line is running."""
        if self._is_new(text):
            _logger.warning(text, *values)

    def _is_new(self, text: str) -> bool:
        new = text not in self._given
        self._given.add(text)
        return new
