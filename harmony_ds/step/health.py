"""Whether an engine can go on: the one place that knows."""

from __future__ import annotations

from harmony_ds.distributed import SingleProcess
from harmony_ds.errors import EngineFailedError, UsageError
from harmony_ds.optim.updater import Updater

DESTROYED = (
    "this engine has been destroyed, and its model is a plain one again: to train it, call harmony_ds.initialize."
)


TAKEN_OVER = (
    "a later engine has taken this engine's model over: harmony_ds.initialize was called for the model again while nothing "
    "was queued here. Use that engine."
)


class EngineHealth:
    """State of an engine as a whole: usable; failed, for good; or destroyed.

    Attributes:
        is_destroyed: whether `destroy` has been called, or the engine has gone with its last reference.
    """

    def __init__(self, updater: Updater, world: SingleProcess) -> None:
        self._updater = updater
        self._world = world
        self._failed: str | None = None
        self.is_destroyed = False
        self._end = DESTROYED

    @property
    def failed(self) -> str | None:
        """The reason why nothing can be trained any more; None: training can go on."""
        failure = self._updater.failure
        if self._failed is None and failure is not None:
            self._failed = f"the background update failed: {failure!r}"
        return self._failed

    def fail(self, why: str) -> None:
        """Run nothing from now on, in no process: some layers were updated and others not."""
        self._failed = why
        self._world.give_up(f"it cannot go on: {why}")

    def hand_over(self) -> None:
        """Note that a later engine gets the model, and this one is about to be destroyed."""
        self._end = TAKEN_OVER

    def check_usable(self) -> None:
        """Raise EngineFailedError after a failure that left some layers updated and others not.

        A failure of the background update that has not been raised yet surfaces as itself first.
        """
        self.check_alive()
        self._updater.raise_failure()
        if self.failed is not None:
            raise EngineFailedError(
                f"this engine cannot go on: {self.failed}. Some layers were updated and others not. Build a new engine "
                "and load the last checkpoint."
            )

    def check_alive(self) -> None:
        """Raise UsageError after `destroy`."""
        if self.is_destroyed:
            raise UsageError(self._end)
